// Launching the kernels.
#pragma once

#include "launch.h"
#include "runtime.h"

namespace kvbm::device {

// Whether a launch may come while what precedes it on its stream ends.
bool launches_overlap(const Driver &driver, CUdevice device);

// Starts a kernel that takes these parameters. Where it overlaps with what precedes it, the kernel has to wait for that
// before it touches anything.
int launch(const Driver &driver, const void *symbol, uint32_t ctas, uint32_t threads, bool overlaps, void *params,
           kvbm_kernels_stream_t stream);

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
