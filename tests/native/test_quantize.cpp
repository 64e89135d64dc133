// The rows of quantised caches, converted for any processor and by the instructions of this one: the same bits.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "host/quantize.h"

namespace {

using namespace kvbm;
using Bytes = std::vector<char>;

int failures = 0;

// Bits of numbers of every kind: half of them near each other in magnitude, the rest at random.
Bytes random_rows(std::mt19937 &random, size_t nbytes) {
  Bytes bytes(nbytes);
  for (size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<char>(i % 4 == 3 ? random() % 3 + 0x3e : random());
  for (size_t i = 0; i < nbytes / 97; ++i) bytes[random() % nbytes] = static_cast<char>(random());
  return bytes;
}

void compare(const char *what, const RowFormat &format, size_t src_nbytes, size_t dst_nbytes,
             host::ConvertRows portable, host::ConvertRows fast) {
  std::mt19937 random(static_cast<unsigned>(format.head_dim));
  constexpr size_t kCount = 64;
  const Bytes src = random_rows(random, kCount * src_nbytes);
  Bytes expected(kCount * (dst_nbytes + 1) + 32, 0x55), actual(expected);
  for (auto [convert, dst] : {std::pair{portable, &expected}, std::pair{fast, &actual}}) {
    const auto stride = [](size_t nbytes) { return static_cast<int64_t>(nbytes); };
    convert(
        {dst->data() + 3, src.data(), stride(dst_nbytes + 1), stride(src_nbytes), kCount, 1, src.data(), 0, nullptr},
        format);
  }
  if (expected == actual) return;
  std::printf("%s differs: dtype %d, stored %d, scale %d, hd %zu\n", what, format.dtype_value, format.stored_value,
              format.scale_dtype_value, format.head_dim);
  ++failures;
}

}  // namespace

int main() {
#ifdef __x86_64__
  if (!host::has_avx2_and_f16c()) return 77;  // meson's "skipped"
  for (size_t head_dim : {1, 7, 8, 9, 31, 64, 80, 128, 129, 576}) {
    for (int dtype : {KVBM_KERNELS_DTYPE_F16, KVBM_KERNELS_DTYPE_BF16, KVBM_KERNELS_DTYPE_F32}) {
      for (int stored : {KVBM_KERNELS_STORED_INT8, KVBM_KERNELS_STORED_FP8}) {
        for (int scale : {KVBM_KERNELS_DTYPE_F16, KVBM_KERNELS_DTYPE_F32}) {
          const RowFormat format{stored, dtype, scale, head_dim};
          const size_t row_nbytes = head_dim * (dtype == KVBM_KERNELS_DTYPE_F32 ? 4 : 2);
          compare("quantize", format, row_nbytes, format.stored_nbytes(), host::portable_quantize(format),
                  host::avx2_quantize(format));
          compare("dequantize", format, format.stored_nbytes(), row_nbytes, host::portable_dequantize(format),
                  host::avx2_dequantize(format));
        }
      }
    }
  }
  return failures;
#else
  return 77;
#endif
}
