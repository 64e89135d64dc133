// Rows moved with stores that go around the cache, for the instruction set of the file that includes this.
#pragma once

#include <emmintrin.h>

#include <cstring>

#include "host/rows.h"

namespace kvbm::host {
namespace {

constexpr size_t kLine = 64;
// Rows up to this length are fetched ahead whole.
constexpr size_t kShortRow = 1024;

inline void stream16(char *dst, const char *src) {
  _mm_stream_si128(reinterpret_cast<__m128i *>(dst), _mm_loadu_si128(reinterpret_cast<const __m128i *>(src)));
}

// A row in the widest pieces its destination allows: bytes, then 16 at a time up to a cache line, then whole lines.
struct AnyRow {
  template <typename Line>
  static void stream(char *dst, const char *src, size_t nbytes) {
    const auto past = [dst](size_t at, size_t boundary) { return reinterpret_cast<uintptr_t>(dst + at) % boundary; };
    size_t at = 0;
    if (past(0, 16) != 0) {
      at = 16 - past(0, 16) < nbytes ? 16 - past(0, 16) : nbytes;
      std::memcpy(dst, src, at);
    }
    for (; past(at, kLine) != 0 && at + 16 <= nbytes; at += 16) stream16(dst + at, src + at);
    for (; at + kLine <= nbytes; at += kLine) Line::copy(dst + at, src + at);
    for (; at + 16 <= nbytes; at += 16) stream16(dst + at, src + at);
    if (at != nbytes) std::memcpy(dst + at, src + at, nbytes - at);
  }
};

// A row of whole, aligned cache lines.
struct LinesRow {
  template <typename Line>
  static void stream(char *dst, const char *src, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += kLine) Line::copy(dst + at, src + at);
  }
};

// Rows up to kShortRow, fetching a later run meanwhile.
template <typename Line, typename Row>
void stream_short_rows(const Rows &rows) {
  char *dst = rows.dst;
  const char *src = rows.src, *next = rows.next_src;
  for (size_t i = 0; i < rows.count; ++i) {
    for (size_t at = 0; at < rows.nbytes; at += kLine) _mm_prefetch(next + at, _MM_HINT_T0);
    Row::template stream<Line>(dst, src, rows.nbytes);
    dst += rows.dst_stride;
    src += rows.src_stride;
    next += rows.next_src_stride;
  }
}

template <typename Line>
void stream_rows(const Rows &rows) {
  if (rows.nbytes <= kShortRow) {
    const uint64_t bits = reinterpret_cast<uintptr_t>(rows.dst) | static_cast<uint64_t>(rows.dst_stride) | rows.nbytes;
    return bits % kLine == 0 ? stream_short_rows<Line, LinesRow>(rows) : stream_short_rows<Line, AnyRow>(rows);
  }
  for (size_t i = 0; i < rows.count; ++i) {
    char *dst = rows.dst + static_cast<int64_t>(i) * rows.dst_stride;
    const char *src = rows.src + static_cast<int64_t>(i) * rows.src_stride;
    const bool last = i + 1 == rows.count;
    // Only for the pages they lie in: the processor fetches the rest of a long row by itself.
    _mm_prefetch(last ? rows.next_src : src + rows.src_stride, _MM_HINT_T0);
    _mm_prefetch(last ? rows.next_dst : dst + rows.dst_stride, _MM_HINT_T0);
    AnyRow::stream<Line>(dst, src, rows.nbytes);
  }
}

}  // namespace
}  // namespace kvbm::host
