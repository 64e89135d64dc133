// Addresses as words of a kernel's parameters.
#pragma once

#include "params.h"
#include "plan.h"

namespace kvbm::device {

// Takes words of a launch's parameters from the front.
class Words {
 public:
  explicit Words(LargeParams &params) : params_(params) {}

  uint32_t used() const { return used_; }

  // Room for n numbers, the index of the first in *first.
  uint32_t *take(size_t n, uint32_t *first) {
    *first = used_;
    used_ += static_cast<uint32_t>(n);
    return params_.words + *first;
  }
  uint64_t *take_wide(size_t n, uint32_t *first) {
    used_ += used_ & 1;
    return reinterpret_cast<uint64_t *>(take(2 * n, first));
  }

 private:
  LargeParams &params_;
  uint32_t used_ = 0;
};

// How a list of addresses fits in words: 32 bits each, as multiples of their common alignment from the lowest, where
// they lie close enough; else 64.
struct Packing {
  uint64_t origin;
  uint32_t shift;
  bool fits;

  Packing(const uint64_t *addresses, size_t n) {
    uint64_t low = UINT64_MAX, high = 0, differ = 0;
    for (size_t i = 0; i < n; ++i) {
      low = addresses[i] < low ? addresses[i] : low;
      high = addresses[i] > high ? addresses[i] : high;
      differ |= addresses[i] ^ addresses[0];
    }
    origin = low;
    shift = differ ? static_cast<uint32_t>(__builtin_ctzll(differ)) : 0;
    fits = n == 0 || (high - low) >> shift <= UINT32_MAX;
  }

  uint32_t words_each() const { return fits ? 1 : 2; }

  void write(const uint64_t *addresses, size_t n, Words &words, Base *base) const {
    base->how = fits ? Base::kPacked : Base::kWide;
    base->origin = origin;
    base->shift = shift;
    if (fits) {
      uint32_t *out = words.take(n, &base->words);
      for (size_t i = 0; i < n; ++i) out[i] = static_cast<uint32_t>((addresses[i] - origin) >> shift);
    } else {
      uint64_t *out = words.take_wide(n, &base->words);
      for (size_t i = 0; i < n; ++i) out[i] = addresses[i];
    }
  }
};

// How far apart n addresses lie, judged by a few of them.
template <typename Address>
uint64_t spread(size_t n, Address address) {
  constexpr size_t kSamples = 64;
  uint64_t low = UINT64_MAX, high = 0;
  for (size_t i = 0; i < n; i += n / kSamples + 1) {
    const uint64_t a = reinterpret_cast<uintptr_t>(address(i));
    low = a < low ? a : low;
    high = a > high ? a : high;
  }
  return high - low;
}

// The order in which a copy goes through its chunks: block by block, or place by place. What is written at about the
// same time should lie close together. Pieces spread over a pool, of up to several MiB each, take DRAM 7% longer to
// write (and 3% to read) than pieces that follow each other, or that are shuffled within 2 MiB only; bench/ceiling
// shows it.
struct Order {
  bool by_place;
  size_t num_groups, group_size;

  Order(const Plan &plan, bool may_choose) : by_place(false) {
    const size_t blocks = plan.num_blocks, places = plan.num_layers * plan.num_outer;
    if (may_choose && blocks > 1 && places > 1) {
      const Side &dst = plan.dst;
      const uint64_t of_a_block =
          spread(places, [&](size_t i) { return dst.address(0, i / plan.num_outer, i % plan.num_outer); });
      by_place = spread(blocks, [&](size_t b) { return dst.address(b, 0, 0); }) <= of_a_block / 2;
    }
    num_groups = by_place ? places : blocks;
    group_size = by_place ? blocks : places;
  }
};

// One side of a copy whose tables are read on the host.
class HostSide {
 public:
  static constexpr size_t kMostMembers = LargeParams::kWords / 8;  // both sides' take half of the words

  HostSide(const Plan &plan, const Side &side, const Order &order)
      : side_(side),
        order_(order),
        layers_(plan.num_layers),
        outers_(plan.num_outer),
        chunks_(plan.num_layers * plan.num_outer),
        one_block_(plan.num_blocks == 1),
        consecutive_(side.layer_step == plan.num_outer && side.outer_step == 1 && side.layer_stride == 0 &&
                     side.outer_stride == 0) {
    const bool by_block = side.block_step != 0 && !one_block_;
    const bool by_chunk = (side.layer_step != 0 && layers_ > 1) || (side.outer_step != 0 && outers_ > 1);
    bases_by_block_ = by_block || !by_chunk;
    // A word a chunk is the only way where every chunk has a pointer, and the shorter way for chunks that are blocks.
    in_parts_ = !(by_block && by_chunk) && order.group_size > 1 && order.group_size <= kMostMembers;
  }

