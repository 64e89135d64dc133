// The kernels of append and gather: rows as they are, rows that are quantised, rows that are dequantised. Each waits
// for what precedes it on the stream before it touches memory, and works out addresses meanwhile.
#pragma once

#include "kernel.cuh"
#include "numbers.cuh"
#include "rows_params.h"

namespace kvbm::device {

// Where a piece lies. The side that the map places starts from its first block.
struct Piece {
  char *rows, *cache;
  uint64_t token;
  uint32_t index;      // of the segment's pieces
  uint32_t innermost;  // its index in the innermost dimension
};

__device__ __forceinline__ Piece find_piece(const RowsParams &p, uint32_t piece) {
  const RowsHead &head = p.head;
  Piece found;
  uint32_t rest = piece;
  found.index = head.pieces.divide(rest);
  found.token = head.first_token;
  int64_t rows = 0, cache = 0;
  // Constant bounds keep the dimensions in constant memory and the loop free of indexing.
#pragma unroll
  for (uint32_t i = 0; i < kMaxRowsDims; ++i) {
    if (i < head.num_dims) {
      const uint32_t index = head.dims[i].size.divide(rest);
      rows += index * head.dims[i].rows_stride;
      cache += index * head.dims[i].cache_stride;
      if (i == head.token_dim) found.token += index;
      if (i == 0) found.innermost = index;
    }
  }
  found.rows = reinterpret_cast<char *>(p.bases[rest].rows + static_cast<uint64_t>(rows));
  found.cache = reinterpret_cast<char *>(p.bases[rest].cache + static_cast<uint64_t>(cache));
  return found;
}

// How far from the start of a layer its place in the cache is; false if the token has none.
__device__ __forceinline__ bool find_place(const RowsHead &head, uint64_t token, int64_t *offset) {
  uint64_t block, inside;
  if (head.slots) {
    block = static_cast<uint64_t>(head.slots[token]);
    if (block >= head.num_slots) return false;
    inside = head.block_size.divide(block);
  } else {
    uint64_t sequence = token;
    uint64_t position = head.tokens_per_sequence.divide(sequence);
    if (head.starts) position += head.starts[sequence];
    if (position >= head.num_slots) return false;
    inside = head.block_size.divide(position);
    block = head.block_tables[sequence * head.block_table_stride + position];
    if (block >= head.num_blocks) return false;
  }
  *offset = static_cast<int64_t>(block) * head.block_stride + static_cast<int64_t>(inside) * head.token_stride;
  return true;
}

// A group of lanes and the kPieces pieces that it takes, one after the other.
template <int kPieces>
struct Group {
  uint32_t lanes, lane;
  Piece pieces[kPieces];
  bool has_place[kPieces];

  // Where the pieces are but for their place in the cache. Past the end, the last again: it is there anyway, and all
  // lanes take part in what a group does together.
  __device__ __forceinline__ explicit Group(const RowsParams &p) {
    const RowsHead &head = p.head;
    lanes = 1u << head.lanes_log2;
    lane = threadIdx.x & (lanes - 1);
    const uint32_t group = blockIdx.x * (kRowsThreads >> head.lanes_log2) + (threadIdx.x >> head.lanes_log2);
    const uint32_t first = group * kPieces, last = head.num_pieces - 1;
    pieces[0] = find_piece(p, min(first, last));
    has_place[0] = first <= last;
#pragma unroll
    for (int j = 1; j < kPieces; ++j) {
      has_place[j] = first + j <= last;
      pieces[j] = pieces[j - 1];
      // Pieces follow each other in the innermost dimension; only where it starts again are they looked up.
      if (++pieces[j].innermost < head.dims[0].size.size) {
        if (has_place[j]) {
          pieces[j].rows += head.dims[0].rows_stride;
          pieces[j].cache += head.dims[0].cache_stride;
          pieces[j].token += head.token_dim == 0;
        }
      } else {
        pieces[j] = find_piece(p, min(first + j, last));
      }
    }
  }

