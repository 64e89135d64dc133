// Allocations, by which a pointer is known to be the device's, pinned or neither.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulated {

struct Allocation {
  uintptr_t start = 0;
  size_t nbytes = 0;
  bool is_on_device = false;

  bool holds(uintptr_t address, size_t length) const {
    return start <= address && address - start < nbytes && length <= nbytes - (address - start);
  }
};

// The allocation around an address; of no length where there is none.
Allocation find_allocation(uintptr_t address);

}  // namespace emulated

#define KVBM_EMULATED_API extern "C" [[gnu::visibility("default")]]

// For tests: memory of the device, or pinned host memory, and its end. Both are the process's own.
KVBM_EMULATED_API void *kvbm_emulated_malloc(size_t nbytes, bool on_device);
KVBM_EMULATED_API void kvbm_emulated_free(void *start);

// How many times the driver was asked what a pointer is to.
KVBM_EMULATED_API size_t kvbm_emulated_pointers_asked_about();
