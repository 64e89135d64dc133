// Append, gather and small words on a stream.
#include "engine.h"
#include "runtime.h"
#include "status.h"

namespace kvbm::device {
namespace {

int refuse(const char *fn) {
  const Driver &d = driver();
  if (d.status) return fail(d.status, fn, "there is no usable CUDA driver");
  return fail(KVBM_KERNELS_ERROR_NOT_SUPPORTED, fn, "there is no kernel for this yet; use the host functions");
}

}  // namespace

int move_rows(const char *fn, const TokenRows &, kvbm_kernels_stream_t) { return refuse(fn); }
int store_u32(const char *fn, uint32_t *const *, const uint32_t *, size_t, kvbm_kernels_stream_t) { return refuse(fn); }

}  // namespace kvbm::device
