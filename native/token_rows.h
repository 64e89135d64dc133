// What both engines are told of an append or a gather: rows of tokens, and a paged cache in which a map places them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvbm_kernels.h"

namespace kvbm {

// How rows are stored, where that is not as they are given: hd bytes, padding, and the scale.
struct RowFormat {
  int stored_value;  // KVBM_KERNELS_STORED_*, or 0 for rows that are stored as they are given
  int dtype_value, scale_dtype_value;
  size_t head_dim;

  bool converts() const { return stored_value != 0; }
  size_t scale_nbytes() const { return scale_dtype_value == KVBM_KERNELS_DTYPE_F32 ? 4 : 2; }
  size_t scale_offset() const { return (head_dim + scale_nbytes() - 1) / scale_nbytes() * scale_nbytes(); }
  size_t stored_nbytes() const { return scale_offset() + scale_nbytes(); }
};

// A checked call with something to do. row_nbytes of the shape is that of `rows`.
struct TokenRows {
  kvbm_kernels_view rows, cache;
  kvbm_kernels_block_shape shape;
  kvbm_kernels_token_map map;
  RowFormat format;
  bool appends;

  const kvbm_kernels_view &src() const { return appends ? rows : cache; }
  const kvbm_kernels_view &dst() const { return appends ? cache : rows; }
  size_t tokens_per_sequence() const { return shape.num_tokens / map.num_sequences; }
  size_t total_nbytes() const {
    return shape.num_layers * shape.num_outer * shape.num_heads * shape.num_tokens * shape.row_nbytes;
  }
};

}  // namespace kvbm
