// The runtime, as far as the engine and its tests call it.
#include <cuda_runtime_api.h>

#include <cstring>

#include "memory.h"

namespace {

thread_local cudaError_t last_error;

}  // namespace

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetFuncBySymbol(CUfunction *function, const void *symbol) {
  *function = reinterpret_cast<CUfunction>(const_cast<void *>(symbol));
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  const cudaError_t status = last_error;
  last_error = cudaSuccess;
  return status;
}
const char *cudaGetErrorName(cudaError_t) { return "unrecognized error code"; }
const char *cudaGetErrorString(cudaError_t) { return "unrecognized error code"; }

cudaError_t cudaMalloc(void **start, size_t nbytes) {
  constexpr size_t kMemory = size_t{1} << 40;
  if (nbytes < kMemory && (*start = kvbm_emulated_malloc(nbytes, true))) return cudaSuccess;
  return last_error = cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocHost(void **start, size_t nbytes) {
  *start = kvbm_emulated_malloc(nbytes, false);
  return *start ? cudaSuccess : last_error = cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *start) {
  kvbm_emulated_free(start);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void *start) { return cudaFree(start); }

cudaError_t cudaMemset(void *start, int value, size_t nbytes) {
  std::memset(start, value, nbytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t nbytes, cudaMemcpyKind) {
  std::memcpy(dst, src, nbytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new char);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<char *>(stream);
  return cudaSuccess;
}
