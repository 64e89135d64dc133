// The kernels: `move` and `move_tile` for rows of whole vectors and for everything unaligned, `gather` for rows of a
// few bytes.
#pragma once

#include "access.cuh"
#include "widths.h"

namespace kvbm::device {

template <typename P>
__device__ __forceinline__ uint64_t wide_word(const P &p, uint32_t first, uint32_t i) {
  return *reinterpret_cast<const uint64_t *>(&p.words[first + 2 * i]);
}

// The address of a chunk, in two parts: a word that may have to come from memory, and what does not wait for it.
struct Address {
  uint64_t word, offset;
  __device__ __forceinline__ uint64_t sum() const { return word + offset; }
};

template <typename P>
__device__ __forceinline__ Address chunk_address(const P &p, const Base &base, uint32_t item, uint32_t group,
                                                 uint32_t member) {
  switch (base.how) {
    case Base::kTable:
      return {base.table[group * base.block_step + member * base.chunk_step],
              base.origin + group * base.block_stride + member * base.chunk_stride};
    case Base::kParts:
      return {wide_word(p, base.words, group), wide_word(p, base.member_words, member)};
    case Base::kPacked:
      return {static_cast<uint64_t>(p.words[base.words + item]) << base.shift, base.origin};
    default:
      return {wide_word(p, base.words, item), 0};
  }
}

// The piece that a tile belongs to: the last whose first tile is not past it.
template <typename P>
__device__ __forceinline__ uint32_t piece_of(const P &p, uint32_t tile) {
  uint32_t low = 0, high = p.head.num_pieces;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (p.words[p.head.ragged_words + middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Whether the destination's chunks of one place in their blocks lie closer together than those of one block: in a pool
// of each layer, its ids the same for all. Judged by the first and the last place of two blocks.
__device__ __forceinline__ bool lies_by_place(const Head &head) {
  const Base &dst = head.dst;
  const uint32_t last = (head.group_size.size - 1) * dst.chunk_step;
  const uint64_t first_block = dst.table[0], second_block = dst.table[dst.block_step];
  const uint64_t across = dst.table[last] - first_block;
  const int64_t between = static_cast<int64_t>(second_block - first_block);
  return across == dst.table[dst.block_step + last] - second_block &&
         llabs(static_cast<int64_t>(across)) > llabs(between);
}

// kMayAsk: whether the launch may leave it to the kernel in which order the chunks of a table come.
template <bool kMayAsk = false, typename P>
__device__ __forceinline__ Tile find_tile(const P &p, uint32_t tile) {
  const Head &head = p.head;
  Tile found;
  uint32_t item = tile;
  if (head.num_pieces) {
    item = piece_of(p, tile);
    found.index = tile - p.words[head.ragged_words + item];
    found.nbytes = p.words[head.ragged_words + head.num_pieces + item];
    found.count = ((found.nbytes - 1) / kVectorNbytes >> head.tile_log2) + 1;
  } else {
    found.index = head.tiles_per_item.divide(item);
    found.nbytes = head.item_nbytes;
    found.count = head.tiles_per_item.size;
  }
  int64_t src = 0, dst = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < head.num_outer_dims; ++i) {
    const int64_t index = head.outer[i].size.divide(item);
    src += index * head.outer[i].src_stride;
    dst += index * head.outer[i].dst_stride;
  }
  uint32_t group = head.first_item + item;
  uint32_t member = head.group_size.divide(group);
  if (kMayAsk && head.num_blocks_asked.size > 1 && lies_by_place(head)) {
    member = item;
    group = head.num_blocks_asked.divide(member);
  }
  // Both words are asked for before either is waited for.
  const Address src_address = chunk_address(p, head.src, item, group, member);
  const Address dst_address = chunk_address(p, head.dst, item, group, member);
  found.src = reinterpret_cast<const char *>(src_address.sum() + src);
  found.dst = reinterpret_cast<char *>(dst_address.sum() + dst);
  return found;
}

struct Offsets {
  int32_t src, dst;
};

// kInner: the number of dimensions inside an item, or -1 where only the launch knows.
template <int kInner = -1>
__device__ __forceinline__ Offsets segment_offsets(const Head &head, uint32_t segment) {
  Offsets at{0, 0};
  // Constant bounds keep the dimensions in constant memory and the loop free of indexing.
#pragma unroll
  for (int i = (kInner < 0 ? kMaxDims : kInner) - 1; i >= 0; --i) {
    if (kInner >= 0 || i < static_cast<int>(head.num_inner)) {
      const uint32_t index = head.inner[i].size.divide(segment);
      at.src += static_cast<int32_t>(index) * head.inner[i].src_stride;
      at.dst += static_cast<int32_t>(index) * head.inner[i].dst_stride;
    }
  }
  return at;
}

// Where unit `unit` of 2^log2 bytes of an item lies.
template <int kInner = -1>
__device__ __forceinline__ Offsets unit_offsets(const Head &head, uint32_t log2, uint32_t unit) {
  Offsets at{0, 0};
  int32_t within = static_cast<int32_t>(unit << log2);
  if (kInner > 0 || (kInner < 0 && head.num_inner)) {
    within = static_cast<int32_t>(head.units[log2].divide(unit) << log2);
    at = segment_offsets<kInner>(head, unit);
  }
  return {at.src + within, at.dst + within};
}

__device__ __forceinline__ void copy_unit(char *dst, const char *src, uint32_t log2) {
  switch (log2) {
    case 4:
      Access<16>::store(dst, Access<16>::load(src));
      break;
    case 3:
      Access<8>::store(dst, Access<8>::load(src));
      break;
    case 2:
      Access<4>::store(dst, Access<4>::load(src));
      break;
    case 1:
      Access<2>::store(dst, Access<2>::load(src));
      break;
    default:
      Access<1>::store(dst, Access<1>::load(src));
      break;
  }
}

// A tile of an item whose addresses are all aligned to 2^log2.
__device__ __forceinline__ void copy_aligned(const Head &head, const Tile &tile, uint32_t lane, uint32_t lanes,
                                             uint32_t log2) {
  const uint32_t per_tile = (kVectorNbytes << head.tile_log2) >> log2;
  const uint32_t end = min((tile.index + 1) * per_tile, tile.nbytes >> log2);
#pragma unroll 1
  for (uint32_t unit = tile.index * per_tile + lane; unit < end; unit += lanes) {
    const Offsets at = unit_offsets(head, log2, unit);
    copy_unit(tile.dst + at.dst, tile.src + at.src, log2);
  }
}

// A tile of an item whose source and destination are equally far from alignment to 2^log2. Each segment is met in the
// aligned slots of the destination that it touches: whole ones by one access, the first and the last byte by byte.
__device__ __forceinline__ void copy_shifted(const Head &head, const Tile &tile, uint32_t lane, uint32_t lanes,
                                             uint32_t log2) {
  const int32_t width = 1 << log2;
  const bool one_segment = head.num_inner == 0;
  const uint32_t segment_nbytes = one_segment ? tile.nbytes : head.segment_nbytes;
  const uint32_t slots = (segment_nbytes + 2 * width - 2) >> log2;
  const uint32_t units = one_segment ? slots : slots * (tile.nbytes / segment_nbytes);
  const uint32_t per_tile = one_segment ? (kVectorNbytes << head.tile_log2) >> log2 : (units - 1) / tile.count + 1;
  const uint32_t begin = tile.index * per_tile;
  const uint32_t end = tile.index + 1 == tile.count ? units : min(begin + per_tile, units);
#pragma unroll 1
  for (uint32_t unit = begin + lane; unit < end; unit += lanes) {
    uint32_t segment = 0, slot = unit;
    Offsets at{0, 0};
    if (!one_segment) {
      segment = unit / slots;
      slot = unit - segment * slots;
      at = segment_offsets(head, segment);
    }
    const char *src = tile.src + at.src;
    char *dst = tile.dst + at.dst;
    // The bytes of the segment in this slot; the first slot starts before the segment, the last ends after it.
    const int32_t start =
        static_cast<int32_t>(slot << log2) - static_cast<int32_t>(reinterpret_cast<uintptr_t>(dst) & (width - 1));
    const int32_t from = max(start, 0);
    const int32_t to = min(start + width, static_cast<int32_t>(segment_nbytes));
    if (to - from == width) {
      copy_unit(dst + from, src + from, log2);
    } else {
#pragma unroll 1
      for (int32_t i = from; i < to; ++i) Access<1>::store(dst + i, Access<1>::load(src + i));
    }
  }
}

// Any tile, by the widest accesses that its item allows.
__device__ __forceinline__ void copy_any(const Head &head, const Tile &tile, uint32_t lane, uint32_t lanes) {
  const Width width = choose_width(head, tile);
  if (width.shifted) {
    copy_shifted(head, tile, lane, lanes, width.log2);
  } else {
    copy_aligned(head, tile, lane, lanes, width.log2);
  }
}

// A call's first launch may come before what precedes it on the stream has ended, and waits for that before it touches
// any memory. The launches of one call touch different bytes and may overlap; what comes after the call may not, so
// each but the first ends only once the one before has.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Only a launch that has waited lets the next one start, which waits for nothing.
__device__ __forceinline__ void start(const Head &head) {
  if (head.chain & kChainFirst) wait_for_previous();
  if (head.chain & kChainEarly) let_next_start();
}

// A CTA a tile, so that its threads share one look-up of the tile's item.
template <int kInner, typename P>
__global__ void __launch_bounds__(kCtaTileThreads) move_tile(const P __grid_constant__ p) {
  constexpr uint32_t kInFlight = (1u << kCtaTileLog2) / kCtaTileThreads;
  const Head &head = p.head;
  start(head);
  const Tile tile = find_tile<true>(p, blockIdx.x);
  const uint32_t first = (tile.index << kCtaTileLog2) + threadIdx.x;
  Offsets at[kInFlight];
#pragma unroll
  for (uint32_t j = 0; j < kInFlight; ++j) {
    at[j] = unit_offsets<kInner>(head, 4, first + j * kCtaTileThreads);
    // Here, while the tile's addresses are on their way, and not where they are used.
    asm volatile("" : "+r"(at[j].src), "+r"(at[j].dst));
  }
  if (is_whole(head, tile)) {
    const uint32_t vectors = tile.nbytes / kVectorNbytes;
    uint4 data[kInFlight];
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (first + j * kCtaTileThreads < vectors) data[j] = Access<16>::load(tile.src + at[j].src);
    }
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (first + j * kCtaTileThreads < vectors) Access<16>::store(tile.dst + at[j].dst, data[j]);
    }
  } else {
    copy_any(head, tile, threadIdx.x, kCtaTileThreads);
  }
  if (head.chain & kChainWait) wait_for_previous();
}

// Grid: any number of CTAs; each takes kInFlight tiles a group of lanes at a time, and strides by the grid. Wide: the
// accesses of whole vectors.
template <typename Wide, int kInFlight, int kThreads, int kMinCtas, typename P>
__global__ void __launch_bounds__(kThreads, kMinCtas) move(const P __grid_constant__ p) {
  const Head &head = p.head;
  start(head);
  const uint32_t lanes = 1u << head.tile_log2;
  const uint32_t groups = blockDim.x >> head.tile_log2;
  const uint32_t group = threadIdx.x >> head.tile_log2;
  const uint32_t lane = threadIdx.x & (lanes - 1);
  const uint32_t step = gridDim.x * groups * kInFlight;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * groups * kInFlight + group; first < head.num_tiles; first += step) {
    // In time for the next launch to be there when this one runs dry, and late enough to stay within its budget.
    if ((head.chain & kChainLate) && first + step >= head.num_tiles) let_next_start();
    Tile tiles[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      // Past the end, the first again: it is there anyway.
      tiles[j] = find_tile(p, first + j * groups < head.num_tiles ? first + j * groups : first);
    }
    uint4 data[kInFlight];
    char *to[kInFlight];
    uint32_t others = 0;
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const Tile &tile = tiles[j];
      const uint32_t vector = (tile.index << head.tile_log2) | lane;
      const bool is_there = first + j * groups < head.num_tiles;
      to[j] = nullptr;
      if (!is_whole(head, tile)) {
        if (is_there) others |= 1u << j;
      } else if (is_there && vector < tile.nbytes / kVectorNbytes) {
        const Offsets at = unit_offsets(head, 4, vector);
        data[j] = Wide::load(tile.src + at.src);
        to[j] = tile.dst + at.dst;
      }
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (to[j]) Wide::store(to[j], data[j]);
    }
#pragma unroll 1
    for (int j = 0; others >> j; ++j) {
      if (others >> j & 1) copy_any(head, find_tile(p, first + j * groups), lane, lanes);
    }
  }
  if (head.chain & kChainWait) wait_for_previous();
}

