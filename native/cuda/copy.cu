// Copies between views, on a stream.
#include "engine.h"
#include "explain.h"
#include "launcher.h"
#include "launches.h"
#include "peer.h"
#include "status.h"

namespace kvbm::device {
namespace {

// Where a side's rows are, judged by its first: a hint, but one that keeps a kernel off memory it cannot reach.
struct Place {
  uintptr_t address;  // that was asked about
  Memory memory;
  bool table_on_device = false;
};

Place place_of(const Driver &driver, const Side &side, Tables tables) {
  const auto at = [&](const void *pointer) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    return Place{address, memory_at(driver, address)};
  };
  if (tables == Tables::kDeviceVisible) {
    Place table = at(side.bases);
    table.table_on_device = table.memory.kind == Memory::kDevice;
    // In device memory only the kernel sees the pointers; then they are taken to be of device memory too.
    if (table.memory.kind != Memory::kHost) return table;
    // In pinned memory they may not have been written yet: whatever is there, the driver can be asked about it.
    Place rows = at(side.address(0, 0, 0));
    if (rows.memory.kind == Memory::kPageable) rows.memory.kind = Memory::kDevice, rows.memory.device = -1;
    return rows;
  }
  return at(side.address(0, 0, 0));
}

// By itself, so that only a copy that is carried out takes the room that the parameters need on the stack.
[[gnu::noinline]] int run(const char *fn, const Driver &driver, const StreamContext &context, Tables tables,
                          bool may_ask, Budget budget, kvbm_kernels_stream_t stream, const Plan &plan) {
  Launcher launcher(driver, context, stream);
  return Launches<Launcher>(fn, launcher, tables, budget, may_ask).run(in_launch_order(plan));
}

}  // namespace

int copy(const char *fn, const Plan &plan, Tables tables, int max_sms, kvbm_kernels_stream_t stream) {
  const Driver &d = driver();
  if (d.status) return fail(d.status, fn, "there is no usable CUDA driver; the host functions need none");
  const StreamContext context(d, stream);
  if (context.status()) return fail(context.status(), fn, "the stream's device cannot be used");

  const Place src = place_of(d, plan.src, tables), dst = place_of(d, plan.dst, tables);
  const bool src_is_pageable = src.memory.kind == Memory::kPageable;
  if ((src_is_pageable || dst.memory.kind == Memory::kPageable) && !reads_pageable_memory(d, context.device())) {
    return fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn,
                "the %s%s is ordinary host memory, expected device memory or pinned host memory",
                src_is_pageable ? "source" : "destination", tables == Tables::kDeviceVisible ? "'s pointer table" : "");
  }
  if (int status = reach(fn, "source", d, context, src.memory, src.address)) return status;
  if (int status = reach(fn, "destination", d, context, dst.memory, dst.address)) return status;
  const Budget budget = choose_budget(src.memory.kind != Memory::kDevice, dst.memory.kind != Memory::kDevice, max_sms);
  return run(fn, d, context, tables, dst.table_on_device, budget, stream, plan);
}

int explain(const char *fn, const Plan &plan, const Assumed &assumed, kvbm_kernels_copy_explanation *out) {
  return explain_launches(fn, plan, assumed, out);
}

}  // namespace kvbm::device
