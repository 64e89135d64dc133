// A plan becomes launches whose parameters carry the address tables. No CUDA is needed to say which: what starts a
// launch is a parameter, so that the same code carries a copy out (copy.cu) and explains it (explain.h).
#pragma once

#include <initializer_list>

#include "engine.h"
#include "launch.h"
#include "status.h"
#include "tables.h"

namespace kvbm::device {
namespace {

// Keeps every index and offset of a launch below kIndexLimit.
constexpr size_t kLongestRun = size_t{1} << 30;
constexpr uint64_t kMostTiles = uint64_t{1} << 30;

uint64_t magnitude(int64_t n) { return n < 0 ? 0 - static_cast<uint64_t>(n) : static_cast<uint64_t>(n); }
uint64_t longest_stride(const Dim &dim) {
  const uint64_t src = magnitude(dim.src_stride), dst = magnitude(dim.dst_stride);
  return src > dst ? src : dst;
}
uint32_t lowest_bit(uint64_t n) { return static_cast<uint32_t>(n & (0 - n)); }

// The part of a launch's description that its items share.
struct Shape {
  Head head;
  uint64_t tiles_per_chunk;  // over its outer dimensions too
  bool gathers;
};

// Whether the destination's dimensions lie so that whole vectors of it are made of short segments.
bool gathers(const Head &head) {
  const uint32_t row = head.segment_nbytes;
  if (row >= kVectorNbytes || (row & (row - 1)) != 0 || head.alignment != row) return false;
  int i = static_cast<int>(head.num_inner) - 1;
  uint64_t run = row;
  while (i >= 0 && head.inner[i].dst_stride == static_cast<int64_t>(run)) run *= head.inner[i--].size.size;
  if (run % kVectorNbytes != 0) return false;
  for (; i >= 0; --i) {
    if (head.inner[i].dst_stride % static_cast<int32_t>(kVectorNbytes) != 0) return false;
  }
  return true;
}

Shape shape_of(const Plan &plan, bool bounded) {
  Shape shape{};
  Head &head = shape.head;

  // Dimensions go from the item to the launch, outermost first, until 32 bits hold what is left.
  int first = 0;
  for (; first < plan.num_dims; ++first) {
    uint64_t nbytes = plan.segment_nbytes, src = nbytes, dst = nbytes;
    bool fits = true;
    for (int i = first; i < plan.num_dims && fits; ++i) {
      const Dim &dim = plan.dims[i];
      uint64_t src_step, dst_step;
      fits = !__builtin_mul_overflow(nbytes, dim.size, &nbytes) &&
             !__builtin_mul_overflow(magnitude(dim.src_stride), dim.size, &src_step) &&
             !__builtin_mul_overflow(magnitude(dim.dst_stride), dim.size, &dst_step) &&
             !__builtin_add_overflow(src, src_step, &src) && !__builtin_add_overflow(dst, dst_step, &dst) &&
             nbytes < kIndexLimit && src < kIndexLimit && dst < kIndexLimit;
    }
    if (fits) break;
  }

  uint64_t strides = 0, differences = 0, nbytes = plan.segment_nbytes, repeats = 1;
  for (int i = first; i < plan.num_dims; ++i) {
    const Dim &dim = plan.dims[i];
    head.inner[head.num_inner++] = {Divisor(dim.size), static_cast<int32_t>(dim.src_stride),
                                    static_cast<int32_t>(dim.dst_stride)};
    strides |= static_cast<uint64_t>(dim.src_stride) | static_cast<uint64_t>(dim.dst_stride);
    differences |= static_cast<uint64_t>(dim.src_stride) - static_cast<uint64_t>(dim.dst_stride);
    nbytes *= dim.size;
  }
  for (int i = first - 1; i >= 0; --i) {
    const Dim &dim = plan.dims[i];
    head.outer[head.num_outer_dims++] = {Divisor(dim.size), dim.src_stride, dim.dst_stride};
    repeats *= dim.size;
  }

  head.item_nbytes = static_cast<uint32_t>(nbytes);
  head.segment_nbytes = static_cast<uint32_t>(plan.segment_nbytes);
  head.alignment = lowest_bit(strides | plan.segment_nbytes | kVectorNbytes);
  head.congruence = lowest_bit(differences | kVectorNbytes);
  for (uint32_t log2 = 0; log2 < 5; ++log2) {
    if (plan.segment_nbytes % (size_t{1} << log2) == 0) head.units[log2] = Divisor(plan.segment_nbytes >> log2);
  }
  shape.gathers = gathers(head);

  head.tile_log2 = choose_tile_log2(nbytes, !bounded && !shape.gathers);
  shape.tiles_per_chunk = divide_in_tiles(head, nbytes) * repeats;
  return shape;
}

// Launcher: int launch(LargeParams &params, size_t num_words, bool gathers, Budget budget, bool more), as class
// Launcher.
template <typename Launcher>
class Launches {
 public:
  // may_ask: whether kernels may look at a few entries of the destination's table before they use it, which takes long
  // where it is in host memory.
  Launches(const char *fn, Launcher &launcher, Tables tables, Budget budget, bool may_ask = false)
      : fn_(fn), launcher_(launcher), tables_(tables), budget_(budget), may_ask_(may_ask) {}

