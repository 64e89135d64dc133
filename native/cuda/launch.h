// What a launch takes of the GPU: tiles, kernel, CTAs. Arithmetic alone.
#pragma once

#include "params.h"

namespace kvbm::device {

// How much of the GPU a launch may take.
struct Budget {
  uint32_t max_ctas;  // 0: as many as there is work for
  uint32_t threads;   // of a CTA
};

// Across the link a few CTAs reach its speed, and a model beside the copy keeps the rest. Writing to the host needs
// fewer threads than reading from it: writes are posted, and a read holds its lanes for a round trip. No more of them
// than fill the link, either: what is written faster than it leaves waits on the device, and small kernels beside it
// wait behind that.
constexpr Budget kLinkRead{6, 512};
constexpr Budget kLinkWrite{7, 256};
constexpr uint32_t kFullThreads = 128;
constexpr uint32_t kBoundedThreads = 512;  // the most a bounded launch can use

inline Budget choose_budget(bool src_on_host, bool dst_on_host, int max_sms) {
  const uint32_t limit = static_cast<uint32_t>(max_sms);
  if (!src_on_host && !dst_on_host) return {limit, limit ? kBoundedThreads : kFullThreads};
  const Budget enough = src_on_host ? kLinkRead : kLinkWrite;
  return {limit && limit < enough.max_ctas ? limit : enough.max_ctas, enough.threads};
}

// How long tiles of items of nbytes are: a CTA's where nothing bounds the launch and they fill it, else up to a warp's.
inline uint32_t choose_tile_log2(uint64_t nbytes, bool by_cta) {
  const uint64_t vectors = (nbytes + kVectorNbytes - 1) / kVectorNbytes;
  if (by_cta && vectors > (1u << kCtaTileLog2) / 2) return kCtaTileLog2;
  uint32_t log2 = 0;
  while (log2 < kWarpTileLog2 && uint64_t{1} << log2 < vectors) ++log2;
  return log2;
}

// Cuts items of nbytes in tiles of head.tile_log2. Returns how many there are in an item.
inline uint64_t divide_in_tiles(Head &head, uint64_t nbytes) {
  const uint64_t tiles = ((nbytes - 1) / kVectorNbytes >> head.tile_log2) + 1;
  head.tiles_per_item = Divisor(tiles);
  return tiles;
}

// The kernels of kernel.cuh, and their names there.
enum class Kernel { kMoveTile, kMove, kGather };

inline const char *name_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::kMoveTile:
      return "move_tile";
    case Kernel::kGather:
      return "gather";
    default:
      return "move";
  }
}

// Few CTAs must have more on the way to hide the same latency.
constexpr uint32_t kBoundedInFlight = 4;
constexpr uint32_t kFullInFlight = 2;

struct Grid {
  Kernel kernel;
  uint32_t threads;
  uint32_t ctas;
};

inline Grid choose_grid(const Head &head, bool gathers, Budget budget) {
  const uint32_t groups = budget.threads >> head.tile_log2;
  Grid grid{Kernel::kMove, budget.threads, 0};
  uint32_t tiles = groups * (budget.max_ctas ? kBoundedInFlight : kFullInFlight);  // that a CTA takes at a time
  if (head.tile_log2 == kCtaTileLog2) {
    grid = {Kernel::kMoveTile, kCtaTileThreads, 0};
    tiles = 1;
  } else if (gathers) {
    grid.kernel = Kernel::kGather;
    tiles = groups;
  }
  grid.ctas = (head.num_tiles - 1) / tiles + 1;
  if (budget.max_ctas && grid.ctas > budget.max_ctas) grid.ctas = budget.max_ctas;
  return grid;
}

// The shortest parameters that hold so many words of tables.
inline size_t choose_params(size_t num_words) {
  return num_words <= SmallParams::kWords    ? kSmallParams
         : num_words <= MediumParams::kWords ? kMediumParams
                                             : kLargeParams;
}

}  // namespace kvbm::device
