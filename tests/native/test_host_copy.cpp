// The walk of the host engine, where strides are as large as the checks let them be. UndefinedBehaviorSanitizer sees
// what goes past 63 bits on the way.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "host/copy.h"

namespace {

using kvbm::Dim;
using kvbm::Plan;

constexpr size_t kRow = 64;
// One step of it fits, two do not.
constexpr int64_t kFar = int64_t{1} << 62;

int failures = 0;

// A plan with a row for each index of the dimensions; of most there is no memory.
Plan plan_of(void *const *dst, void *const *src, const Dim *dims, int num_dims) {
  Plan plan{};
  plan.num_blocks = plan.num_layers = plan.num_outer = 1;
  plan.dst.bases = dst;
  plan.src.bases = src;
  for (int i = 0; i < num_dims; ++i) plan.dims[i] = dims[i];
  plan.num_dims = num_dims;
  plan.segment_nbytes = kRow;
  plan.alignment = 16;
  return plan;
}

// Only the first row is moved, by looking past the end of what lies before it and behind it.
void the_end_of_a_far_dimension_is_not_stepped_over(const char *name, const Dim *dims, int num_dims, size_t total) {
  alignas(64) char from[2 * kRow], to[2 * kRow];
  for (size_t i = 0; i < sizeof from; ++i) from[i] = static_cast<char>(i + 1);
  std::memset(to, 0, sizeof to);
  void *dst = to, *src = from;
  const Plan plan = plan_of(&dst, &src, dims, num_dims);
  const kvbm::host::Mover mover(plan, total);
  kvbm::host::copy_range(plan, mover, 0, kRow);
  mover.end();
  bool same = std::memcmp(from, to, kRow) == 0;
  for (size_t i = kRow; i < sizeof to; ++i) same = same && to[i] == 0;
  if (same) return;
  std::printf("%s: not the first row and nothing else was copied\n", name);
  ++failures;
}

}  // namespace

int main() {
  const Dim far_both[] = {{2, kFar, kFar}};
  const Dim far_dst[] = {{2, kRow, kFar}};
  const Dim far_src[] = {{2, kFar, kRow}};
  const Dim far_outer[] = {{2, kFar, kFar}, {2, 2 * kRow, 2 * kRow}};
  const struct {
    const char *name;
    const Dim *dims;
    int num_dims;
  } cases[] = {{"both", far_both, 1}, {"dst", far_dst, 1}, {"src", far_src, 1}, {"outer", far_outer, 2}};
  for (const auto &each : cases) {
    // From the cache, and around it.
    for (const size_t total : {kRow, size_t{1} << 40}) {
      the_end_of_a_far_dimension_is_not_stepped_over(each.name, each.dims, each.num_dims, total);
    }
  }
  return failures != 0;
}
