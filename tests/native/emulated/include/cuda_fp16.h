// Half precision, from the portable conversions that the host engine has.
#pragma once

#include <cstdint>

#include "numbers.h"

struct __half {
  uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline float __half2float(__half x) { return kvbm::f32_from_f16(x.bits); }
inline __half __float2half_rn(float x) { return {kvbm::f16_from_f32(x)}; }
