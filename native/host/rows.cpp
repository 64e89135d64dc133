#include "host/rows.h"

#include <cstring>

#ifdef __x86_64__
#include "host/stream_rows.h"
#endif

namespace kvbm::host {
namespace {

// A call of memcpy costs rows longer than this nothing.
constexpr size_t kLongestInline = 1024;

template <size_t kBytes>
void move_fixed(const Rows &rows) {
  char *dst = rows.dst;
  const char *src = rows.src;
  for (size_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride) {
    std::memcpy(dst, src, kBytes);
  }
}

void move_any(const Rows &rows) {
  char *dst = rows.dst;
  const char *src = rows.src;
  for (size_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride) {
    std::memcpy(dst, src, rows.nbytes);
  }
}

#ifdef __x86_64__

bool has_avx2() { return __builtin_cpu_supports("avx2"); }

struct LineSse2 {
  static void copy(char *dst, const char *src) {
    for (int i = 0; i < 4; ++i) stream16(dst + 16 * i, src + 16 * i);
  }
};

MoveRows choose_vectors(size_t row_nbytes) {
  return row_nbytes >= 32 && row_nbytes <= kLongestInline && has_avx2() ? move_avx2 : move_any;
}

#else

MoveRows choose_vectors(size_t) { return move_any; }

#endif

}  // namespace

#ifdef __x86_64__

MoveRows choose_streaming() { return has_avx2() ? stream_avx2 : stream_rows<LineSse2>; }
void end_streaming() { _mm_sfence(); }

#else

MoveRows choose_streaming() { return nullptr; }
void end_streaming() {}

#endif

MoveRows choose_cached(size_t row_nbytes) {
  switch (row_nbytes) {
    case 1:
      return move_fixed<1>;
    case 2:
      return move_fixed<2>;
    case 4:
      return move_fixed<4>;
    case 8:
      return move_fixed<8>;
    case 16:
      return move_fixed<16>;
    default:
      return choose_vectors(row_nbytes);
  }
}

const char *name_of(MoveRows move) {
  if (move == move_any) return "memcpy";
#ifdef __x86_64__
  if (move == move_avx2) return "avx2";
  if (move == choose_streaming()) return has_avx2() ? "stream_avx2" : "stream_sse2";
#endif
  return "fixed";
}

}  // namespace kvbm::host