// Sixteen bytes of the destination, gathered from rows of 2^kLog2 bytes.
template <int kLog2>
__device__ __forceinline__ void gather_vector(const Head &head, const Tile &tile, uint32_t vector) {
  constexpr uint32_t kRows = kVectorNbytes >> kLog2;
  typename Access<1 << kLog2>::Type rows[kRows];
  // Rows follow each other in the innermost dimension; only where it starts again are they looked up.
  const InnerDim &innermost = head.inner[head.num_inner - 1];
  uint32_t row = vector * kRows, rest = row;
  uint32_t index = innermost.size.divide(rest);
  Offsets at = segment_offsets(head, row);
  const int32_t to = at.dst;
#pragma unroll
  for (uint32_t j = 0; j < kRows; ++j) {
    rows[j] = Access<1 << kLog2>::load(tile.src + at.src);
    if (j + 1 < kRows) {
      ++row;
      at.src += innermost.src_stride;
      if (++index == innermost.size.size) {
        index = 0;
        at = segment_offsets(head, row);
      }
    }
  }
  uint32_t words[4];
  if constexpr (kLog2 == 3) {
    words[0] = rows[0].x, words[1] = rows[0].y, words[2] = rows[1].x, words[3] = rows[1].y;
  } else {
    constexpr uint32_t kPerWord = 4 >> kLog2;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      words[i] = 0;
#pragma unroll
      for (uint32_t j = 0; j < kPerWord; ++j) {
        words[i] |= static_cast<uint32_t>(rows[i * kPerWord + j]) << (j * (8 << kLog2));
      }
    }
  }
  Access<16>::store(tile.dst + to, make_uint4(words[0], words[1], words[2], words[3]));
}

