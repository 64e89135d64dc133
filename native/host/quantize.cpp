#include "host/quantize.h"

#include <type_traits>

#include "numbers.h"

namespace kvbm::host {
namespace {

// One number at a time, for processors that quantize_avx2.cpp has nothing for.
struct Lanes {
  using Floats = float;
  static constexpr size_t kLanes = 1;

  template <int kDtype>
  static float load(const char *from) {
    if constexpr (kDtype == KVBM_KERNELS_DTYPE_F32) {
      float x;
      std::memcpy(&x, from, sizeof x);
      return x;
    }
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return kDtype == KVBM_KERNELS_DTYPE_F16 ? f32_from_f16(bits) : f32_from_bf16(bits);
  }
  template <int kDtype>
  static void store(char *to, float x) {
    if constexpr (kDtype == KVBM_KERNELS_DTYPE_F32) {
      std::memcpy(to, &x, sizeof x);
    } else {
      const uint16_t bits = kDtype == KVBM_KERNELS_DTYPE_F16 ? f16_from_f32(x) : bf16_from_f32(x);
      std::memcpy(to, &bits, sizeof bits);
    }
  }
  static float zero() { return 0; }
  static float larger(float most, float x) {
    const uint32_t magnitude = bits_of(x) & 0x7fffffff;
    return magnitude > bits_of(most) ? from_bits(magnitude) : most;
  }
  static uint32_t largest(float most) { return bits_of(most); }
  static float divide(float x, float by) { return x / by; }
  static float multiply(float x, float by) {
    const float product = x * by;
    return product == product ? product : from_bits(kF32NaN);
  }

  template <int kStored>
  static float load_codes(const char *from) {
    if constexpr (kStored == KVBM_KERNELS_STORED_INT8) return static_cast<signed char>(*from);
    return f32_from_fp8(static_cast<uint8_t>(*from));
  }
  template <int kStored>
  static void store_codes(char *to, float x) {
    if constexpr (kStored == KVBM_KERNELS_STORED_INT8) {
      const float clamped = x > kInt8Limit ? kInt8Limit : x < -kInt8Limit ? -kInt8Limit : x;
      // From 1.5*2^23 on the last bit of a float is 1, and the sum is rounded to nearest even.
      *to = static_cast<char>(bits_of(clamped + 0x1.8p23f));
    } else {
      *to = static_cast<char>(fp8_from_f32(x));
    }
  }
};

}  // namespace
}  // namespace kvbm::host

#include "host/quantize_rows.h"

namespace kvbm::host {

ConvertRows portable_quantize(const RowFormat &format) { return find_quantize(format); }
ConvertRows portable_dequantize(const RowFormat &format) { return find_dequantize(format); }

#ifdef __x86_64__

bool has_avx2_and_f16c() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

ConvertRows choose_quantize(const RowFormat &format) {
  return has_avx2_and_f16c() ? avx2_quantize(format) : portable_quantize(format);
}
ConvertRows choose_dequantize(const RowFormat &format) {
  return has_avx2_and_f16c() ? avx2_dequantize(format) : portable_dequantize(format);
}

#else

ConvertRows choose_quantize(const RowFormat &format) { return portable_quantize(format); }
ConvertRows choose_dequantize(const RowFormat &format) { return portable_dequantize(format); }

#endif

}  // namespace kvbm::host
