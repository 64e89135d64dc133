// The seam between the checked API and what moves the bytes. cuda/*.cu implement the device side, or stub.cpp where
// there is no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvbm_kernels.h"
#include "plan.h"
#include "token_rows.h"

namespace kvbm {

// Pieces of a batch copy: nbytes[i], or the same size for all where nbytes is null.
struct Pieces {
  const void *const *src;
  void *const *dst;
  const size_t *nbytes;
  size_t size_each;
  size_t count;

  size_t size(size_t i) const { return nbytes ? nbytes[i] : size_each; }
};

namespace host {

// Moves everything, then returns. num_threads as in the header; no failure is possible.
void copy(Plan plan, int num_threads);
void copy_batch(const Pieces &pieces, int num_threads);
void move_rows(const TokenRows &call, int num_threads);

// What copy() would do: the fields of *out that are about this engine.
void explain(Plan plan, int num_threads, kvbm_kernels_copy_explanation *out);

}  // namespace host

namespace device {

enum class Tables {
  kHost,          // plan.src.bases and plan.dst.bases can be read here and now
  kDeviceVisible  // only the kernel may read them, when the stream gets there
};

// What became of a batch beside its status.
struct BatchReport {
  size_t failed;  // the piece that was refused; as it was if none in particular
  int routes;     // KVBM_KERNELS_ROUTE_* that started work
};

// Each returns a status code, and explains a failure through fail() (status.h) under the name of the function `fn`.
int copy(const char *fn, const Plan &plan, Tables tables, int max_sms, kvbm_kernels_stream_t stream);
int memcpy_batch(const char *fn, const Pieces &pieces, int mode, kvbm_kernels_stream_t stream, BatchReport *report);
int move_rows(const char *fn, const TokenRows &call, kvbm_kernels_stream_t stream);
int store_u32(const char *fn, uint32_t *const *dsts, const uint32_t *values, size_t n, kvbm_kernels_stream_t stream);

// What an explanation cannot see in addresses that nobody has to have allocated.
struct Assumed {
  bool src_on_host, dst_on_host;
  int max_sms;
};

// What copy() from host tables would launch: the fields of *out that are about this engine. No driver is asked.
int explain(const char *fn, const Plan &plan, const Assumed &assumed, kvbm_kernels_copy_explanation *out);

// KVBM_KERNELS_MEMORY_* of an address, and the device of device memory.
int memory_kind(const void *pointer, int *device);

bool is_stub_build();
bool has_memcpy_batch_async();
const char *archs();
int runtime_version();
int driver_version();
int num_devices();

// The CUDA runtime's name and text of a code that status.cpp does not list, or null.
const char *status_name(int status);
const char *status_string(int status);

}  // namespace device
}  // namespace kvbm
