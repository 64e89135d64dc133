#include "plan.h"

#include <algorithm>

namespace kvbm {
namespace {

constexpr size_t kCacheLine = 64;

constexpr size_t kWidestAccess = 16;

uint64_t magnitude(int64_t stride) {
  return stride < 0 ? 0 - static_cast<uint64_t>(stride) : static_cast<uint64_t>(stride);
}

// Whether ids step evenly, so that a block id is first + i*step.
bool steps_evenly(const int64_t *ids, size_t count, int64_t *first, int64_t *step) {
  *first = ids ? ids[0] : 0;
  *step = ids && count > 1 ? ids[1] - ids[0] : 1;
  if (!ids) return true;
  for (size_t i = 2; i < count; ++i) {
    if (ids[i] - ids[i - 1] != *step) return false;
  }
  return true;
}

Side side_of(const kvbm_kernels_view &view) {
  return {view.bases,  view.base_block_step, view.base_layer_step, view.base_outer_step, view.block_ids,
          view.offset, view.block_stride,    view.layer_stride,    view.outer_stride};
}

struct DimList {
  Dim *dims;
  int *count;

  void add(size_t size, int64_t src_stride, int64_t dst_stride) {
    if (size > 1) dims[(*count)++] = {size, src_stride, dst_stride};
  }
  void remove(int i) {
    for (int k = i + 1; k < *count; ++k) dims[k - 1] = dims[k];
    --*count;
  }
};

bool continues(int64_t outer_stride, int64_t inner_stride, size_t inner_size) {
  int64_t end;
  return !__builtin_mul_overflow(inner_stride, inner_size, &end) && end == outer_stride;
}

// Whether stepping through `outer` is, on both sides, stepping on past the end of `inner`.
bool merges(const Dim &outer, const Dim &inner) {
  return continues(outer.src_stride, inner.src_stride, inner.size) &&
         continues(outer.dst_stride, inner.dst_stride, inner.size);
}

// Merge one dimension into the segment or into another; false when nothing merges any more.
bool merge_one(DimList list, size_t *segment_nbytes) {
  for (int i = 0; i < *list.count; ++i) {
    Dim &dim = list.dims[i];
    if (continues(dim.src_stride, 1, *segment_nbytes) && dim.dst_stride == dim.src_stride) {
      *segment_nbytes *= dim.size;
      list.remove(i);
      return true;
    }
    for (int k = 0; k < *list.count; ++k) {
      if (k != i && merges(list.dims[k], dim)) {
        dim.size *= list.dims[k].size;
        list.remove(k);
        return true;
      }
    }
  }
  return false;
}

// Whether to walk in the order of the destination or of the source. Rows that end inside a cache line are best written
// in order: a half-written line costs more than a half-read one. Otherwise the innermost steps are small on the ordered
// side whichever it is, and should be the largest on the other: steps past a page leave every page to one sequential
// walk, which is what memory and prefetchers are made for.
bool walk_by_dst(const Plan &plan) {
  if (plan.segment_nbytes % kCacheLine != 0) return true;
  const Dim *by_src = nullptr, *by_dst = nullptr;
  for (const Dim *dim = plan.dims; dim != plan.dims + plan.num_dims; ++dim) {
    if (!by_src || magnitude(dim->src_stride) < magnitude(by_src->src_stride)) by_src = dim;
    if (!by_dst || magnitude(dim->dst_stride) < magnitude(by_dst->dst_stride)) by_dst = dim;
  }
  return by_src && magnitude(by_dst->src_stride) >= magnitude(by_src->dst_stride);
}

void sort_dims(Plan *plan, bool by_dst) {
  std::sort(plan->dims, plan->dims + plan->num_dims, [by_dst](const Dim &a, const Dim &b) {
    return by_dst ? magnitude(a.dst_stride) > magnitude(b.dst_stride)
                  : magnitude(a.src_stride) > magnitude(b.src_stride);
  });
}

uint64_t address_bits(const Side &side) {
  return static_cast<uint64_t>(side.offset) | static_cast<uint64_t>(side.block_stride) |
         static_cast<uint64_t>(side.layer_stride) | static_cast<uint64_t>(side.outer_stride);
}

}  // namespace

Plan make_plan(const kvbm_kernels_view &dst, const kvbm_kernels_view &src, const kvbm_kernels_block_shape &shape,
               size_t num_blocks) {
  Plan plan{};
  plan.num_blocks = num_blocks;
  plan.num_layers = shape.num_layers;
  plan.num_outer = shape.num_outer;
  plan.src = side_of(src);
  plan.dst = side_of(dst);
  plan.segment_nbytes = shape.row_nbytes;
  DimList list{plan.dims, &plan.num_dims};

  int64_t src_first, src_step, dst_first, dst_step;
  if (src.base_block_step == 0 && dst.base_block_step == 0 &&
      steps_evenly(src.block_ids, num_blocks, &src_first, &src_step) &&
      steps_evenly(dst.block_ids, num_blocks, &dst_first, &dst_step)) {
    list.add(num_blocks, src_step * src.block_stride, dst_step * dst.block_stride);
    plan.src.offset += src_first * src.block_stride;
    plan.dst.offset += dst_first * dst.block_stride;
    plan.src.ids = plan.dst.ids = nullptr;
    plan.src.block_stride = plan.dst.block_stride = 0;
    plan.num_blocks = 1;
  }
  if (src.base_layer_step == 0 && dst.base_layer_step == 0) {
    list.add(shape.num_layers, src.layer_stride, dst.layer_stride);
    plan.src.layer_stride = plan.dst.layer_stride = 0;
    plan.num_layers = 1;
  }
  if (src.base_outer_step == 0 && dst.base_outer_step == 0) {
    list.add(shape.num_outer, src.outer_stride, dst.outer_stride);
    plan.src.outer_stride = plan.dst.outer_stride = 0;
    plan.num_outer = 1;
  }
  list.add(shape.num_tokens, src.token_stride, dst.token_stride);
  list.add(shape.num_heads, src.head_stride, dst.head_stride);

  while (merge_one(list, &plan.segment_nbytes)) {
  }

  sort_dims(&plan, walk_by_dst(plan));

  uint64_t bits = kWidestAccess | plan.segment_nbytes | address_bits(plan.src) | address_bits(plan.dst);
  for (int i = 0; i < plan.num_dims; ++i) {
    bits |= static_cast<uint64_t>(plan.dims[i].src_stride) | static_cast<uint64_t>(plan.dims[i].dst_stride);
  }
  plan.alignment = static_cast<size_t>(bits & (0 - bits));
  return plan;
}

void write_in_order(Plan *plan) { sort_dims(plan, true); }
void read_in_order(Plan *plan) { sort_dims(plan, false); }

}  // namespace kvbm
