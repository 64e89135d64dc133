// Which allocation a piece belongs to, asking the driver once an allocation.
#pragma once

#include <algorithm>

#include "runtime.h"

namespace kvbm::device {

class MemoryMap {
 public:
  explicit MemoryMap(const Driver &driver) : driver_(driver) { known_[0] = Known{}; }
  MemoryMap(const MemoryMap &) = delete;
  MemoryMap &operator=(const MemoryMap &) = delete;

  // Valid until the next call.
  const Memory &find(uintptr_t address, size_t nbytes) {
    if (last_->memory.holds(address, nbytes)) return last_->memory;
    // Pieces come from the pools of layers in turn: the one that followed this one before is likely to follow it now.
    Known *next = &known_[last_->next];
    if (!next->memory.holds(address, nbytes)) {
      next = known(address, nbytes);
      if (!next) return last_->memory;
      last_->next = static_cast<uint16_t>(next - known_);
    }
    last_ = next;
    return last_->memory;
  }

 private:
  // K, V and the scales of each, of 128 layers. Of others the driver is asked again.
  static constexpr uint16_t kMost = 512;

  struct Known {
    Memory memory;
    uint16_t next;
  };

  Known *known(uintptr_t address, size_t nbytes) {
    const auto starts_after = [this](uintptr_t a, uint16_t index) { return a < known_[index].memory.start; };
    uint16_t *const place = std::upper_bound(by_start_, by_start_ + count_, address, starts_after);
    if (place != by_start_ && known_[place[-1]].memory.holds(address, nbytes)) return &known_[place[-1]];
    const Memory found = memory_at(driver_, address);
    // Ordinary memory has no end that is known, and an allocation that ends inside the piece is not its place.
    if (count_ == kMost || !found.holds(address, nbytes)) {
      other_.memory = found;
      last_ = &other_;
      return nullptr;
    }
    std::copy_backward(place, by_start_ + count_, by_start_ + count_ + 1);
    *place = count_;
    known_[count_] = {found, 0};
    return &known_[count_++];
  }

  const Driver &driver_;
  Known known_[kMost];  // but for the first, only so many as there are
  uint16_t by_start_[kMost];
  uint16_t count_ = 0;
  Known other_ = {};  // one that is not kept
  Known *last_ = &other_;
};

}  // namespace kvbm::device
