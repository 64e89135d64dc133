// What a launch hands to a kernel, all of it by value.
//
// A launch moves items: one for each (block, layer, outer), times the outer dimensions. An item's bytes are cut in
// tiles of up to 32 vectors of 16 bytes, one vector a lane.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime_api.h>
#endif

#include <cstddef>
#include <cstdint>

#include "plan.h"

namespace kvbm::device {

// Kernel parameters hold 32,764 bytes from CUDA 12.1 on (sm_70 and newer), 4 KiB before. A launch costs more the longer
// they are (5 microseconds, or 15 for the longest), so there are kernels for three lengths: for tables in device
// memory, for a base a layer and an id a block, and for a pointer a chunk.
#if !defined(CUDART_VERSION) || CUDART_VERSION >= 12010
constexpr size_t kLargeParams = 32764;
constexpr size_t kMediumParams = 8192;
#else
constexpr size_t kLargeParams = 4096;
constexpr size_t kMediumParams = 2048;
#endif
constexpr size_t kSmallParams = 640;

constexpr uint32_t kVectorNbytes = 16;
constexpr uint32_t kWarpTileLog2 = 5;
// Two vectors a thread of 128: one left memory idle, and four were no better.
constexpr uint32_t kCtaTileLog2 = 8;
constexpr uint32_t kCtaTileThreads = 128;

// Indices and offsets inside a launch are below this, so that Divisor is exact and 32-bit arithmetic does.
constexpr uint64_t kIndexLimit = uint64_t{1} << 31;

// Division by a number known at launch. Exact for dividends below 2^31: with 2^s >= size and
// magic = ceil(2^(31+s) / size), the error n*(magic*size - 2^(31+s)) stays below 2^(31+s) for n < 2^31.
struct Divisor {
  uint32_t size = 1, magic = uint32_t{1} << 31, shift = 0;

  Divisor() = default;
  explicit Divisor(uint64_t n) : size(static_cast<uint32_t>(n)) {
    while ((uint64_t{1} << shift) < n) ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + n - 1) / n);
  }

#ifdef __CUDACC__
  // n becomes the quotient; the remainder is returned.
  __device__ __forceinline__ uint32_t divide(uint32_t &n) const {
    const uint32_t quotient = __umulhi(2 * n, magic) >> shift;
    const uint32_t remainder = n - quotient * size;
    n = quotient;
    return remainder;
  }
#endif
};

// Where one side's chunks start. Chunks come in groups: block by block, the members of a group being the places in the
// block; or place by place, the members being the blocks.
struct Base {
  enum How : uint32_t {
    kTable,   // table[block*block_step + place*chunk_step], plus strides; read by the kernel
    kParts,   // a 64-bit word for the group plus one for the member
    kPacked,  // origin + (32-bit word of the item << shift)
    kWide     // the 64-bit word of the item
  };
  How how;
  uint32_t words;         // where its words start in Params::words
  uint32_t member_words;  // of kParts: where those for the members start
  uint32_t shift;
  uint64_t origin;  // of kTable: added to every address
  const uint64_t *table;
  uint32_t block_step, chunk_step;
  int64_t block_stride, chunk_stride;
};

// A dimension inside an item.
struct InnerDim {
  Divisor size;
  int32_t src_stride, dst_stride;
};

// A dimension of the launch that both tables know nothing of: too far apart for 32-bit offsets.
struct OuterDim {
  Divisor size;
  int64_t src_stride, dst_stride;
};

// What a launch overlaps with (programmatic dependent launch, sm_90 and newer): the end of what comes before the call,
// or the launches of the same call before it (wait) and after it (early, late).
enum Chain : uint32_t { kChainNone = 0, kChainEarly = 1, kChainLate = 2, kChainWait = 4, kChainFirst = 8 };

struct Head {
  uint32_t num_tiles;
  uint32_t tile_log2;
  Divisor tiles_per_item;
  Divisor group_size;        // places in a block, or blocks
  Divisor num_blocks_asked;  // not 1: a table of device memory tells whether its chunks come place by place
  uint32_t first_item;       // of the launch, counted from the start of its first group
  uint32_t num_inner, num_outer_dims;
  InnerDim inner[kMaxDims];  // outermost first
  OuterDim outer[kMaxDims];  // innermost first
  uint32_t item_nbytes;
  uint32_t segment_nbytes;
  uint32_t alignment;     // largest power of two, 16 at most, that divides all strides and the segment
  uint32_t congruence;    // and of all differences between a source and a destination stride
  Divisor units[5];       // of 1, 2, 4, 8, 16 bytes in a segment; 1 where it does not divide
  uint32_t num_pieces;    // if not 0, items are pieces of their own sizes: see ragged_words
  uint32_t ragged_words;  // [num_pieces] first tiles, then [num_pieces] sizes
  uint32_t chain;
  Base src, dst;
};

template <size_t kNbytes>
struct alignas(8) Params {
  static constexpr uint32_t kWords = (kNbytes - sizeof(Head)) / 8 * 2;
  Head head;
  uint32_t words[kWords];
};

using SmallParams = Params<kSmallParams>;
using MediumParams = Params<kMediumParams>;
using LargeParams = Params<kLargeParams>;
static_assert(sizeof(LargeParams) <= kLargeParams, "past the parameter limit");
static_assert(sizeof(Head) % 8 == 0, "64-bit words follow");

}  // namespace kvbm::device
