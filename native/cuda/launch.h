// Launching the kernels.
#pragma once

#include "params.h"
#include "runtime.h"

namespace kvbm::device {

// How much of the GPU a launch may take.
struct Budget {
  uint32_t max_ctas;  // 0: as many as there is work for
  uint32_t threads;   // of a CTA
};

// Across the link a few CTAs reach its speed, and a model beside the copy keeps the rest. Writing to the host needs
// fewer than reading from it: writes are posted, and a read holds its lanes for a round trip.
constexpr Budget kLinkRead{6, 512};
constexpr Budget kLinkWrite{8, 256};
constexpr uint32_t kFullThreads = 128;
constexpr uint32_t kBoundedThreads = 512;  // the most a bounded launch can use

Budget choose_budget(bool src_on_host, bool dst_on_host, int max_sms);

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

// The launches of one call, on one stream.
class Launcher {
 public:
  Launcher(const Driver &driver, const StreamContext &context, kvbm_kernels_stream_t stream)
      : driver_(driver), context_(context), stream_(stream) {}

  // num_words of params.words are in use. `more` promises that another launch of this call comes next on the stream:
  // the two then overlap at their ends, where the device can. Sets params.head.chain.
  int launch(LargeParams &params, size_t num_words, bool gathers, Budget budget, bool more);

  // Something else was put on the stream.
  void interrupt() { chained_ = false; }

 private:
  bool overlaps();

  const Driver &driver_;
  const StreamContext &context_;
  kvbm_kernels_stream_t stream_;
  bool chained_ = false;
  int overlaps_ = -1;  // not asked yet
};

}  // namespace kvbm::device
