// A driver for one device, on which work is done when the call returns.
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>

#include "emulated_grid.h"
#include "memory.h"

namespace {

int context;
CUcontext the_context() { return reinterpret_cast<CUcontext>(&context); }

CUresult ctx_get_current(CUcontext *current) {
  *current = the_context();
  return CUDA_SUCCESS;
}
CUresult ctx_push_current(CUcontext) { return CUDA_SUCCESS; }
CUresult ctx_get_device(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult ctx_enable_peer_access(CUcontext, unsigned) { return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED; }

// One whose launches overlap, and that reads no ordinary memory.
CUresult device_get_attribute(int *value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return CUDA_SUCCESS;
}

CUresult launch_kernel(const CUlaunchConfig *config, CUfunction function, void **params, void **) {
  const auto kernel = reinterpret_cast<emulated::Kernel>(function);
  return static_cast<CUresult>(emulated::run_grid(kernel, params[0], config->gridDimX, config->blockDimX));
}

CUresult memcpy_async(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream) {
  std::memcpy(reinterpret_cast<void *>(dst), reinterpret_cast<const void *>(src), nbytes);
  return CUDA_SUCCESS;
}

// Not for the NULL stream, nor for the one behind its other handle.
CUresult memcpy_batch_async(CUdeviceptr *dst, CUdeviceptr *src, size_t *nbytes, size_t count, CUmemcpyAttributes *,
                            size_t *, size_t, size_t *, CUstream stream) {
  if (reinterpret_cast<uintptr_t>(stream) <= 1) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) memcpy_async(dst[i], src[i], nbytes[i], stream);
  return CUDA_SUCCESS;
}

std::atomic<size_t> pointers_asked_about{0};

CUresult pointer_get_attributes(unsigned count, CUpointer_attribute *names, void **values, CUdeviceptr pointer) {
  ++pointers_asked_about;
  const emulated::Allocation found = emulated::find_allocation(pointer);
  const bool exists = found.nbytes != 0;
  for (unsigned i = 0; i < count; ++i) {
    switch (names[i]) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned *>(values[i]) = !exists              ? 0
                                              : found.is_on_device ? CU_MEMORYTYPE_DEVICE
                                                                   : CU_MEMORYTYPE_HOST;
        break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int *>(values[i]) = exists ? 0 : -2;
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *static_cast<CUdeviceptr *>(values[i]) = found.start;
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *static_cast<size_t *>(values[i]) = found.nbytes;
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

CUresult stream_get_ctx(CUstream, CUcontext *of_stream) { return ctx_get_current(of_stream); }
CUresult stream_is_capturing(CUstream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult thread_exchange_stream_capture_mode(CUstreamCaptureMode *) { return CUDA_SUCCESS; }

const struct {
  const char *name;
  void *function;
} kFunctions[] = {
    {"cuCtxGetCurrent", reinterpret_cast<void *>(ctx_get_current)},
    {"cuCtxPushCurrent", reinterpret_cast<void *>(ctx_push_current)},
    {"cuCtxPopCurrent", reinterpret_cast<void *>(ctx_get_current)},
    {"cuCtxGetDevice", reinterpret_cast<void *>(ctx_get_device)},
    {"cuCtxEnablePeerAccess", reinterpret_cast<void *>(ctx_enable_peer_access)},
    {"cuDeviceGetAttribute", reinterpret_cast<void *>(device_get_attribute)},
    {"cuLaunchKernelEx", reinterpret_cast<void *>(launch_kernel)},
    {"cuMemcpyAsync", reinterpret_cast<void *>(memcpy_async)},
    {"cuMemcpyBatchAsync", reinterpret_cast<void *>(memcpy_batch_async)},
    {"cuPointerGetAttributes", reinterpret_cast<void *>(pointer_get_attributes)},
    {"cuStreamGetCtx", reinterpret_cast<void *>(stream_get_ctx)},
    {"cuStreamIsCapturing", reinterpret_cast<void *>(stream_is_capturing)},
    {"cuThreadExchangeStreamCaptureMode", reinterpret_cast<void *>(thread_exchange_stream_capture_mode)},
};

}  // namespace

size_t kvbm_emulated_pointers_asked_about() { return pointers_asked_about; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  *result = cudaDriverEntryPointSymbolNotFound;
  for (const auto &known : kFunctions) {
    if (std::strcmp(name, known.name) != 0) continue;
    *function = known.function;
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}