// As `move`, for a plan whose segments are 2^n < 16 bytes, aligned to themselves, and whose dimensions make contiguous
// runs of whole vectors in the destination.
template <int kThreads, typename P>
__global__ void __launch_bounds__(kThreads) gather(const P __grid_constant__ p) {
  const Head &head = p.head;
  start(head);
  const uint32_t lanes = 1u << head.tile_log2;
  const uint32_t groups = blockDim.x >> head.tile_log2;
  const uint32_t group = threadIdx.x >> head.tile_log2;
  const uint32_t lane = threadIdx.x & (lanes - 1);
#pragma unroll 1
  for (uint32_t index = blockIdx.x * groups + group; index < head.num_tiles; index += gridDim.x * groups) {
    if ((head.chain & kChainLate) && index + gridDim.x * groups >= head.num_tiles) let_next_start();
    const Tile tile = find_tile(p, index);
    const uint32_t vector = (tile.index << head.tile_log2) | lane;
    if (!is_gathered(head, tile)) {
      copy_any(head, tile, lane, lanes);
    } else if (vector < tile.nbytes / kVectorNbytes) {
      switch (head.segment_nbytes) {
        case 8:
          gather_vector<3>(head, tile, vector);
          break;
        case 4:
          gather_vector<2>(head, tile, vector);
          break;
        case 2:
          gather_vector<1>(head, tile, vector);
          break;
        default:
          gather_vector<0>(head, tile, vector);
          break;
      }
    }
  }
  if (head.chain & kChainWait) wait_for_previous();
}

}  // namespace kvbm::device
