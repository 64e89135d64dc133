// Timing beside the copy engine, and tables of shuffled addresses.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "kernels.cuh"

using Call = std::function<void()>;

#define CHECK(call)                                                                                       \
  do {                                                                                                    \
    const int status = static_cast<int>(call);                                                            \
    if (status != 0) {                                                                                    \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(cudaError_t(status))); \
      std::exit(1);                                                                                       \
    }                                                                                                     \
  } while (0)

constexpr size_t kPiece = 32 << 10;
constexpr size_t kBlock = 160 * kPiece;  // nl=80, no=2, nh=8, nt=16, hd=128, bf16
constexpr size_t kTotal = 128 * kBlock;
constexpr size_t kMiB = 1 << 20;

inline cudaStream_t stream, other;
inline char *memory;  // kTotal bytes to copy from, as many to copy to, and as many again

inline double sample(const std::vector<Call> &calls, int rounds, long long hold_cycles) {
  static cudaEvent_t begin, end;
  if (!begin) {
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
  }
  hold<<<1, 1, 0, stream>>>(hold_cycles);
  CHECK(cudaEventRecord(begin, stream));
  for (int i = 0; i < rounds; ++i) {
    for (const Call &call : calls) call();
  }
  CHECK(cudaEventRecord(end, stream));
  CHECK(cudaEventSynchronize(end));
  CHECK(cudaGetLastError());
  float milliseconds;
  CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
  return milliseconds / 1e3 / rounds / static_cast<double>(calls.size());
}

inline double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Times {
  double copy, engine;  // seconds a call
  double ratio() const { return engine / copy; }
};

inline Times compare(const std::vector<Call> &calls, const std::vector<Call> &copies, int rounds = 3,
                     long long hold_cycles = 500000) {
  for (const auto *each : {&calls, &copies}) {
    for (const Call &call : *each) call();
  }
  std::vector<double> times[2];
  for (int i = 0; i < 5; ++i) {
    times[0].push_back(sample(calls, rounds, hold_cycles));
    times[1].push_back(sample(copies, rounds, hold_cycles));
  }
  return {median(times[0]), median(times[1])};
}

inline Call engine_copy(void *dst, const void *src, size_t nbytes) {
  return [=] { CHECK(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream)); };
}

inline uint32_t log2_of(size_t n) { return static_cast<uint32_t>(__builtin_ctzll(n)); }

// Numbers below n, shuffled within windows.
inline std::vector<uint64_t> shuffled(size_t n, size_t window) {
  static std::mt19937_64 random(1);
  std::vector<uint64_t> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 0);
  for (size_t i = 0; window > 1 && i < n; i += window) {
    std::shuffle(numbers.begin() + i, numbers.begin() + std::min(n, i + window), random);
  }
  return numbers;
}

// Addresses in device memory.
class Table {
 public:
  Table(std::vector<uint64_t> numbers, const char *base, size_t unit) {
    for (uint64_t &number : numbers) number = reinterpret_cast<uintptr_t>(base) + number * unit;
    CHECK(cudaMalloc(&addresses_, 8 * numbers.size()));
    CHECK(cudaMemcpy(addresses_, numbers.data(), 8 * numbers.size(), cudaMemcpyHostToDevice));
  }
  ~Table() { cudaFree(addresses_); }
  Table(const Table &) = delete;
  Table &operator=(const Table &) = delete;
  const uint64_t *get() const { return addresses_; }

 private:
  uint64_t *addresses_;
};

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), size_t ctas, unsigned threads, bool early, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}
