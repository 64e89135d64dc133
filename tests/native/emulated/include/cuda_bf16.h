// bfloat16, from the portable conversions that the host engine has.
#pragma once

#include <cstdint>

#include "numbers.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {kvbm::bf16_from_f32(x)}; }
