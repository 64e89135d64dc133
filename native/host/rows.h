// Moving a run of equally spaced rows: the inner loop of the host engine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvbm::host {

// A run of `count` rows of `nbytes` bytes, each a stride after the one before.
struct Rows {
  char *dst;
  const char *src;
  int64_t dst_stride, src_stride;
  size_t count, nbytes;
  // Hints: as many rows that will be read soon, and a run at dst_stride that will be written soon.
  const char *next_src;
  int64_t next_src_stride;
  const char *next_dst;
};
using MoveRows = void (*)(const Rows &rows);

// Through the cache, for rows of this length.
MoveRows choose_cached(size_t row_nbytes);

// Around the cache: a destination larger than the cache is neither read first nor kept. Null where the processor has
// no such stores. A thread that used it ends with end_streaming().
MoveRows choose_streaming();
void end_streaming();

// "fixed" (rows of 1, 2, 4, 8 or 16 bytes), "memcpy", "avx2", "stream_sse2" or "stream_avx2".
const char *name_of(MoveRows move);

// Where the processor has AVX2; move_avx2 for rows of 32 bytes and more.
void move_avx2(const Rows &rows);
void stream_avx2(const Rows &rows);

}  // namespace kvbm::host