  // Runs longer than a launch can index are cut, then whatever many blocks there are.
  int run(const Plan &plan) {
    if (plan.segment_nbytes > kLongestRun) {
      return cut(plan, plan.segment_nbytes, kLongestRun, 1, 1, [](Plan &part, size_t n) { part.segment_nbytes = n; });
    }
    for (int i = 0; i < plan.num_dims; ++i) {
      // The innermost has to stay in the item, whose offsets have 32 bits.
      const uint64_t stride = i + 1 < plan.num_dims ? 1 : longest_stride(plan.dims[i]);
      const size_t most = stride < kLongestRun ? kLongestRun / stride : 1;
      if (plan.dims[i].size > most && most > 1) {
        return cut(plan, plan.dims[i].size, most, plan.dims[i].src_stride, plan.dims[i].dst_stride,
                   [i](Plan &part, size_t n) { part.dims[i].size = n; });
      }
    }
    const Shape shape = shape_of(plan, budget_.max_ctas != 0);
    uint64_t tiles;
    if (__builtin_mul_overflow(shape.tiles_per_chunk, plan.num_layers * plan.num_outer, &tiles) || tiles > kMostTiles) {
      return fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn_, "one block is more than a launch can index");
    }
    return tables_ == Tables::kHost ? from_host_tables(plan, shape)
                                    : from_device_tables(plan, shape, kMostTiles / tiles);
  }

 private:
  template <typename Resize>
  int cut(const Plan &plan, size_t size, size_t most, int64_t src_step, int64_t dst_step, Resize resize) {
    Plan part = plan;
    for (size_t at = 0; at < size; at += most) {
      part.src.offset = plan.src.offset + static_cast<int64_t>(at) * src_step;
      part.dst.offset = plan.dst.offset + static_cast<int64_t>(at) * dst_step;
      resize(part, size - at < most ? size - at : most);
      if (int status = run(part)) return status;
    }
    return 0;
  }

  int cut_blocks(const Plan &plan, size_t most) {
    for (size_t b = 0; b < plan.num_blocks; b += most) {
      Plan part = plan;
      part.num_blocks = plan.num_blocks - b < most ? plan.num_blocks - b : most;
      for (Side *side : {&part.src, &part.dst}) {
        if (side->ids) {
          side->ids += b;
        } else {
          side->bases += b * side->block_step;
          side->offset += static_cast<int64_t>(b) * side->block_stride;
        }
      }
      if (int status = run(part)) return status;
    }
    return 0;
  }

  int from_device_tables(const Plan &plan, const Shape &shape, size_t most_blocks) {
    for (size_t b = 0; b < plan.num_blocks; b += most_blocks) {
      const size_t n = plan.num_blocks - b < most_blocks ? plan.num_blocks - b : most_blocks;
      params_.head = shape.head;
      params_.head.src = from_block(plan, plan.src, b);
      params_.head.dst = from_block(plan, plan.dst, b);
      params_.head.group_size = Divisor(plan.num_layers * plan.num_outer);
      if (may_ask_ && may_choose_order() && params_.head.dst.block_step && params_.head.dst.chunk_step) {
        params_.head.num_blocks_asked = Divisor(n);
      }
      params_.head.num_tiles = static_cast<uint32_t>(n * plan.num_layers * plan.num_outer * shape.tiles_per_chunk);
      if (int status = launch(0, shape.gathers, false)) return status;
    }
    return 0;
  }

  // The API's device tables come from its own layouts, in which outer indices and layers are one walk.
  static Base from_block(const Plan &plan, const Side &side, size_t b) {
    const bool by_outer = plan.num_outer > 1;
    Base base{};
    base.how = Base::kTable;
    base.table = reinterpret_cast<const uint64_t *>(side.bases) + b * side.block_step;
    base.origin = static_cast<uint64_t>(side.offset) + b * static_cast<uint64_t>(side.block_stride);
    base.block_step = static_cast<uint32_t>(side.block_step);
    base.chunk_step = static_cast<uint32_t>(by_outer ? side.outer_step : side.layer_step);
    base.block_stride = side.block_stride;
    base.chunk_stride = by_outer ? side.outer_stride : side.layer_stride;
    return base;
  }

