// Append and gather on host memory: a copy for each run of tokens that follow each other in a block.
#include <algorithm>
#include <cfenv>

#include "engine.h"
#include "host/copy.h"

namespace kvbm::host {
namespace {

// Arithmetic as the definition has it, whatever the application has set: rounding to nearest, no number flushed to
// zero, no traps; and no flags left behind.
class PlainArithmetic {
 public:
  PlainArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainArithmetic() { std::fesetenv(&before_); }
  PlainArithmetic(const PlainArithmetic &) = delete;

 private:
  std::fenv_t before_;
};

struct Place {
  bool exists;
  size_t block, token;  // of the cache, and in the block

  bool continues(const Place &last) const { return exists && block == last.block && token == last.token + 1; }
};

class Places {
 public:
  explicit Places(const TokenRows &call)
      : map_(call.map), num_blocks_(call.cache.num_blocks), per_sequence_(call.tokens_per_sequence()) {}

  Place find(size_t token) const {
    if (map_.slots) {
      const int64_t slot = map_.slots[token];
      const uint64_t block = static_cast<uint64_t>(slot) / map_.block_size;
      return {slot >= 0 && block < num_blocks_, block, static_cast<uint64_t>(slot) % map_.block_size};
    }
    const size_t sequence = token / per_sequence_;
    const size_t position = token % per_sequence_ + (map_.starts ? map_.starts[sequence] : 0);
    const size_t entry = position / map_.block_size;
    if (entry >= map_.block_table_stride) return {false, 0, 0};
    const uint32_t block = map_.block_tables[sequence * map_.block_table_stride + entry];
    return {block < num_blocks_, block, position % map_.block_size};
  }

 private:
  const kvbm_kernels_token_map &map_;
  size_t num_blocks_, per_sequence_;
};

// A run of tokens as two views: its block of the cache and the rows beside it, both from their first token on.
class RunPlan {
 public:
  explicit RunPlan(const TokenRows &call) : call_(call), shape_(call.shape) {
    cache_ = call.cache;
    cache_.num_blocks = 1;
    // Rows that are converted are units, whatever their sizes: nothing longer is made of them.
    if (call.format.converts()) shape_.row_nbytes = 1;
  }

  const Plan &plan() const { return plan_; }

  // Runs of as many tokens differ in where they start and in nothing else.
  bool set(size_t token, size_t num_tokens, const Place &place) {
    const bool is_new = shape_.num_tokens != num_tokens || plan_.num_blocks == 0;
    if (is_new) {
      shape_.num_tokens = num_tokens;
      plan_ = call_.appends ? make_plan(cache_, call_.rows, shape_, 1) : make_plan(call_.rows, cache_, shape_, 1);
      // A block of one layer stays in the cache meanwhile, so its order does not matter, and the rows' may.
      if (call_.format.converts() && call_.appends) read_in_order(&plan_);
    }
    const int64_t in_rows = call_.rows.offset + static_cast<int64_t>(token) * call_.rows.token_stride;
    const int64_t in_cache = cache_.offset + static_cast<int64_t>(place.block) * cache_.block_stride +
                             static_cast<int64_t>(place.token) * cache_.token_stride;
    plan_.src.offset = call_.appends ? in_rows : in_cache;
    plan_.dst.offset = call_.appends ? in_cache : in_rows;
    return is_new;
  }

 private:
  const TokenRows &call_;
  kvbm_kernels_block_shape shape_;
  kvbm_kernels_view cache_;
  Plan plan_{};
};

struct RowsWork {
  const TokenRows &call;
  ConvertRows convert;  // or null
  size_t total_nbytes;

  void run(int part, int parts) const {
    const PlainArithmetic arithmetic;
    const auto [begin, end] = range_of(part, parts, call.shape.num_tokens, 1);
    const Places places(call);
    RunPlan run(call);
    Mover mover(convert, call.format);
    Place next = begin < end ? places.find(begin) : Place{};
    for (size_t token = begin; token < end;) {
      const Place place = next;
      size_t after = token + 1;
      Place last = place;
      for (; after < end; ++after, last = next) {
        next = places.find(after);
        if (!place.exists || !next.continues(last)) break;
      }
      if (place.exists) {
        const bool is_new = run.set(token, after - token, place);
        const Plan &plan = run.plan();
        if (is_new && !convert) mover = Mover(plan, total_nbytes);
        copy_range(plan, mover, 0, plan.total_nbytes());
      }
      token = after;
    }
    mover.end();
  }
};

}  // namespace

void move_rows(const TokenRows &call, int num_threads) {
  const size_t total = call.total_nbytes();
  RowsWork work{call, nullptr, total};
  // Converting a row takes as long as moving this many.
  constexpr size_t kConversion = 4;
  size_t weight = total;
  if (call.format.converts()) {
    work.convert = call.appends ? choose_quantize(call.format) : choose_dequantize(call.format);
    if (__builtin_mul_overflow(total, kConversion, &weight)) weight = total;
  }
  const size_t parts = static_cast<size_t>(choose_threads(num_threads, weight));
  run_work(work, static_cast<int>(std::min(parts, call.shape.num_tokens)));
}

}  // namespace kvbm::host
