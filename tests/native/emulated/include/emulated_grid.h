// A GPU of one thread: what kernels call, and what runs a grid of them.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulated {

struct Index {
  uint32_t x;
};

using Kernel = void (*)(const void *params);

// Runs all threads of a grid, warps in a random order and the lanes of each, and returns a CUDA status: 0, or what a
// thread did wrong, after which no other has run. Then stderr tells more.
int run_grid(Kernel kernel, const void *params, uint32_t ctas, uint32_t threads);

// Ends the grid with this status unless the address is a multiple of the length and the bytes are allocated.
void check_access(const void *address, uint32_t nbytes, bool writes);

template <typename T>
T load(const T *address) {
  check_access(address, sizeof(T), false);
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}
template <typename T>
void store(T *address, T value) {
  check_access(address, sizeof(T), true);
  std::memcpy(address, &value, sizeof value);
}

// What the lane `away` gives, when all of the warp have given theirs.
uint32_t shuffle_xor(uint32_t mask, uint32_t value, uint32_t away);

}  // namespace emulated

// Of the thread that runs.
extern emulated::Index blockIdx, blockDim, gridDim, threadIdx;
