// Addresses as words of a kernel's parameters.
#pragma once

#include "params.h"

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

}  // namespace kvbm::device
