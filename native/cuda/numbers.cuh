// Numbers in registers: how they are read and written, and how they become codes of a byte.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernel.cuh"
#include "kvbm_kernels.h"
#include "numbers.h"

namespace kvbm::device {

// The low kNbytes bytes of a word, in accesses of W.
template <int W, int kNbytes>
__device__ __forceinline__ void put_pieces(char *to, uint32_t word) {
#pragma unroll
  for (int i = 0; i < kNbytes; i += W) {
    Access<W>::store(to + i, static_cast<typename Access<W>::Type>(word >> (8 * i)));
  }
}
template <int W, int kNbytes>
__device__ __forceinline__ uint32_t get_pieces(const char *from) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kNbytes; i += W) word |= static_cast<uint32_t>(Access<W>::load(from + i)) << (8 * i);
  return word;
}

// kWidth numbers as they are given or wanted, in one access; where kWidth is 1, byte by byte: at any alignment.
template <int kDtype, int kWidth>
struct Numbers {
  static constexpr int kCount = kWidth;
  static constexpr int kElement = kDtype == KVBM_KERNELS_DTYPE_F32 ? 4 : 2;
  static constexpr int kNbytes = kWidth * kElement;
  static constexpr int kWords = kNbytes < 4 ? 1 : kNbytes / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void load(const char *row, uint32_t chunk) {
    const char *const from = row + uint64_t{chunk} * kNbytes;
    if constexpr (kWidth == 1) {
      words[0] = get_pieces<1, kNbytes>(from);
    } else {
      const auto vector = Access<kNbytes>::load(from);
      if constexpr (kNbytes == 4) words[0] = vector;
      if constexpr (kNbytes >= 8) words[0] = vector.x, words[1] = vector.y;
      if constexpr (kNbytes == 16) words[2] = vector.z, words[3] = vector.w;
    }
  }
  __device__ __forceinline__ void store(char *row, uint32_t chunk) const {
    char *const to = row + uint64_t{chunk} * kNbytes;
    if constexpr (kWidth == 1) put_pieces<1, kNbytes>(to, words[0]);
    if constexpr (kWidth > 1 && kNbytes == 4) Access<4>::store(to, words[0]);
    if constexpr (kNbytes == 8) Access<8>::store(to, make_uint2(words[0], words[1]));
    if constexpr (kNbytes == 16) Access<16>::store(to, make_uint4(words[0], words[1], words[2], words[3]));
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }

  // The largest magnitudes so far, as bits in the type of the numbers: those of a NaN are above all. Halves are kept
  // two in a word.
  static __device__ __forceinline__ uint32_t larger_of(uint32_t a, uint32_t b) {
    return kElement == 4 ? max(a, b) : __vmaxu2(a, b);
  }
  __device__ __forceinline__ uint32_t larger(uint32_t most) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) most = larger_of(most, words[i] & (kElement == 4 ? 0x7fffffff : 0x7fff7fff));
    return most;
  }
  // The bits of the largest as float32.
  static __device__ __forceinline__ uint32_t largest(uint32_t most) {
    if constexpr (kElement == 4) return most;
    return bits_of(f32_of(static_cast<uint16_t>(max(most & 0xffff, most >> 16))));
  }

  static __device__ __forceinline__ float f32_of(uint16_t bits) {
    return kDtype == KVBM_KERNELS_DTYPE_F16 ? __half2float(__ushort_as_half(bits)) : f32_from_bf16(bits);
  }
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kDtype == KVBM_KERNELS_DTYPE_F32) return from_bits(words[i]);
    return f32_of(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
  }
  // From 0 up. Every NaN becomes the canonical one.
  __device__ __forceinline__ void set(int i, float x) {
    const bool is_nan = x != x;
    if constexpr (kDtype == KVBM_KERNELS_DTYPE_F32) {
      words[i] = is_nan ? kF32NaN : bits_of(x);
    } else {
      uint32_t bits;
      if constexpr (kDtype == KVBM_KERNELS_DTYPE_F16) {
        bits = is_nan ? kF16NaN : __half_as_ushort(__float2half_rn(x));
      } else {
        bits = is_nan ? kBf16NaN : __bfloat16_as_ushort(__float2bfloat16_rn(x));
      }
      words[i / 2] = i % 2 ? words[i / 2] | bits << 16 : bits;
    }
  }
};

// Division of many numbers by one, as the processor divides, but with the reciprocal worked out once. Rounded to
// nearest where it counts: quotients below 2^-11 are only known to be that small.
class SharedDivisor {
 public:
  __device__ __forceinline__ explicit SharedDivisor(float by) : by_(by) {
#ifdef __CUDA_ARCH__
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse_) : "f"(by));
#else
    inverse_ = 1.0f / by;
#endif
    inverse_ = __fmaf_rn(inverse_, __fmaf_rn(-by, inverse_, 1.0f), inverse_);
  }

  // From 2^-80 to 2^100: no step then overflows, and no remainder that counts is subnormal.
  __device__ __forceinline__ bool is_usual() const {
    return bits_of(by_) - bits_of(0x1p-80f) <= bits_of(0x1p100f) - bits_of(0x1p-80f);
  }

  __device__ __forceinline__ float divide(float x) const {
    float quotient = __fmul_rn(x, inverse_);
    quotient = __fmaf_rn(__fmaf_rn(-by_, quotient, x), inverse_, quotient);
    quotient = __fmaf_rn(__fmaf_rn(-by_, quotient, x), inverse_, quotient);
    // The remainder of a negative zero is a positive one.
    return from_bits((bits_of(quotient) & 0x7fffffff) | (bits_of(x) & 0x80000000));
  }

 private:
  float by_, inverse_;
};

template <int kWidth>
__device__ __forceinline__ uint32_t int8_codes(const float (&x)[kWidth]) {
  uint32_t codes[4] = {};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    // From 1.5*2^23 on the last bit of a float is 1, and the sum is rounded to nearest even.
    codes[i] = bits_of(__fadd_rn(fminf(fmaxf(x[i], -kInt8Limit), kInt8Limit), 0x1.8p23f));
  }
  if constexpr (kWidth == 1) return codes[0];
  const uint32_t low = __byte_perm(codes[0], codes[1], 0x0040);
  return kWidth == 2 ? low : __byte_perm(low, __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
}

template <int kWidth>
__device__ __forceinline__ uint32_t fp8_codes(const float (&x)[kWidth]) {
  uint32_t codes = 0;
#if __CUDA_ARCH__ >= 890
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    const float2 pair = make_float2(x[i], i + 1 < kWidth ? x[i + 1] : 0.0f);
    codes |= static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << (8 * i);
  }
#else
#pragma unroll
  for (int i = 0; i < kWidth; ++i) codes |= static_cast<uint32_t>(fp8_from_f32(x[i])) << (8 * i);
#endif
  return codes;
}

template <int kWidth>
__device__ __forceinline__ void from_int8_codes(uint32_t codes, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = static_cast<float>(static_cast<int8_t>(codes >> (8 * i)));
}

template <int kWidth>
__device__ __forceinline__ void from_fp8_codes(uint32_t codes, float (&x)[kWidth]) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(codes >> (8 * i));
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
    x[i] = __half2float(__half(__half_raw{halves.x}));
    if (i + 1 < kWidth) x[i + 1] = __half2float(__half(__half_raw{halves.y}));
  }
#else
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = f32_from_fp8(static_cast<uint8_t>(codes >> (8 * i)));
#endif
}

}  // namespace kvbm::device
