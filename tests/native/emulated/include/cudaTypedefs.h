// The driver's functions that the engine looks up.
#pragma once

#include "cuda.h"

using PFN_cuCtxGetCurrent_v4000 = CUresult (*)(CUcontext *);
using PFN_cuCtxPushCurrent_v4000 = CUresult (*)(CUcontext);
using PFN_cuCtxPopCurrent_v4000 = CUresult (*)(CUcontext *);
using PFN_cuCtxGetDevice_v2000 = CUresult (*)(CUdevice *);
using PFN_cuCtxEnablePeerAccess_v4000 = CUresult (*)(CUcontext, unsigned);
using PFN_cuDeviceGetAttribute_v2000 = CUresult (*)(int *, CUdevice_attribute, CUdevice);
using PFN_cuLaunchKernelEx_v11060 = CUresult (*)(const CUlaunchConfig *, CUfunction, void **, void **);
using PFN_cuMemcpyAsync_v4000 = CUresult (*)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
using PFN_cuMemcpyBatchAsync_v12080 = CUresult (*)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *,
                                                   size_t *, size_t, size_t *, CUstream);
using PFN_cuPointerGetAttributes_v7000 = CUresult (*)(unsigned, CUpointer_attribute *, void **, CUdeviceptr);
using PFN_cuStreamGetCtx_v9020 = CUresult (*)(CUstream, CUcontext *);
using PFN_cuStreamIsCapturing_v10000 = CUresult (*)(CUstream, CUstreamCaptureStatus *);
using PFN_cuThreadExchangeStreamCaptureMode_v10010 = CUresult (*)(CUstreamCaptureMode *);
