// The rows of quantised caches, for the instruction set of the file that includes this. It has to define before:
//
//   struct Lanes {
//     using Floats = ...;                            kLanes numbers
//     static constexpr size_t kLanes;
//     template <int kDtype> static Floats load(const char *)       KVBM_KERNELS_DTYPE_F16, _BF16 or _F32
//     template <int kDtype> static void store(char *, Floats)
//     static Floats zero();
//     static Floats larger(Floats most, Floats x)    of magnitudes, a NaN above all
//     static uint32_t largest(Floats most)           the bits of the largest
//     static Floats divide(Floats, float), multiply(Floats, float)    a NaN comes out of multiply canonical
//     template <int kStored> static Floats load_codes(const char *)   KVBM_KERNELS_STORED_*
//     template <int kStored> static void store_codes(char *, Floats)
//   }
#pragma once

#include <cstring>

#include "host/quantize.h"
#include "numbers.h"

namespace kvbm::host {
namespace {

template <int kDtype>
constexpr size_t kElement = kDtype == KVBM_KERNELS_DTYPE_F32 ? 4 : 2;

// body(at, n) for whole steps of lanes, then rest(at, n) for what is left.
template <typename Body>
void each_step(size_t head_dim, Body body) {
  size_t at = 0;
  for (; at + Lanes::kLanes <= head_dim; at += Lanes::kLanes) body(at, Lanes::kLanes);
  if (Lanes::kLanes > 1 && at != head_dim) body(at, head_dim - at);
}

// Up to kLanes numbers, zeros behind them.
template <int kDtype>
Lanes::Floats load_some(const char *from, size_t n) {
  if (n == Lanes::kLanes) return Lanes::load<kDtype>(from);
  char some[Lanes::kLanes * kElement<kDtype>] = {};
  std::memcpy(some, from, n * kElement<kDtype>);
  return Lanes::load<kDtype>(some);
}

// The scale of a row whose largest magnitude has these bits, as float32.
float scale_of(uint32_t amax, float limit, const RowFormat &format) {
  if (amax >= kF32Infinity) return from_bits(kF32NaN);
  const float scale = from_bits(amax) / limit;
  if (format.scale_dtype_value == KVBM_KERNELS_DTYPE_F32) return scale;
  return f32_from_f16(f16_from_f32(scale < kF16Largest ? scale : kF16Largest));
}

void put_scale(char *to, float scale, const RowFormat &format) {
  if (format.scale_dtype_value == KVBM_KERNELS_DTYPE_F32) {
    std::memcpy(to, &scale, sizeof scale);
  } else {
    const uint16_t bits = f16_from_f32(scale);
    std::memcpy(to, &bits, sizeof bits);
  }
}

float get_scale(const char *from, const RowFormat &format) {
  if (format.scale_dtype_value == KVBM_KERNELS_DTYPE_F32) {
    float scale;
    std::memcpy(&scale, from, sizeof scale);
    return scale;
  }
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return f32_from_f16(bits);
}

template <int kDtype, int kStored>
void quantize_rows(const Rows &rows, const RowFormat &format) {
  constexpr float kLimit = kStored == KVBM_KERNELS_STORED_INT8 ? kInt8Limit : kFp8Limit;
  char *dst = rows.dst;
  const char *src = rows.src;
  for (size_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride) {
    Lanes::Floats most = Lanes::zero();
    each_step(format.head_dim, [&](size_t at, size_t n) {
      most = Lanes::larger(most, load_some<kDtype>(src + at * kElement<kDtype>, n));
    });
    const float scale = scale_of(Lanes::largest(most), kLimit, format);
    std::memset(dst + format.head_dim, 0, format.scale_offset() - format.head_dim);
    put_scale(dst + format.scale_offset(), scale, format);
    if (!(scale > 0)) {
      std::memset(dst, 0, format.head_dim);
      continue;
    }
    each_step(format.head_dim, [&](size_t at, size_t n) {
      const Lanes::Floats x = Lanes::divide(load_some<kDtype>(src + at * kElement<kDtype>, n), scale);
      if (n == Lanes::kLanes) return Lanes::store_codes<kStored>(dst + at, x);
      char some[Lanes::kLanes];
      Lanes::store_codes<kStored>(some, x);
      std::memcpy(dst + at, some, n);
    });
  }
}

template <int kDtype, int kStored>
void dequantize_rows(const Rows &rows, const RowFormat &format) {
  char *dst = rows.dst;
  const char *src = rows.src;
  for (size_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride) {
    const float scale = get_scale(src + format.scale_offset(), format);
    each_step(format.head_dim, [&](size_t at, size_t n) {
      if (n == Lanes::kLanes) {
        const Lanes::Floats x = Lanes::multiply(Lanes::load_codes<kStored>(src + at), scale);
        return Lanes::store<kDtype>(dst + at * kElement<kDtype>, x);
      }
      char codes[Lanes::kLanes] = {}, some[Lanes::kLanes * kElement<kDtype>];
      std::memcpy(codes, src + at, n);
      Lanes::store<kDtype>(some, Lanes::multiply(Lanes::load_codes<kStored>(codes), scale));
      std::memcpy(dst + at * kElement<kDtype>, some, n * kElement<kDtype>);
    });
  }
}

// choose(dtype, stored) with both as constants.
template <typename Choose>
ConvertRows with_types(const RowFormat &format, Choose choose) {
  const auto with_stored = [&](auto dtype) {
    using Int8 = std::integral_constant<int, KVBM_KERNELS_STORED_INT8>;
    using Fp8 = std::integral_constant<int, KVBM_KERNELS_STORED_FP8>;
    return format.stored_value == KVBM_KERNELS_STORED_INT8 ? choose(dtype, Int8{}) : choose(dtype, Fp8{});
  };
  switch (format.dtype_value) {
    case KVBM_KERNELS_DTYPE_F16:
      return with_stored(std::integral_constant<int, KVBM_KERNELS_DTYPE_F16>{});
    case KVBM_KERNELS_DTYPE_BF16:
      return with_stored(std::integral_constant<int, KVBM_KERNELS_DTYPE_BF16>{});
    default:
      return with_stored(std::integral_constant<int, KVBM_KERNELS_DTYPE_F32>{});
  }
}

ConvertRows find_quantize(const RowFormat &format) {
  return with_types(format, [](auto dtype, auto stored) -> ConvertRows {
    return quantize_rows<decltype(dtype)::value, decltype(stored)::value>;
  });
}
ConvertRows find_dequantize(const RowFormat &format) {
  return with_types(format, [](auto dtype, auto stored) -> ConvertRows {
    return dequantize_rows<decltype(dtype)::value, decltype(stored)::value>;
  });
}

}  // namespace
}  // namespace kvbm::host
