// What the engine and its tests call of the runtime, with CUDA's own values.
#pragma once

#include "cuda.h"

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNotSupported = 801,
};
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
};
constexpr unsigned long long cudaEnableLegacyStream = 1;

enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
using cudaStream_t = CUstream;
constexpr unsigned cudaStreamNonBlocking = 1;
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(2))

cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult *result);
cudaError_t cudaGetFuncBySymbol(CUfunction *function, const void *symbol);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMalloc(void **start, size_t nbytes);
cudaError_t cudaMallocHost(void **start, size_t nbytes);
cudaError_t cudaFree(void *start);
cudaError_t cudaFreeHost(void *start);
cudaError_t cudaMemcpy(void *dst, const void *src, size_t nbytes, cudaMemcpyKind kind);
cudaError_t cudaMemset(void *start, int value, size_t nbytes);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetLastError();
const char *cudaGetErrorName(cudaError_t status);
const char *cudaGetErrorString(cudaError_t status);