  // Puts all pieces in their places in the cache, where they have one.
  __device__ __forceinline__ void find_places(const RowsHead &head) {
    int64_t offset = 0;
    bool found = false;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (j == 0 || pieces[j].token != pieces[j - 1].token) found = find_place(head, pieces[j].token, &offset);
      has_place[j] = has_place[j] && found;
      pieces[j].cache += offset;
    }
  }

  __device__ __forceinline__ uint32_t vector(const Piece &piece, int steps, int s) const {
    return (piece.index * steps + s) * lanes + lane;
  }
};

// Rows as they are. Each lane moves kSteps vectors of W bytes of each of its kPieces pieces.
template <int W, int kSteps, int kPieces, bool kAppends>
__global__ void __launch_bounds__(kRowsThreads) move_rows(const RowsParams __grid_constant__ p) {
  const RowsHead &head = p.head;
  typename Access<W>::Type data[kPieces][kSteps];
  Group<kPieces> group(p);
  const auto each_vector = [&](int j, auto body) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t vector = group.vector(group.pieces[j], kSteps, s);
      if (vector < head.vectors) body(uint64_t{vector} * W, data[j][s]);
    }
  };
  const auto load = [&](int j) {
    const char *const from = kAppends ? group.pieces[j].rows : group.pieces[j].cache;
    each_vector(j, [&](uint64_t at, auto &vector) { vector = Access<W>::load(from + at); });
  };
  wait_for_previous();
  // What is read is asked for as soon as its address is known: in an append before the map is.
  if (kAppends) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) load(j);
  }
  group.find_places(head);
  if (!kAppends) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (group.has_place[j]) load(j);
    }
  }
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    char *const to = kAppends ? group.pieces[j].cache : group.pieces[j].rows;
    if (group.has_place[j]) {
      each_vector(j, [&](uint64_t at, const auto &vector) { Access<W>::store(to + at, vector); });
    }
  }
}

__device__ __forceinline__ float scale_of(uint32_t amax, const RowsHead &head) {
  if (amax >= kF32Infinity) return from_bits(kF32NaN);
  const float scale = __fdiv_rn(from_bits(amax), head.is_fp8 ? kFp8Limit : kInt8Limit);
  return head.scale_is_f16 ? __half2float(__float2half_rn(fminf(scale, kF16Largest))) : scale;
}

// What is behind the codes of a row: padding and the scale, in accesses of kWidth bytes.
template <int kWidth>
__device__ __forceinline__ void put_scale(char *row, float scale, const RowsHead &head) {
#pragma unroll 1
  for (uint32_t i = head.head_dim; i < head.scale_offset; ++i) Access<1>::store(row + i, 0);
  char *const to = row + head.scale_offset;
  if (head.scale_is_f16) {
    const uint16_t bits = scale != scale ? kF16NaN : __half_as_ushort(__float2half_rn(scale));
    put_pieces < kWidth<2 ? kWidth : 2, 2>(to, bits);
  } else {
    put_pieces<kWidth, 4>(to, bits_of(scale));
  }
}

template <int kWidth>
__device__ __forceinline__ float get_scale(const char *row, const RowsHead &head) {
  const char *const from = row + head.scale_offset;
  if (head.scale_is_f16) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(get_pieces < kWidth<2 ? kWidth : 2, 2>(from))));
  }
  return from_bits(get_pieces<kWidth, 4>(from));
}

