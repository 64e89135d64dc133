// Conversions between number types in integer arithmetic: the same bits on the host and on every GPU.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define KVBM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVBM_HOST_DEVICE inline
#endif

namespace kvbm {

constexpr float kInt8Limit = 127.0f;
constexpr float kFp8Limit = 448.0f;  // the largest number of E4M3
constexpr float kF16Largest = 65504.0f;
constexpr uint32_t kF32Infinity = 0x7f800000, kF32NaN = 0x7fc00000;
constexpr uint16_t kF16NaN = 0x7e00, kBf16NaN = 0x7fc0;

KVBM_HOST_DEVICE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
KVBM_HOST_DEVICE float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

KVBM_HOST_DEVICE float f32_from_bf16(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }

// To nearest even. A NaN keeps its upper bits, so only a canonical one comes out canonical.
KVBM_HOST_DEVICE uint16_t bf16_from_f32(float x) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

KVBM_HOST_DEVICE float f32_from_f16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, magnitude = x & 0x7fff;
  uint32_t bits = (magnitude << 13) + (112u << 23);  // the bias of the exponent is 127 and not 15
  if (magnitude >= 0x7c00) bits += 112u << 23;       // infinities and NaNs have the largest exponent
  if (magnitude < 0x0400) bits = bits_of(static_cast<float>(magnitude) * 0x1p-24f);  // multiples of 2^-24
  return from_bits(sign | bits);
}

// To nearest even, infinity past the largest; a NaN comes out canonical.
KVBM_HOST_DEVICE uint16_t f16_from_f32(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  if (magnitude > kF32Infinity) return kF16NaN;
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // from 65520 on
  // Adding 2^-1 * 2^k to a number of 2^k units leaves their count, rounded to nearest even, in the last bits.
  if (magnitude < 0x38800000) return static_cast<uint16_t>(sign | (bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000));
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

// E4M3 of a finite number, to nearest even and kFp8Limit at most.
KVBM_HOST_DEVICE uint8_t fp8_from_f32(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
  if (magnitude >= 0x43e00000) return static_cast<uint8_t>(sign | 0x7e);  // from 448 on
  // Below 2^-6 numbers are multiples of 2^-9: as in f16_from_f32, 2^14 has that for its last bit.
  if (magnitude < 0x3c800000)
    return static_cast<uint8_t>(sign | (bits_of(from_bits(magnitude) + 0x1p14f) - 0x46800000));
  return static_cast<uint8_t>(sign | ((magnitude - (120u << 23) + 0x7ffff + ((magnitude >> 20) & 1)) >> 20));
}

KVBM_HOST_DEVICE float f32_from_fp8(uint8_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x80) << 24, magnitude = x & 0x7f;
  uint32_t bits = (magnitude << 20) + (120u << 23);
  if (magnitude == 0x7f) bits = kF32NaN;
  if (magnitude < 8) bits = bits_of(static_cast<float>(magnitude) * 0x1p-9f);
  return from_bits(sign | bits);
}

}  // namespace kvbm
