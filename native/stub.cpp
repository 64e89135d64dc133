// The device side of the build without CUDA.
#include "cuda/explain.h"
#include "engine.h"
#include "status.h"

namespace kvbm::device {
namespace {

int refuse(const char *fn) {
  return fail(KVBM_KERNELS_ERROR_STUB_LIBRARY, fn, "this build of kvbm_kernels has no CUDA; use the host functions");
}

}  // namespace

int copy(const char *fn, const Plan &, Tables, int, kvbm_kernels_stream_t) { return refuse(fn); }
int memcpy_batch(const char *fn, const Pieces &, int, kvbm_kernels_stream_t, BatchReport *) { return refuse(fn); }

int explain(const char *fn, const Plan &plan, const Assumed &assumed, kvbm_kernels_copy_explanation *out) {
  return explain_launches(fn, plan, assumed, out);
}
int move_rows(const char *fn, const TokenRows &, kvbm_kernels_stream_t) { return refuse(fn); }
int store_u32(const char *fn, uint32_t *const *, const uint32_t *, size_t, kvbm_kernels_stream_t) { return refuse(fn); }

int memory_kind(const void *, int *) { return KVBM_KERNELS_MEMORY_PAGEABLE; }

bool is_stub_build() { return true; }
bool has_memcpy_batch_async() { return false; }
const char *archs() { return ""; }
int runtime_version() { return 0; }
int driver_version() { return 0; }
int num_devices() { return 0; }

const char *status_name(int) { return nullptr; }
const char *status_string(int) { return nullptr; }

}  // namespace kvbm::device
