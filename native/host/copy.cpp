// The host engine: a plan carried out by threads on host memory.
#include "host/copy.h"

#include <algorithm>

#include "engine.h"
#include "host/machine.h"

namespace kvbm::host {
namespace {

constexpr size_t kCacheLine = 64;
// Starting a thread costs about as much as moving this much.
constexpr size_t kNbytesPerThread = size_t{1} << 20;
// Segments at least this long are cut between threads; shorter ones are not.
constexpr size_t kCuttable = size_t{64} << 10;
constexpr size_t kCut = size_t{4} << 10;
// Joins segments that follow each other on both sides, and moves each run at once.
class Runs {
 public:
  explicit Runs(const Mover &mover) : mover_(mover) {}
  void add(char *dst, const char *src, size_t nbytes) {
    if (nbytes_ != 0 && dst == dst_ + nbytes_ && src == src_ + nbytes_) {
      nbytes_ += nbytes;
      return;
    }
    flush();
    dst_ = dst;
    src_ = src;
    nbytes_ = nbytes;
  }
  void flush() {
    if (nbytes_ != 0) mover_.move({dst_, src_, 0, 0, 1, nbytes_, src_, 0, dst_});
    nbytes_ = 0;
  }

 private:
  const Mover &mover_;
  char *dst_ = nullptr;
  const char *src_ = nullptr;
  size_t nbytes_ = 0;
};

// Where a position in the payload of a plan lies: positions count bytes through items, dims and segments in order.
class Cursor {
 public:
  Cursor(const Plan &plan, size_t segment) : plan_(plan) {
    size_t rest = segment;
    for (int i = plan.num_dims - 1; i >= 0; --i) {
      index_[i] = rest % plan.dims[i].size;
      rest /= plan.dims[i].size;
    }
    outer_ = rest % plan.num_outer;
    rest /= plan.num_outer;
    layer_ = rest % plan.num_layers;
    block_ = rest / plan.num_layers;
    locate();
  }

  char *dst() const { return dst_; }
  const char *src() const { return src_; }

  // Segments left in the innermost dimension, this one included.
  size_t row_count() const { return plan_.num_dims == 0 ? 1 : innermost().size - index_[plan_.num_dims - 1]; }
  Rows rows(size_t count) const {
    return {dst_, src_, innermost().dst_stride, innermost().src_stride, count, plan_.segment_nbytes, src_, 0, dst_};
  }

  // The place of this segment in its item, and where the item after it is read.
  size_t segment_in_item() const {
    size_t n = 0;
    for (int i = 0; i < plan_.num_dims; ++i) n = n * plan_.dims[i].size + index_[i];
    return n;
  }
  const char *next_item_src() const {
    Cursor next = *this;
    next.step();
    return next.block_ < plan_.num_blocks ? plan_.src.address(next.block_, next.layer_, next.outer_) : src_;
  }

  // Runs left in the dimension around the innermost, this one included; 0 if this is not the start of one.
  size_t run_count() const {
    const int around = plan_.num_dims - 2;
    if (around < 0 || index_[around + 1] != 0) return 0;
    return plan_.dims[around].size - index_[around];
  }

  // Step over `count` segments, at most row_count().
  void advance(size_t count) { advance(plan_.num_dims - 1, count); }
  // Step over `count` runs, at most run_count().
  void advance_runs(size_t count) { advance(plan_.num_dims - 2, count); }

 private:
  const Dim &innermost() const { return plan_.dims[plan_.num_dims - 1]; }

  void advance(int i, size_t count) {
    for (; i >= 0; --i, count = 1) {
      const Dim &dim = plan_.dims[i];
      if (count < dim.size - index_[i]) {
        index_[i] += count;
        dst_ += static_cast<int64_t>(count) * dim.dst_stride;
        src_ += static_cast<int64_t>(count) * dim.src_stride;
        return;
      }
      // Back to the first, never past the last: size - 1 strides fit 63 bits, and size of them need not.
      dst_ -= static_cast<int64_t>(index_[i]) * dim.dst_stride;
      src_ -= static_cast<int64_t>(index_[i]) * dim.src_stride;
      index_[i] = 0;
    }
    step();
    if (block_ < plan_.num_blocks) locate();
  }

