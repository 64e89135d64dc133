// Words of 32 bits from a launch's parameters to where they belong.
#include <algorithm>

#include "engine.h"
#include "kernel.cuh"
#include "launcher.h"
#include "peer.h"
#include "status.h"

namespace kvbm::device {
namespace {

constexpr uint32_t kThreads = 128;

template <uint32_t kWords>
struct Stores {
  static constexpr uint32_t kMost = kWords;
  uint32_t n;
  uint32_t values[kWords];
  uint32_t *dsts[kWords];
};
using FewStores = Stores<32>;
using ManyStores = Stores<kLargeParams / sizeof(uint32_t *) / 3 * 2 - 1>;
static_assert(sizeof(ManyStores) <= kLargeParams, "past the parameter limit");

template <typename P>
__global__ void __launch_bounds__(kThreads) store_words(const P __grid_constant__ p) {
  wait_for_previous();
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < p.n) *p.dsts[i] = p.values[i];
}

template <typename P>
[[gnu::noinline]] int store_part(const Driver &driver, bool overlaps, uint32_t *const *dsts, const uint32_t *values,
                                 size_t n, kvbm_kernels_stream_t stream) {
  P params;
  params.n = static_cast<uint32_t>(n);
  std::copy(values, values + n, params.values);
  std::copy(dsts, dsts + n, params.dsts);
  return launch(driver, reinterpret_cast<const void *>(store_words<P>), (params.n - 1) / kThreads + 1, kThreads,
                overlaps, &params, stream);
}

}  // namespace

int store_u32(const char *fn, uint32_t *const *dsts, const uint32_t *values, size_t n, kvbm_kernels_stream_t stream) {
  const Driver &d = driver();
  if (d.status) return fail(d.status, fn, "there is no usable CUDA driver");
  const StreamContext context(d, stream);
  if (context.status()) return fail(context.status(), fn, "the stream's device cannot be used");

  const bool any_memory = reads_pageable_memory(d, context.device());
  Memory memory{};
  for (size_t i = 0; i < n && !any_memory; ++i) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(dsts[i]);
    if (memory.holds(address, sizeof(uint32_t))) continue;
    memory = memory_at(d, address);
    if (memory.kind != Memory::kPageable) {
      if (int status = reach(fn, "destination", d, context, memory, address)) return status;
      continue;
    }
    return fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn,
                "dsts[%zu] is in ordinary host memory, expected device memory or pinned host memory", i);
  }
  const bool overlaps = launches_overlap(d, context.device());
  for (size_t first = 0; first < n; first += ManyStores::kMost) {
    const size_t part = std::min<size_t>(n - first, ManyStores::kMost);
    const auto store = part <= FewStores::kMost ? store_part<FewStores> : store_part<ManyStores>;
    if (int status = store(d, overlaps, dsts + first, values + first, part, stream)) {
      return fail(status, fn, "CUDA refused the launch");
    }
  }
  return 0;
}

}  // namespace kvbm::device
