// The row movers for processors with AVX2: compiled for it, and called only after asking for it.
#ifdef __x86_64__

#include <immintrin.h>

#include <cstring>

#include "host/rows.h"
#include "host/stream_rows.h"

namespace kvbm::host {
namespace {

__m256i load32(const char *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }

struct LineAvx2 {
  // Both halves are loaded before either is stored, so that the line leaves the write buffer in one piece.
  static void copy(char *dst, const char *src) {
    const __m256i low = load32(src), high = load32(src + 32);
    _mm256_stream_si256(reinterpret_cast<__m256i *>(dst), low);
    _mm256_stream_si256(reinterpret_cast<__m256i *>(dst + 32), high);
  }
};

}  // namespace

void stream_avx2(const Rows &rows) { stream_rows<LineAvx2>(rows); }

void move_avx2(const Rows &rows) {
  const auto copy32 = [](char *to, const char *from) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), load32(from));
  };
  char *dst = rows.dst;
  const char *src = rows.src;
  for (size_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride) {
    size_t at = 0;
    for (; at + 32 <= rows.nbytes; at += 32) copy32(dst + at, src + at);
    // The last vector overlaps the one before.
    if (at != rows.nbytes) copy32(dst + rows.nbytes - 32, src + rows.nbytes - 32);
  }
}

}  // namespace kvbm::host

#endif
