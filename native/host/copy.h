// What the copies of the host engine share: how rows are moved, how a plan is walked, and how work is divided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/quantize.h"
#include "host/rows.h"
#include "host/threads.h"
#include "plan.h"

namespace kvbm::host {

// How rows and runs of one copy are moved. Around the cache, where what is read and what is written would not both fit
// in it, the long ones, and those that end where the stores that do it can. Or converted, row by row.
class Mover {
 public:
  // row_nbytes is 0 where rows may be joined to runs of any length.
  Mover(size_t row_nbytes, size_t total_nbytes);
  Mover(const Plan &plan, size_t total_nbytes);
  Mover(ConvertRows convert, const RowFormat &format) : convert_(convert), format_(&format) {}

  bool streams() const { return streaming_ != nullptr; }

  MoveRows choose(const Rows &rows) const {
    const uint64_t bits = reinterpret_cast<uintptr_t>(rows.dst) | static_cast<uint64_t>(rows.dst_stride) | rows.nbytes;
    const bool worthwhile = rows.nbytes >= kLongRow || (rows.nbytes >= kShortestStreamed && bits % kStreamed == 0);
    return worthwhile && streaming_ ? streaming_ : cached_;
  }
  void move(const Rows &rows) const {
    if (convert_) return convert_(rows, *format_);
    choose(rows)(rows);
  }
  void end() const {
    if (streaming_) end_streaming();
  }

 private:
  static constexpr size_t kStreamed = 16;
  // Below a cache line a streaming store writes less than memory takes at once.
  static constexpr size_t kShortestStreamed = 64;
  // From here on the unaligned ends of a row no longer matter.
  static constexpr size_t kLongRow = size_t{2} << 10;

  MoveRows streaming_ = nullptr, cached_ = nullptr;
  ConvertRows convert_ = nullptr;
  const RowFormat *format_ = nullptr;
};

// Moves the positions [begin, end) of a plan, which count bytes through its items, dimensions and segments in order.
void copy_range(const Plan &plan, const Mover &mover, size_t begin, size_t end);

// How many threads to use for so much, where `asked` is 0.
int choose_threads(int asked, size_t total_nbytes);

// A part of the work as positions [begin, end), cut where `grain` allows.
struct Range {
  size_t begin, end;
};
Range range_of(int part, int parts, size_t total, size_t grain);

template <typename Work>
void run_work(Work &work, int parts) {
  run_parts(parts, [](void *context, int part, int of) { static_cast<Work *>(context)->run(part, of); }, &work);
}

}  // namespace kvbm::host
