// CUDA's language on the host: what nvcc knows in any file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "emulated_grid.h"

#define __CUDACC__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Behind the type of a parameter. Kernels have one, and take it by address here: whatever its length, it can be called.
#define __grid_constant__ &

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

using std::max;
using std::min;

template <typename T>
T __ldcs(const T *p) {
  return emulated::load(p);
}
template <typename T>
T __ldca(const T *p) {
  return emulated::load(p);
}
template <typename T>
T __ldcg(const T *p) {
  return emulated::load(p);
}
template <typename T>
void __stcs(T *p, T value) {
  emulated::store(p, value);
}
template <typename T>
void __stcg(T *p, T value) {
  emulated::store(p, value);
}
template <typename T>
void __stwb(T *p, T value) {
  emulated::store(p, value);
}

inline uint32_t __shfl_xor_sync(uint32_t mask, uint32_t value, uint32_t away) {
  return emulated::shuffle_xor(mask, value, away);
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
// The larger of each half.
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
// Four of the eight bytes of high:low, chosen by the digits of the selector, whose first is the lowest byte's.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t chosen = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    chosen |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return chosen;
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