  int from_host_tables(const Plan &plan, const Shape &shape) {
    const Order order(plan, may_choose_order());
    if (order.by_place && plan.num_blocks > HostSide::kMostMembers) return cut_blocks(plan, HostSide::kMostMembers);
    const HostSide src(plan, plan.src, order), dst(plan, plan.dst, order);
    const size_t total = plan.num_items();
    for (size_t first = 0; first < total;) {
      size_t n = room(src, dst, order, src.in_parts() ? 0 : 1, dst.in_parts() ? 0 : 1);
      if (n > kMostTiles / shape.tiles_per_chunk) n = kMostTiles / shape.tiles_per_chunk;
      if (n > total - first) n = total - first;

      // Lists are made before it is known whether their addresses fit in one word each.
      uint64_t *const src_list = list_;
      uint64_t *const dst_list = src.in_parts() ? list_ : list_ + n;
      if (!src.in_parts()) src.list(first, n, src_list);
      if (!dst.in_parts()) dst.list(first, n, dst_list);
      const Packing src_packing(src_list, src.in_parts() ? 0 : n), dst_packing(dst_list, dst.in_parts() ? 0 : n);
      const size_t exact = room(src, dst, order, src.in_parts() ? 0 : src_packing.words_each(),
                                dst.in_parts() ? 0 : dst_packing.words_each());
      if (n > exact) n = exact;

      Head &head = params_.head;
      head = shape.head;
      const size_t first_group = first / order.group_size;
      const size_t num_groups = (first + n - 1) / order.group_size - first_group + 1;
      head.group_size = Divisor(order.group_size);
      head.first_item = static_cast<uint32_t>(first - first_group * order.group_size);
      head.num_tiles = static_cast<uint32_t>(n * shape.tiles_per_chunk);
      Words words(params_);
      write(src, first_group, num_groups, src_packing, src_list, n, words, &head.src);
      write(dst, first_group, num_groups, dst_packing, dst_list, n, words, &head.dst);
      first += n;
      if (int status = launch(words.used(), shape.gathers, first < total)) return status;
    }
    return 0;
  }

  // How many items a launch has words for.
  static size_t room(const HostSide &src, const HostSide &dst, const Order &order, size_t src_words, size_t dst_words) {
    constexpr size_t kSlack = 12;  // wide words align, and the first and the last group may be there in part
    const size_t words = LargeParams::kWords - kSlack - src.fixed_words() - dst.fixed_words();
    const size_t a_group = 2 * (size_t{src.in_parts()} + size_t{dst.in_parts()});
    return words * order.group_size / ((src_words + dst_words) * order.group_size + a_group);
  }

  static void write(const HostSide &side, size_t first_group, size_t num_groups, const Packing &packing,
                    const uint64_t *list, size_t n, Words &words, Base *base) {
    if (side.in_parts()) {
      side.write_parts(first_group, num_groups, words, base);
    } else {
      packing.write(list, n, words, base);
    }
  }

  // Across the link it is the host's memory that matters, and that is best walked block by block.
  bool may_choose_order() const { return budget_.max_ctas == 0; }

  int launch(size_t num_words, bool gathers, bool more) {
    const int status = launcher_.launch(params_, num_words, gathers, budget_, more);
    return status ? fail(status, fn_, "CUDA refused the launch of the copy") : 0;
  }

  const char *fn_;
  Launcher &launcher_;
  Tables tables_;
  Budget budget_;
  bool may_ask_;
  LargeParams params_;
  uint64_t list_[LargeParams::kWords];
};

// Where an item lies as close together on both sides, as a chunk in two orders does, a tile is best read in one piece:
// its short pieces are then stores, which nobody waits for.
bool lies_alike(const Plan &plan) {
  uint64_t src = 0, dst = 0;
  for (int i = 0; i < plan.num_dims; ++i) {
    src += (plan.dims[i].size - 1) * magnitude(plan.dims[i].src_stride);
    dst += (plan.dims[i].size - 1) * magnitude(plan.dims[i].dst_stride);
  }
  return src == dst && plan.segment_nbytes >= kVectorNbytes;
}

// The plan with its loops in the order that suits the kernels.
Plan in_launch_order(const Plan &plan) {
  Plan ordered = plan;
  if (lies_alike(plan)) read_in_order(&ordered);
  return ordered;
}

}  // namespace
}  // namespace kvbm::device
