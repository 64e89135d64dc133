#include <pthread.h>

#include "engine.h"
#include "runtime.h"

namespace kvbm::device {
namespace {

// Undoes what a failing runtime call of ours did to the runtime's last error.
class KeepLastError {
 public:
  KeepLastError() : before_(cudaPeekAtLastError()) {}
  ~KeepLastError() {
    if (before_ == cudaSuccess) cudaGetLastError();
  }

 private:
  cudaError_t before_;
};

template <typename Function>
int find(const char *name, unsigned version, Function *function) {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableLegacyStream, &result);
#else
  static_cast<void>(version);
  const cudaError_t status = cudaGetDriverEntryPoint(name, &found, cudaEnableLegacyStream, &result);
#endif
  if (status != cudaSuccess) return status;
  if (result != cudaDriverEntryPointSuccess || !found) return cudaErrorInsufficientDriver;
  *function = reinterpret_cast<Function>(found);
  return 0;
}

int find_all(Driver *d) {
  const KeepLastError keep;
  constexpr unsigned kVersion = 12000;
  if (int status = cudaDriverGetVersion(&d->version)) return status;
  if (d->version == 0) return cudaErrorInsufficientDriver;
  if (int status = find("cuCtxGetCurrent", kVersion, &d->ctx_get_current)) return status;
  if (int status = find("cuCtxPushCurrent", kVersion, &d->ctx_push_current)) return status;
  if (int status = find("cuCtxPopCurrent", kVersion, &d->ctx_pop_current)) return status;
  if (int status = find("cuCtxGetDevice", kVersion, &d->ctx_get_device)) return status;
  if (int status = find("cuCtxEnablePeerAccess", kVersion, &d->ctx_enable_peer_access)) return status;
  if (int status = find("cuDeviceGetAttribute", kVersion, &d->device_get_attribute)) return status;
  if (int status = find("cuLaunchKernelEx", kVersion, &d->launch_kernel)) return status;
  if (int status = find("cuMemcpyAsync", kVersion, &d->memcpy_async)) return status;
  if (int status = find("cuPointerGetAttributes", kVersion, &d->pointer_get_attributes)) return status;
  if (int status = find("cuStreamGetCtx", kVersion, &d->stream_get_ctx)) return status;
  if (int status = find("cuStreamIsCapturing", kVersion, &d->stream_is_capturing)) return status;
  if (int status = find("cuThreadExchangeStreamCaptureMode", kVersion, &d->thread_exchange_stream_capture_mode)) {
    return status;
  }
#if CUDART_VERSION >= 12080
  // Asked for by the version whose signature this is: newer drivers still answer to it.
  if (find("cuMemcpyBatchAsync", 12080, &d->memcpy_batch_async)) d->memcpy_batch_async = nullptr;
#endif
  return 0;
}

Driver the_driver{};
pthread_once_t the_driver_once = PTHREAD_ONCE_INIT;

}  // namespace

const Driver &driver() {
  pthread_once(&the_driver_once, [] { the_driver.status = find_all(&the_driver); });
  return the_driver;
}

StreamContext::StreamContext(const Driver &driver, kvbm_kernels_stream_t stream) : driver_(driver) {
  CUcontext current = nullptr;
  if (driver.ctx_get_current(&current) != CUDA_SUCCESS) current = nullptr;
  CUcontext wanted = nullptr;
  if (!is_default_stream(stream) && driver.stream_get_ctx(stream, &wanted) != CUDA_SUCCESS) wanted = nullptr;
  if (wanted && wanted != current) {
    status_ = driver.ctx_push_current(wanted);
    pushed_ = status_ == 0;
  } else if (!current) {
    // The first use of CUDA on this thread: let the runtime make its current device's context current, as any of its
    // own launches would.
    const KeepLastError keep;
    int device = 0;
    status_ = cudaGetDevice(&device);
    if (status_ == 0) status_ = cudaSetDevice(device);
    // Before CUDA 12, choosing a device did not make its context.
    if (status_ == 0 && (driver.ctx_get_current(&current) != CUDA_SUCCESS || !current)) status_ = cudaFree(nullptr);
  }
  if (status_ == 0) status_ = driver.ctx_get_device(&device_);
}

StreamContext::~StreamContext() {
  CUcontext popped;
  if (pushed_) driver_.ctx_pop_current(&popped);
}

Memory memory_at(const Driver &driver, uintptr_t address) {
  unsigned type = 0;
  int ordinal = 0;
  CUdeviceptr start = 0;
  size_t nbytes = 0;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                 CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  void *values[] = {&type, &ordinal, &start, &nbytes};
  const bool known = driver.pointer_get_attributes(4, names, values, address) == CUDA_SUCCESS && type != 0;
  Memory memory{Memory::kPageable, ordinal, address, address};
  if (!known) return memory;
  memory.kind = type == CU_MEMORYTYPE_HOST ? Memory::kHost : Memory::kDevice;
  if (start <= address && address - start < nbytes) {
    memory.start = start;
    memory.end = start + nbytes;
  }
  return memory;
}

int function_of(const void *kernel, CUfunction *function) {
  const KeepLastError keep;
  return cudaGetFuncBySymbol(function, kernel);
}

bool reads_pageable_memory(const Driver &driver, CUdevice device) {
  int value = 0;
  return driver.device_get_attribute(&value, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, device) == CUDA_SUCCESS &&
         value != 0;
}

int memory_kind(const void *pointer, int *device) {
  const Driver &d = driver();
  if (d.status) return KVBM_KERNELS_MEMORY_PAGEABLE;
  const Memory memory = memory_at(d, reinterpret_cast<uintptr_t>(pointer));
  *device = memory.device;
  return memory.kind == Memory::kDevice ? KVBM_KERNELS_MEMORY_DEVICE
         : memory.kind == Memory::kHost ? KVBM_KERNELS_MEMORY_PINNED
                                        : KVBM_KERNELS_MEMORY_PAGEABLE;
}

bool is_stub_build() { return false; }
const char *archs() { return KVBM_CUDA_ARCHS; }
int runtime_version() { return CUDART_VERSION; }
int driver_version() { return driver().version; }

int num_devices() {
  const KeepLastError keep;
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

const char *status_name(int status) {
  const char *name = cudaGetErrorName(static_cast<cudaError_t>(status));
  return name && name[0] != 'u' ? name : nullptr;
}

const char *status_string(int status) {
  return status_name(status) ? cudaGetErrorString(static_cast<cudaError_t>(status)) : nullptr;
}

}  // namespace kvbm::device
