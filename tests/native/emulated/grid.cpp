#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "emulated_grid.h"
#include "memory.h"

emulated::Index blockIdx, blockDim, gridDim, threadIdx;

namespace emulated {
namespace {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kMostShuffles = 64;
constexpr int kIllegalAddress = 700, kMisalignedAddress = 716, kLaunchFailure = 719;

std::mutex gpu;  // one grid at a time
std::minstd_rand randomness;

// Where to go on when a thread cannot: with the next lane, or past the grid.
jmp_buf next_lane, end_of_grid;

// Lanes run one after the other. One that comes to a shuffle leaves its value there and is given up; when all have left
// theirs, all run again from the start, past the shuffles whose values are known.
uint32_t known_shuffles, shuffle;
uint32_t shuffled[kMostShuffles][kLanes];

Allocation last_read, last_written;

[[noreturn, gnu::format(printf, 2, 3)]] void fault(int status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  std::fprintf(stderr, "emulated kernel: CTA %u of %u, thread %u: ", blockIdx.x, gridDim.x, threadIdx.x);
  std::vfprintf(stderr, format, args);
  std::fputc('\n', stderr);
  va_end(args);
  std::longjmp(end_of_grid, status);
}

uint32_t lane() { return threadIdx.x % kLanes; }

// Whether the lane came to its end.
bool run_lane(Kernel kernel, const void *params) {
  if (setjmp(next_lane)) return false;
  shuffle = 0;
  kernel(params);
  return true;
}

void run_warp(Kernel kernel, const void *params, uint32_t first_thread) {
  uint32_t order[kLanes];
  std::iota(order, order + kLanes, first_thread);
  std::shuffle(order, order + kLanes, randomness);
  for (known_shuffles = 0;; ++known_shuffles) {
    uint32_t ended = 0;
    for (const uint32_t thread : order) {
      threadIdx.x = thread;
      ended += run_lane(kernel, params);
    }
    if (ended == kLanes) return;
    if (ended != 0) fault(kLaunchFailure, "%u lanes ended, and %u wait for them to shuffle", ended, kLanes - ended);
  }
}

uint32_t first_seed() {
  const char *seed = std::getenv("KVBM_EMULATED_SEED");
  return seed ? static_cast<uint32_t>(std::strtoul(seed, nullptr, 10)) : 1;
}

// By itself, so that whatever ends it leaves nothing behind that has to be freed.
int run_warps(Kernel kernel, const void *params, const std::vector<uint32_t> &warps, uint32_t warps_per_cta) {
  if (const int status = setjmp(end_of_grid)) return status;
  for (const uint32_t warp : warps) {
    blockIdx.x = warp / warps_per_cta;
    run_warp(kernel, params, warp % warps_per_cta * kLanes);
  }
  return 0;
}

}  // namespace

int run_grid(Kernel kernel, const void *params, uint32_t ctas, uint32_t threads) {
  const std::lock_guard<std::mutex> lock(gpu);
  static uint32_t seed = first_seed();
  randomness.seed(seed++);
  gridDim.x = ctas;
  blockDim.x = threads;
  last_read = last_written = {};
  std::vector<uint32_t> warps(ctas * (threads / kLanes));
  std::iota(warps.begin(), warps.end(), 0);
  std::shuffle(warps.begin(), warps.end(), randomness);
  return run_warps(kernel, params, warps, threads / kLanes);
}

void check_access(const void *address, uint32_t nbytes, bool writes) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(address);
  const char *const what = writes ? "write" : "read";
  if (start % nbytes != 0) fault(kMisalignedAddress, "a %s of %u bytes at %p, misaligned", what, nbytes, address);
  Allocation &last = writes ? last_written : last_read;
  if (last.holds(start, nbytes)) return;
  last = find_allocation(start);
  if (!last.holds(start, nbytes))
    fault(kIllegalAddress, "a %s of %u bytes at %p, not allocated", what, nbytes, address);
}

uint32_t shuffle_xor(uint32_t mask, uint32_t value, uint32_t away) {
  if (mask != 0xffffffff || away >= kLanes || shuffle == kMostShuffles) fault(kLaunchFailure, "an unknown shuffle");
  uint32_t (&values)[kLanes] = shuffled[shuffle];
  if (shuffle == known_shuffles) {
    values[lane()] = value;
    std::longjmp(next_lane, 1);
  }
  if (values[lane()] != value) fault(kLaunchFailure, "shuffle %u has another value the second time", shuffle);
  ++shuffle;
  return values[lane() ^ away];
}

}  // namespace emulated