  // To the next item, without looking where it is.
  void step() {
    if (++outer_ < plan_.num_outer) return;
    outer_ = 0;
    if (++layer_ < plan_.num_layers) return;
    layer_ = 0;
    ++block_;
  }

  void locate() {
    dst_ = plan_.dst.address(block_, layer_, outer_);
    src_ = plan_.src.address(block_, layer_, outer_);
    for (int i = 0; i < plan_.num_dims; ++i) {
      dst_ += static_cast<int64_t>(index_[i]) * plan_.dims[i].dst_stride;
      src_ += static_cast<int64_t>(index_[i]) * plan_.dims[i].src_stride;
    }
  }

  const Plan &plan_;
  size_t block_, layer_, outer_;
  size_t index_[kMaxDims] = {};
  char *dst_;
  const char *src_;
};

// What to fetch of the source ahead of its use. A processor follows by itself the sequential walk of a page, and not
// the jumps between pages, nor two walks in one page.
class Ahead {
 public:
  Ahead(const Plan &plan, const Cursor &at) : plan_(plan), cursor_(at) {
    if (plan.num_dims == 0) return;
    const Dim &inner = plan.dims[plan.num_dims - 1];
    by_item_ = inner.src_stride > static_cast<int64_t>(plan.segment_nbytes) && inner.src_stride < kPage && is_compact();
    const size_t runs = std::clamp<size_t>(kFetchAhead / (plan.segment_nbytes * inner.size), 1, kMostRunsAhead);
    for (size_t i = 0; i < runs; ++i) cursor_.advance(cursor_.row_count());
  }

  // For the run at `at`: the run that is as far ahead as it takes; or, where rows jump about within a page, the same
  // part of the next item in the order of its addresses, so that it is in the cache before the jumps begin.
  void hint(const Cursor &at, Rows *rows) {
    if (by_item_) {
      rows->next_src = at.next_item_src() + at.segment_in_item() * plan_.segment_nbytes;
      rows->next_src_stride = static_cast<int64_t>(plan_.segment_nbytes);
    } else {
      rows->next_src = cursor_.src();
      rows->next_src_stride = rows->src_stride;
      cursor_.advance(cursor_.row_count());
    }
  }

 private:
  static constexpr int64_t kPage = 4096;
  // Far enough to hide memory behind the copy of so much, near enough to still be in the first-level cache.
  static constexpr size_t kFetchAhead = size_t{2} << 10;
  static constexpr size_t kMostRunsAhead = 8;
  // Two items have to fit the second-level cache.
  static constexpr size_t kLargestItem = size_t{256} << 10;

  // Whether the source of an item lies together without gaps.
  bool is_compact() const {
    size_t span = plan_.segment_nbytes;
    for (int i = 0; i < plan_.num_dims; ++i) {
      if (plan_.dims[i].src_stride < 0) return false;
      span += (plan_.dims[i].size - 1) * static_cast<size_t>(plan_.dims[i].src_stride);
    }
    return span == plan_.item_nbytes() && span <= kLargestItem;
  }

  const Plan &plan_;
  Cursor cursor_;
  bool by_item_ = false;
};

// Segments are cut between threads, or else the work is cut between segments.
bool cuts_segments(const Plan &plan) { return plan.segment_nbytes >= kCuttable; }
// Segments that follow each other on both sides are moved as one.
bool joins_segments(const Plan &plan) { return plan.num_dims == 0; }

struct CopyWork {
  Plan plan;
  Mover mover;

  void run(int part, int parts) const {
    const size_t grain = cuts_segments(plan) ? kCut : plan.segment_nbytes;
    const auto [begin, end] = range_of(part, parts, plan.total_nbytes(), grain);
    copy_range(plan, mover, begin, end);
    mover.end();
  }
};

struct BatchWork {
  const Pieces &pieces;
  Mover mover;
  size_t total_nbytes;

