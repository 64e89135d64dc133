#include "status.h"

#include <cstdarg>
#include <cstdio>

#include "engine.h"
#include "kvbm_kernels.h"

namespace kvbm {
namespace {

thread_local char last_message[512];

struct Status {
  int code;
  const char *name;
  const char *text;
};

// The codes this library has a meaning for, and those a machine without a driver or device gives. They are listed here
// so that both builds answer alike; the CUDA build asks the runtime about any other.
constexpr Status kStatuses[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {34, "cudaErrorStubLibrary", "this build of kvbm_kernels has no CUDA; the host functions work"},
    {35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {801, "cudaErrorNotSupported", "operation not supported"},
};

const Status *find(int code) {
  for (const Status &status : kStatuses) {
    if (status.code == code) return &status;
  }
  return nullptr;
}

}  // namespace

int fail(int status, const char *fn, const char *format, ...) {
  const int prefix = std::snprintf(last_message, sizeof last_message, "%s: ", fn);
  va_list args;
  va_start(args, format);
  std::vsnprintf(last_message + prefix, sizeof last_message - static_cast<size_t>(prefix), format, args);
  va_end(args);
  return status;
}

}  // namespace kvbm

const char *kvbm_kernels_last_error_message(void) { return kvbm::last_message; }

const char *kvbm_kernels_status_name(int status) {
  if (const kvbm::Status *known = kvbm::find(status)) return known->name;
  const char *name = kvbm::device::status_name(status);
  return name ? name : "unrecognized";
}

const char *kvbm_kernels_status_string(int status) {
  if (const kvbm::Status *known = kvbm::find(status)) return known->text;
  const char *text = kvbm::device::status_string(status);
  return text ? text : "unrecognized";
}
