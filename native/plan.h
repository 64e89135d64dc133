// The plan: what a copy between two views comes down to, worked out before any byte moves.
//
// Pure arithmetic. It reads block ids, never a base table's entries and never a block, so the same plan serves tables
// that only a device can read, and is tested for sizes no machine holds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvbm_kernels.h"

namespace kvbm {

// One side's address of item (b, l, o): everything of a view that did not become an affine dimension.
struct Side {
  void *const *bases;
  size_t block_step, layer_step, outer_step;  // of the table index
  const int64_t *ids;                         // per block of the call, or null for 0, 1, 2, ...
  int64_t offset;
  int64_t block_stride, layer_stride, outer_stride;  // 0 where the dimension became affine

  int64_t id(size_t b) const { return ids ? ids[b] : static_cast<int64_t>(b); }
  size_t table_index(size_t b, size_t l, size_t o) const {
    return static_cast<size_t>(id(b)) * block_step + l * layer_step + o * outer_step;
  }
  int64_t byte_offset(size_t b, size_t l, size_t o) const {
    return offset + id(b) * block_stride + static_cast<int64_t>(l) * layer_stride +
           static_cast<int64_t>(o) * outer_stride;
  }
  char *address(size_t b, size_t l, size_t o) const {
    // Through an integer: a base and its offset need not lie in one object.
    return reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(bases[table_index(b, l, o)]) +
                                    static_cast<uintptr_t>(byte_offset(b, l, o)));
  }
};

// A dimension that both sides cross with a fixed stride.
struct Dim {
  size_t size;
  int64_t src_stride, dst_stride;
};

constexpr int kMaxDims = 5;

// for b, l, o in the item grid: for each index of dims, outermost first: copy segment_nbytes.
struct Plan {
  size_t num_blocks, num_layers, num_outer;  // the item grid; 1 where the dimension is affine
  Side src, dst;
  Dim dims[kMaxDims];  // outermost first, in the order that suits the memory
  int num_dims;
  size_t segment_nbytes;
  // The largest power of two, 16 at most, that divides every offset, stride and the segment length: an item whose two
  // base pointers are aligned to it is aligned to it throughout.
  size_t alignment;

  size_t num_items() const { return num_blocks * num_layers * num_outer; }
  size_t segments_per_item() const {
    size_t n = 1;
    for (int i = 0; i < num_dims; ++i) n *= dims[i].size;
    return n;
  }
  size_t item_nbytes() const { return segments_per_item() * segment_nbytes; }
  size_t total_nbytes() const { return num_items() * item_nbytes(); }
};

// Both views must have passed the checks of the API for this shape and number of blocks, none of which is zero.
Plan make_plan(const kvbm_kernels_view &dst, const kvbm_kernels_view &src, const kvbm_kernels_block_shape &shape,
               size_t num_blocks);

// Walk in the order of the destination, or of the source, whatever the strides said: for what an engine knows and the
// plan does not, such as a destination off the cache line.
void write_in_order(Plan *plan);
void read_in_order(Plan *plan);

}  // namespace kvbm