// A row a piece, kWidth numbers a lane at a time: kSteps times at most, which stay in registers; with kSteps = 0 any
// number of times, and a row is read a second time once its scale is known.
template <int kDtype, int kWidth, int kSteps, int kPieces>
__global__ void __launch_bounds__(kRowsThreads) quantize_rows(const RowsParams __grid_constant__ p) {
  using Given = Numbers<kDtype, kWidth>;
  const RowsHead &head = p.head;
  Given given[kPieces][kSteps ? kSteps : 1];
  Group<kPieces> group(p);
  wait_for_previous();
  uint32_t most[kPieces];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const char *const row = group.pieces[j].rows;
    most[j] = 0;
    if constexpr (kSteps == 0) {
#pragma unroll 4
      for (uint32_t chunk = group.lane; chunk < head.vectors; chunk += group.lanes) {
        Given some;
        some.load(row, chunk);
        most[j] = some.larger(most[j]);
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint32_t chunk = group.lane + s * group.lanes;
        if (chunk < head.vectors) {
          given[j][s].load(row, chunk);
        } else {
          given[j][s].clear();
        }
      }
    }
  }
  group.find_places(head);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) most[j] = given[j][s].larger(most[j]);
  }
  for (uint32_t away = group.lanes / 2; away > 0; away /= 2) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      most[j] = Given::larger_of(most[j], __shfl_xor_sync(0xffffffff, most[j], away));
    }
  }
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    if (!group.has_place[j]) continue;
    char *const row = group.pieces[j].cache;
    const float scale = scale_of(Given::largest(most[j]), head);
    if (group.lane == 0) put_scale<kWidth>(row, scale, head);
    const auto put = [&](const Given &numbers, uint32_t chunk, auto divide) {
      float x[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = divide(numbers[i]);
      char *const to = row + uint64_t{chunk} * kWidth;
      put_pieces<kWidth, kWidth>(to, head.is_fp8 ? fp8_codes<kWidth>(x) : int8_codes<kWidth>(x));
    };
    const auto put_all = [&](auto divide) {
      if constexpr (kSteps == 0) {
#pragma unroll 1
        for (uint32_t chunk = group.lane; chunk < head.vectors; chunk += group.lanes) {
          Given some;
          some.load(group.pieces[j].rows, chunk);
          put(some, chunk, divide);
        }
      } else {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const uint32_t chunk = group.lane + s * group.lanes;
          if (chunk < head.vectors) put(given[j][s], chunk, divide);
        }
      }
    };
    const SharedDivisor by(scale);
    if (by.is_usual()) {
      put_all([&](float x) { return by.divide(x); });
    } else {
      put_all([&](float x) { return scale > 0 ? __fdiv_rn(x, scale) : 0.0f; });
    }
  }
}

// As quantize_rows, the other way.
template <int kDtype, int kWidth, int kSteps, int kPieces>
__global__ void __launch_bounds__(kRowsThreads) dequantize_rows(const RowsParams __grid_constant__ p) {
  constexpr int kAtOnce = kSteps ? kSteps : 1;
  const RowsHead &head = p.head;
  Group<kPieces> group(p);
  wait_for_previous();
  group.find_places(head);
  float scale[kPieces];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    if (group.has_place[j]) scale[j] = get_scale<kWidth>(group.pieces[j].cache, head);
  }
#pragma unroll 1
  for (uint32_t first = group.lane; first < head.vectors; first += group.lanes * kAtOnce) {
    uint32_t codes[kPieces][kAtOnce];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        const uint32_t chunk = first + s * group.lanes;
        if (group.has_place[j] && chunk < head.vectors) {
          codes[j][s] = get_pieces<kWidth, kWidth>(group.pieces[j].cache + uint64_t{chunk} * kWidth);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (!group.has_place[j]) continue;
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        const uint32_t chunk = first + s * group.lanes;
        if (chunk >= head.vectors) continue;
        float x[kWidth];
        if (head.is_fp8) {
          from_fp8_codes<kWidth>(codes[j][s], x);
        } else {
          from_int8_codes<kWidth>(codes[j][s], x);
        }
        Numbers<kDtype, kWidth> wanted;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) wanted.set(i, __fmul_rn(x[i], scale[j]));
        wanted.store(group.pieces[j].rows, chunk);
      }
    }
  }
}

}  // namespace kvbm::device