  bool in_parts() const { return in_parts_; }
  size_t fixed_words() const { return in_parts_ ? 2 * order_.group_size : 0; }

  // The addresses of n items.
  void list(size_t first, size_t n, uint64_t *out) const {
    return order_.by_place ? list_by_place(first, n, out) : list_by_block(first, n, out);
  }

  // Words for n groups and for all members of a group.
  void write_parts(size_t first, size_t n, Words &words, Base *base) const {
    base->how = Base::kParts;
    uint64_t *const groups = words.take_wide(n, &base->words);
    uint64_t *const members = words.take_wide(order_.group_size, &base->member_words);
    if (order_.by_place) {
      write_places(first, n, groups);
      write_blocks(0, order_.group_size, members);
    } else {
      write_blocks(first, n, groups);
      write_places(0, order_.group_size, members);
    }
  }

 private:
  void list_by_block(size_t first, size_t n, uint64_t *out) const {
    size_t b = first / chunks_, within = first % chunks_;
    while (n > 0) {
      const uint64_t *bases = reinterpret_cast<const uint64_t *>(side_.bases) + block_index(b);
      const uint64_t start = block_offset(b);
      const size_t end = within + n < chunks_ ? within + n : chunks_;
      n -= end - within;
      if (consecutive_) {
        for (; within < end; ++within) *out++ = bases[within] + start;
      }
      size_t l = within / outers_, o = within % outers_;
      for (; within < end; ++within) {
        *out++ = bases[l * side_.layer_step + o * side_.outer_step] + start + chunk_offset(l, o);
        if (++o == outers_) o = 0, ++l;
      }
      within = 0;
      ++b;
    }
  }

  void list_by_place(size_t first, size_t n, uint64_t *out) const {
    size_t place = first / order_.group_size, b = first % order_.group_size;
    for (; n > 0; ++place, b = 0) {
      const size_t l = place / outers_, o = place % outers_;
      const uint64_t *bases =
          reinterpret_cast<const uint64_t *>(side_.bases) + l * side_.layer_step + o * side_.outer_step;
      const uint64_t start = chunk_offset(l, o);
      const size_t end = b + n < order_.group_size ? b + n : order_.group_size;
      n -= end - b;
      for (; b < end; ++b) *out++ = bases[block_index(b)] + block_offset(b) + start;
    }
  }

  void write_blocks(size_t first, size_t n, uint64_t *out) const {
    const uint64_t *bases = reinterpret_cast<const uint64_t *>(side_.bases);
    for (size_t b = first; b < first + n; ++b) *out++ = block_offset(b) + (bases_by_block_ ? bases[block_index(b)] : 0);
  }
  void write_places(size_t first, size_t n, uint64_t *out) const {
    const uint64_t *bases = reinterpret_cast<const uint64_t *>(side_.bases) + block_index(0);
    size_t l = first / outers_, o = first % outers_;
    for (size_t i = 0; i < n; ++i) {
      *out++ = chunk_offset(l, o) + (bases_by_block_ ? 0 : bases[l * side_.layer_step + o * side_.outer_step]);
      if (++o == outers_) o = 0, ++l;
    }
  }

  size_t block_index(size_t b) const { return static_cast<size_t>(side_.id(b)) * side_.block_step; }
  uint64_t block_offset(size_t b) const {
    return static_cast<uint64_t>(side_.offset) +
           static_cast<uint64_t>(side_.id(b)) * static_cast<uint64_t>(side_.block_stride);
  }
  uint64_t chunk_offset(size_t l, size_t o) const {
    return l * static_cast<uint64_t>(side_.layer_stride) + o * static_cast<uint64_t>(side_.outer_stride);
  }

  const Side &side_;
  const Order &order_;
  size_t layers_, outers_, chunks_;
  bool one_block_;
  bool consecutive_;  // the chunks of a block are neighbours in the table
  bool bases_by_block_, in_parts_;
};

}  // namespace kvbm::device
