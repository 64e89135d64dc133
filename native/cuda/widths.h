// How wide the accesses of a tile can be, told from where its item lies. The kernels ask for each tile, and an
// explanation for each item.
#pragma once

#include "params.h"

#ifdef __CUDACC__
#define KVBM_BOTH __host__ __device__ __forceinline__
#else
#define KVBM_BOTH inline
#endif

namespace kvbm::device {

struct Tile {
  const char *src;  // of the item
  char *dst;
  uint32_t index, count;  // which tile of its item, and of how many
  uint32_t nbytes;        // of the item
};

// Of n, which is not 0.
KVBM_BOTH uint32_t lowest_bit_log2(uint32_t n) {
#ifdef __CUDA_ARCH__
  return __ffs(n) - 1;
#else
  return static_cast<uint32_t>(__builtin_ctz(n));
#endif
}

// Whether every byte of a tile can move as a whole vector.
KVBM_BOTH bool is_whole(const Head &head, const Tile &tile) {
  const bool aligned = ((reinterpret_cast<uintptr_t>(tile.src) | reinterpret_cast<uintptr_t>(tile.dst)) & 15) == 0;
  return aligned && (head.alignment == kVectorNbytes ||
                     (head.num_inner == 0 && ((tile.index + 1) << head.tile_log2) <= tile.nbytes / kVectorNbytes));
}

// Whether the rows of a launch that gathers can be made vectors of in this tile.
KVBM_BOTH bool is_gathered(const Head &head, const Tile &tile) {
  return (reinterpret_cast<uintptr_t>(tile.dst) & 15) == 0 &&
         (reinterpret_cast<uintptr_t>(tile.src) & (head.segment_nbytes - 1)) == 0;
}

// The widest accesses, of 2^log2 bytes, of any other tile: at addresses that all are so aligned, or, shifted, at those
// of a segment that are, with its ends byte by byte.
struct Width {
  uint32_t log2;
  bool shifted;
};
KVBM_BOTH Width choose_width(const Head &head, const Tile &tile) {
  const uint32_t src = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tile.src));
  const uint32_t dst = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tile.dst));
  const uint32_t aligned = lowest_bit_log2(src | dst | head.alignment);
  const uint32_t shifted = lowest_bit_log2((src - dst) | head.congruence);
  const uint32_t segment_nbytes = head.num_inner == 0 ? tile.nbytes : head.segment_nbytes;
  const bool shifts = shifted > aligned && shifted >= 2 && segment_nbytes >> shifted >= 2;
  return {shifts ? shifted : aligned, shifts};
}

}  // namespace kvbm::device
