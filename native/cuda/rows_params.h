// What a launch of append or gather hands to its kernel, all of it by value.
//
// A launch moves pieces: of one row of every token, layer, outer index and head, or of several rows that follow each
// other on both sides. A group of lanes takes a piece.
#pragma once

#include "params.h"

namespace kvbm::device {

// Division of numbers below a bound that is known at launch, by multiplication where 31 bits hold them.
struct WideDivisor {
  Divisor narrow;
  uint64_t size = 1;
  bool is_narrow = true;

  WideDivisor() = default;
  WideDivisor(uint64_t n, uint64_t bound) : size(n), is_narrow(bound <= kIndexLimit && n < kIndexLimit) {
    if (is_narrow) narrow = Divisor(n);
  }

#ifdef __CUDACC__
  // n becomes the quotient; the remainder is returned.
  __device__ __forceinline__ uint64_t divide(uint64_t &n) const {
    if (is_narrow) {
      uint32_t quotient = static_cast<uint32_t>(n);
      const uint32_t remainder = narrow.divide(quotient);
      n = quotient;
      return remainder;
    }
    const uint64_t quotient = n / size, remainder = n - quotient * size;
    n = quotient;
    return remainder;
  }
#endif
};

struct RowsDim {
  Divisor size;
  int64_t rows_stride, cache_stride;
};

constexpr int kMaxRowsDims = kMaxDims + 1;  // the tokens among them
constexpr uint32_t kRowsThreads = 128;

struct RowsHead {
  uint32_t num_pieces;
  uint32_t lanes_log2;  // of the group that takes a piece
  Divisor pieces;       // of a segment
  uint32_t vectors;     // of a segment, as wide as the kernel's
  uint32_t num_dims, token_dim;
  RowsDim dims[kMaxRowsDims];  // innermost first
  uint64_t first_token;        // of the launch, counted from that of the call
  // The map: slots, or tables and starts.
  const int64_t *slots;
  const uint32_t *block_tables, *starts;
  uint64_t block_table_stride, num_blocks;
  WideDivisor block_size, tokens_per_sequence;
  uint64_t num_slots;                  // slots, or positions, that are past the end from here on
  int64_t block_stride, token_stride;  // of the cache
  // Of rows that are converted.
  uint32_t head_dim, scale_offset;
  bool is_fp8, scale_is_f16;
};

struct RowsBase {
  uint64_t rows, cache;
};

// One length for all kernels: a base for each of K and V of each layer fits, and a launch costs little more for it.
struct RowsParams {
  static constexpr uint32_t kItems = (3072 - sizeof(RowsHead)) / sizeof(RowsBase);
  RowsHead head;
  RowsBase bases[kItems];  // of items: the layers and outer indices whose places no stride tells
};
static_assert(RowsParams::kItems >= 160, "K and V of 80 layers");

}  // namespace kvbm::device