  void run(int part, int parts) const {
    const auto [begin, end] = range_of(part, parts, total_nbytes, 1);
    Runs runs(mover);
    size_t position = 0;
    for (size_t i = 0; i < pieces.count && position < end; ++i) {
      const size_t nbytes = pieces.size(i);
      const size_t from = std::max(position, begin), to = std::min(position + nbytes, end);
      if (from < to) {
        runs.add(static_cast<char *>(pieces.dst[i]) + (from - position),
                 static_cast<const char *>(pieces.src[i]) + (from - position), to - from);
      }
      position += nbytes;
    }
    runs.flush();
    mover.end();
  }
};

CopyWork work_of(Plan plan) {
  if (reinterpret_cast<uintptr_t>(plan.dst.address(0, 0, 0)) % kCacheLine != 0) write_in_order(&plan);
  return {plan, Mover(plan, plan.total_nbytes())};
}

}  // namespace

Mover::Mover(size_t row_nbytes, size_t total_nbytes)
    : streaming_(total_nbytes > last_level_cache_nbytes() / 2 ? choose_streaming() : nullptr),
      cached_(choose_cached(row_nbytes)) {}

// Segments that may be joined have no length of their own.
Mover::Mover(const Plan &plan, size_t total_nbytes)
    : Mover(joins_segments(plan) ? 0 : plan.segment_nbytes, total_nbytes) {}

int choose_threads(int asked, size_t total_nbytes) {
  if (asked > 0) return std::min(asked, kMaxParts);
  const size_t useful = total_nbytes / kNbytesPerThread;
  if (useful <= 1) return 1;
  const size_t most = static_cast<size_t>(std::min(available_processors(), kMaxParts));
  return static_cast<int>(std::min(useful, most));
}

Range range_of(int part, int parts, size_t total, size_t grain) {
  const auto cut = [=](int i) {
    if (i == parts) return total;
    const size_t position = total / static_cast<size_t>(parts) * static_cast<size_t>(i);
    return position - position % grain;
  };
  return {cut(part), cut(part + 1)};
}

void copy_range(const Plan &plan, const Mover &mover, size_t begin, size_t end) {
  const size_t segment = plan.segment_nbytes;
  if (begin == end) return;
  size_t position = begin;
  Cursor at(plan, position / segment);
  Ahead ahead(plan, at);
  Runs runs(mover);
  while (position < end) {
    const size_t skip = position % segment;
    if (joins_segments(plan) || skip != 0 || end - position < segment) {
      const size_t nbytes = std::min(segment - skip, end - position);
      runs.add(at.dst() + skip, at.src() + skip, nbytes);
      position += nbytes;
      at.advance(1);
    } else {
      const size_t count = std::min(at.row_count(), (end - position) / segment);
      Rows rows = at.rows(count);
      const size_t runs_left = mover.streams() ? 0 : std::min(at.run_count(), (end - position) / (count * segment));
      if (runs_left > 1) {
        // Short runs cost less the fewer steps there are between them.
        const Dim &around = plan.dims[plan.num_dims - 2];
        for (size_t i = 0; i < runs_left; ++i, rows.dst += around.dst_stride, rows.src += around.src_stride) {
          mover.move(rows);
        }
        position += runs_left * count * segment;
        at.advance_runs(runs_left);
        continue;
      }
      if (mover.streams()) ahead.hint(at, &rows);
      position += count * segment;
      at.advance(count);
      rows.next_dst = at.dst();
      mover.move(rows);
    }
  }
  runs.flush();
}

void copy(Plan plan, int num_threads) {
  CopyWork work = work_of(plan);
  run_work(work, choose_threads(num_threads, plan.total_nbytes()));
}

void explain(Plan plan, int num_threads, kvbm_kernels_copy_explanation *out) {
  const CopyWork work = work_of(plan);
  const Cursor first(work.plan, 0);
  const Rows rows = joins_segments(plan)
                        ? Rows{first.dst(), first.src(), 0, 0, 1, plan.segment_nbytes, first.src(), 0, first.dst()}
                        : first.rows(first.row_count());
  out->host_threads = choose_threads(num_threads, plan.total_nbytes());
  out->host_rows = name_of(work.mover.choose(rows));
  out->host_joins_segments = joins_segments(plan);
  out->host_cuts_segments = cuts_segments(plan);
}

void copy_batch(const Pieces &pieces, int num_threads) {
  size_t total = 0;
  for (size_t i = 0; i < pieces.count; ++i) total += pieces.size(i);
  BatchWork work{pieces, Mover(0, total), total};
  run_work(work, choose_threads(num_threads, total));
}

}  // namespace kvbm::host
