// What the engine uses of CUDA. All differences between toolkit versions are here and in runtime.cu.
//
// Work goes through driver entry points found at run time: they return their errors and touch nothing else, so an error
// that somebody else left in the runtime stays theirs, and one of ours never lingers.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kvbm_kernels.h"

namespace kvbm::device {

#if CUDART_VERSION >= 12080
using MemcpyBatchAsync = PFN_cuMemcpyBatchAsync_v12080;
#else
using MemcpyBatchAsync = void *;
#endif

struct Driver {
  int status;   // 0, or why there is no usable driver
  int version;  // the newest CUDA it supports
  PFN_cuCtxGetCurrent_v4000 ctx_get_current;
  PFN_cuCtxPushCurrent_v4000 ctx_push_current;
  PFN_cuCtxPopCurrent_v4000 ctx_pop_current;
  PFN_cuCtxGetDevice_v2000 ctx_get_device;
  PFN_cuCtxEnablePeerAccess_v4000 ctx_enable_peer_access;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute;
  PFN_cuLaunchKernelEx_v11060 launch_kernel;
  PFN_cuMemcpyAsync_v4000 memcpy_async;
  PFN_cuPointerGetAttributes_v7000 pointer_get_attributes;
  PFN_cuStreamGetCtx_v9020 stream_get_ctx;
  PFN_cuStreamIsCapturing_v10000 stream_is_capturing;
  PFN_cuThreadExchangeStreamCaptureMode_v10010 thread_exchange_stream_capture_mode;
  MemcpyBatchAsync memcpy_batch_async;  // null where this toolkit or this driver has none
};

const Driver &driver();

// Makes the stream's context current for as long as it lives.
class StreamContext {
 public:
  StreamContext(const Driver &driver, kvbm_kernels_stream_t stream);
  ~StreamContext();
  StreamContext(const StreamContext &) = delete;
  StreamContext &operator=(const StreamContext &) = delete;

  int status() const { return status_; }
  CUdevice device() const { return device_; }

 private:
  const Driver &driver_;
  int status_ = 0;
  bool pushed_ = false;
  CUdevice device_ = 0;
};

// What the driver knows about the allocation around an address.
struct Memory {
  enum Kind { kPageable, kHost, kDevice };
  Kind kind;
  int device;            // of kDevice; -1 where only that is known
  uintptr_t start, end;  // of the allocation; just the address asked about where the driver knows no more

  bool holds(uintptr_t address, size_t nbytes) const {
    return start <= address && address < end && nbytes <= end - address;
  }
};

Memory memory_at(const Driver &driver, uintptr_t address);

// The loaded form of a kernel, in the current context.
int function_of(const void *kernel, CUfunction *function);

// Whether kernels on this device may read memory that CUDA knows nothing of.
bool reads_pageable_memory(const Driver &driver, CUdevice device);

// NULL, and the handles that stand for a default stream, belong to no particular context.
inline bool is_default_stream(kvbm_kernels_stream_t stream) { return reinterpret_cast<uintptr_t>(stream) <= 2; }
inline bool is_legacy_stream(kvbm_kernels_stream_t stream) { return reinterpret_cast<uintptr_t>(stream) <= 1; }

}  // namespace kvbm::device
