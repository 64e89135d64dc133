// The rows of quantised caches on processors with AVX2 and F16C: compiled for them, and called only after asking.
#ifdef __x86_64__

#include <immintrin.h>

#include <type_traits>

#include "host/quantize.h"
#include "numbers.h"

namespace kvbm::host {
namespace {

__m256i splat(uint32_t bits) { return _mm256_set1_epi32(static_cast<int>(bits)); }

// The low byte of each of eight words.
void store_bytes(char *to, __m256i words) {
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i *>(to), _mm_packus_epi16(halves, halves));
}

__m128i load8(const char *from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)); }
__m128i load16(const char *from) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)); }

// As fp8_from_f32.
__m256i fp8_from_f32(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i magnitude = _mm256_and_si256(bits, splat(0x7fffffff));
  const __m256i tie = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), splat(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(magnitude, _mm256_add_epi32(tie, splat(0x7ffff - (120u << 23)))), 20);
  const __m256i normal = _mm256_min_epi32(rounded, splat(0x7e));
  const __m256 small = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p14f));
  const __m256i units = _mm256_sub_epi32(_mm256_castps_si256(small), splat(0x46800000));
  const __m256i is_small = _mm256_cmpgt_epi32(splat(0x3c800000), magnitude);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), splat(0x80));
  return _mm256_or_si256(sign, _mm256_blendv_epi8(normal, units, is_small));
}

// As f32_from_fp8.
__m256 f32_from_fp8(__m256i codes) {
  const __m256i magnitude = _mm256_and_si256(codes, splat(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, splat(0x80)), 24);
  const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), splat(120u << 23));
  const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
  __m256i bits = _mm256_blendv_epi8(normal, _mm256_castps_si256(small), _mm256_cmpgt_epi32(splat(8), magnitude));
  bits = _mm256_blendv_epi8(bits, splat(kF32NaN), _mm256_cmpeq_epi32(magnitude, splat(0x7f)));
  return _mm256_castsi256_ps(_mm256_or_si256(sign, bits));
}

struct Lanes {
  using Floats = __m256;
  static constexpr size_t kLanes = 8;

  template <int kDtype>
  static __m256 load(const char *from) {
    if constexpr (kDtype == KVBM_KERNELS_DTYPE_F32) return _mm256_loadu_ps(reinterpret_cast<const float *>(from));
    if constexpr (kDtype == KVBM_KERNELS_DTYPE_F16) return _mm256_cvtph_ps(load16(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(from)), 16));
  }
  template <int kDtype>
  static void store(char *to, __m256 x) {
    if constexpr (kDtype == KVBM_KERNELS_DTYPE_F32) {
      _mm256_storeu_ps(reinterpret_cast<float *>(to), x);
    } else if constexpr (kDtype == KVBM_KERNELS_DTYPE_F16) {
      _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    } else {
      const __m256i bits = _mm256_castps_si256(x);
      const __m256i tie = _mm256_and_si256(_mm256_srli_epi32(bits, 16), splat(1));
      const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(tie, splat(0x7fff))), 16);
      _mm_storeu_si128(reinterpret_cast<__m128i *>(to),
                       _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
    }
  }
  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 larger(__m256 most, __m256 x) {
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), splat(0x7fffffff));
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(most), magnitude));
  }
  static uint32_t largest(__m256 most) {
    const __m256i words = _mm256_castps_si256(most);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
  }
  static __m256 divide(__m256 x, float by) { return _mm256_div_ps(x, _mm256_set1_ps(by)); }
  static __m256 multiply(__m256 x, float by) {
    const __m256 product = _mm256_mul_ps(x, _mm256_set1_ps(by));
    const __m256 is_nan = _mm256_cmp_ps(product, product, _CMP_UNORD_Q);
    return _mm256_blendv_ps(product, _mm256_castsi256_ps(splat(kF32NaN)), is_nan);
  }

  template <int kStored>
  static __m256 load_codes(const char *from) {
    if constexpr (kStored == KVBM_KERNELS_STORED_INT8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(from)));
    return f32_from_fp8(_mm256_cvtepu8_epi32(load8(from)));
  }
  template <int kStored>
  static void store_codes(char *to, __m256 x) {
    if constexpr (kStored == KVBM_KERNELS_STORED_INT8) {
      const __m256 clamped = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(kInt8Limit)), _mm256_set1_ps(-kInt8Limit));
      store_bytes(to, _mm256_and_si256(_mm256_cvtps_epi32(clamped), splat(0xff)));
    } else {
      store_bytes(to, fp8_from_f32(x));
    }
  }
};

}  // namespace
}  // namespace kvbm::host

#include "host/quantize_rows.h"

namespace kvbm::host {

ConvertRows avx2_quantize(const RowFormat &format) { return find_quantize(format); }
ConvertRows avx2_dequantize(const RowFormat &format) { return find_dequantize(format); }

}  // namespace kvbm::host

#endif
