// Append and gather on a stream: how pieces are cut, and which kernel takes them.
#include <algorithm>

#include "engine.h"
#include "launcher.h"
#include "peer.h"
#include "rows.cuh"
#include "status.h"

namespace kvbm::device {
namespace {

constexpr uint64_t kMostPieces = uint64_t{1} << 30;

uint64_t lowest_bit(uint64_t n) { return n & (0 - n); }
uint32_t log2_from(uint64_t n) {  // of the first power of two that is not smaller
  uint32_t log2 = 0;
  while (uint64_t{1} << log2 < n) ++log2;
  return log2;
}

// What a kernel is chosen by: how wide it moves, how often in a piece, and, of rows as they are, of how many pieces.
struct Variant {
  uint32_t width, steps, pieces;
};

struct RowsKernel {
  const void *symbol;
  uint32_t pieces;  // that a group of lanes takes
};

class Rows {
 public:
  Rows(const char *fn, const Driver &driver, const StreamContext &context, const TokenRows &call,
       kvbm_kernels_stream_t stream)
      : fn_(fn),
        driver_(driver),
        call_(call),
        stream_(stream),
        overlaps_(launches_overlap(driver, context.device())),
        plan_(plan_of_token(call)) {}

  int run() {
    // Before anything is made of them.
    if (longest() >= kIndexLimit) return too_long();
    describe_map();
    describe_dims();
    const Variant variant = choose_variant();
    Head &head = params_.head;
    const size_t items = plan_.num_layers * plan_.num_outer;
    uint64_t per_item = head.pieces.size;
    for (int i = 0; i < plan_.num_dims; ++i) {
      if (__builtin_mul_overflow(per_item, plan_.dims[i].size, &per_item)) per_item = UINT64_MAX;
    }
    if (per_item > kMostPieces) return too_long();
    const uint64_t most_items = std::min<uint64_t>(RowsParams::kItems, kMostPieces / per_item);
    for (size_t item = 0; item < items; item += most_items) {
      const size_t num_items = std::min<size_t>(items - item, most_items);
      const size_t most_tokens = kMostPieces / (per_item * num_items);
      for (size_t token = 0; token < call_.shape.num_tokens; token += most_tokens) {
        const size_t num_tokens = std::min(call_.shape.num_tokens - token, most_tokens);
        describe_launch(item, num_items, token, num_tokens);
        head.num_pieces = static_cast<uint32_t>(per_item * num_items * num_tokens);
        if (int status = launch(variant)) {
          return fail(status, fn_, "CUDA refused the launch");
        }
      }
    }
    return 0;
  }

 private:
  using Head = RowsHead;

  // Of a token, what kernels count in 32 bits: bytes of a segment, numbers of a row, rows of a dimension.
  uint64_t longest() const {
    uint64_t most = std::max<uint64_t>(plan_.segment_nbytes, call_.format.head_dim);
    for (int i = 0; i < plan_.num_dims; ++i) most = std::max<uint64_t>(most, plan_.dims[i].size);
    return most;
  }

  int too_long() const {
    return fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn_, "one token is more than a launch can index");
  }

  // Everything of a token but its place: rows that are converted are units, and nothing longer is made of them.
  static Plan plan_of_token(const TokenRows &call) {
    kvbm_kernels_block_shape shape = call.shape;
    shape.num_tokens = 1;
    if (call.format.converts()) shape.row_nbytes = 1;
    kvbm_kernels_view cache = call.cache;
    cache.num_blocks = 1;
    return call.appends ? make_plan(cache, call.rows, shape, 1) : make_plan(call.rows, cache, shape, 1);
  }

  const Side &rows_side() const { return call_.appends ? plan_.src : plan_.dst; }
  const Side &cache_side() const { return call_.appends ? plan_.dst : plan_.src; }

  void describe_map() {
    const kvbm_kernels_token_map &map = call_.map;
    Head &head = params_.head;
    head.slots = map.slots;
    head.block_tables = map.block_tables;
    head.starts = map.starts;
    head.block_table_stride = map.block_table_stride;
    head.num_blocks = call_.cache.num_blocks;
    head.block_stride = call_.cache.block_stride;
    head.token_stride = call_.cache.token_stride;
    const size_t blocks = map.slots ? call_.cache.num_blocks : map.block_table_stride;
    // Positions have little more than 32 bits.
    if (__builtin_mul_overflow(blocks, map.block_size, &head.num_slots)) head.num_slots = UINT64_MAX;
    head.block_size = WideDivisor(map.block_size, head.num_slots);
    head.tokens_per_sequence = WideDivisor(call_.tokens_per_sequence(), call_.shape.num_tokens);
    head.head_dim = static_cast<uint32_t>(call_.format.head_dim);
    head.scale_offset = static_cast<uint32_t>(call_.format.scale_offset());
    head.is_fp8 = call_.format.stored_value == KVBM_KERNELS_STORED_FP8;
    head.scale_is_f16 = call_.format.scale_dtype_value == KVBM_KERNELS_DTYPE_F16;
  }

  // In the order of the rows, which are walked from their first to their last; the tokens among them.
  void describe_dims() {
    Head &head = params_.head;
    const auto magnitude = [](int64_t n) { return n < 0 ? 0 - static_cast<uint64_t>(n) : static_cast<uint64_t>(n); };
    const auto insert = [&](const RowsDim &dim) {
      uint32_t at = head.num_dims++;
      for (; at > 0 && magnitude(head.dims[at - 1].rows_stride) > magnitude(dim.rows_stride); --at) {
        head.dims[at] = head.dims[at - 1];
      }
      head.dims[at] = dim;
      return at;
    };
    for (int i = 0; i < plan_.num_dims; ++i) {
      const Dim &dim = plan_.dims[i];
      insert({Divisor(dim.size), call_.appends ? dim.src_stride : dim.dst_stride,
              call_.appends ? dim.dst_stride : dim.src_stride});
    }
    head.token_dim = insert({{}, call_.rows.token_stride, 0});
  }

  // All that the addresses of a side are made of, for what power of two divides them all.
  uint64_t address_bits(const Side &side, int64_t token_stride, uint64_t bits) const {
    for (int i = 0; i < plan_.num_dims; ++i) {
      bits |= static_cast<uint64_t>(&side == &plan_.src ? plan_.dims[i].src_stride : plan_.dims[i].dst_stride);
    }
    for (size_t l = 0; l < plan_.num_layers; ++l) {
      for (size_t o = 0; o < plan_.num_outer; ++o) bits |= reinterpret_cast<uint64_t>(side.address(0, l, o));
    }
    return bits | static_cast<uint64_t>(token_stride);
  }

  // How wide, and so how many lanes a piece takes and how many pieces a segment is cut into.
  Variant choose_variant() {
    Head &head = params_.head;
    const uint64_t rows = address_bits(rows_side(), call_.rows.token_stride, 0);
    const uint64_t cache =
        address_bits(cache_side(), call_.cache.token_stride, static_cast<uint64_t>(call_.cache.block_stride));
    Variant variant;
    if (call_.format.converts()) {
      const size_t element = call_.shape.row_nbytes / call_.format.head_dim;
      const uint64_t width = std::min(lowest_bit(cache | call_.format.head_dim | 4),
                                      std::max<uint64_t>(lowest_bit(rows | kVectorNbytes) / element, 1));
      head.vectors = static_cast<uint32_t>(call_.format.head_dim / width);
      head.pieces = Divisor(1);
      // Few lanes with much each share what it takes to find a row; their codes together should fill a sector.
      const uint32_t fewest = log2_from(kSectorNbytes / width), lanes = log2_from((head.vectors + 3) / 4);
      head.lanes_log2 = std::min(std::max(fewest, lanes), kWarpTileLog2);
      const uint32_t steps = ((head.vectors - 1) >> head.lanes_log2) + 1;
      return {static_cast<uint32_t>(width), steps, 0};
    }
    variant.width = static_cast<uint32_t>(lowest_bit(rows | cache | plan_.segment_nbytes | kVectorNbytes));
    head.vectors = static_cast<uint32_t>(plan_.segment_nbytes / variant.width);
    head.lanes_log2 = std::min(log2_from(head.vectors), kWarpTileLog2);
    // A vector a thread of what does not fill the GPU, else two: of one piece, or of two pieces that are no longer.
    const bool is_one_step = head.vectors <= 1u << head.lanes_log2;
    const bool is_little = call_.total_nbytes() <= kLittle;
    variant.steps = variant.width == kVectorNbytes && (is_one_step || is_little) ? 1 : kLongSteps;
    variant.pieces = is_little ? 1 : kShortPieces;
    head.pieces = Divisor((head.vectors - 1) / (variant.steps << head.lanes_log2) + 1);
    return variant;
  }

  void describe_launch(size_t item, size_t num_items, size_t token, size_t num_tokens) {
    Head &head = params_.head;
    head.first_token = token;
    head.dims[head.token_dim].size = Divisor(num_tokens);
    const uint64_t in_rows = token * static_cast<uint64_t>(call_.rows.token_stride);
    for (size_t i = 0; i < num_items; ++i) {
      const size_t l = (item + i) / plan_.num_outer, o = (item + i) % plan_.num_outer;
      params_.bases[i] = {reinterpret_cast<uint64_t>(rows_side().address(0, l, o)) + in_rows,
                          reinterpret_cast<uint64_t>(cache_side().address(0, l, o))};
    }
  }

  int launch(const Variant &variant) {
    const RowsKernel kernel = !call_.format.converts() ? moving(variant)
                              : call_.appends          ? quantizing(variant)
                                                       : dequantizing(variant);
    const uint32_t pieces = kernel.pieces * (kRowsThreads >> params_.head.lanes_log2);
    const uint32_t ctas = (params_.head.num_pieces - 1) / pieces + 1;
    return device::launch(driver_, kernel.symbol, ctas, kRowsThreads, overlaps_, &params_, stream_);
  }

  RowsKernel moving(const Variant &variant) const {
    return call_.appends ? moving<true>(variant) : moving<false>(variant);
  }
  template <bool kAppends>
  static RowsKernel moving(const Variant &variant) {
    switch (variant.width) {
      case 16:
        if (variant.steps != 1) return {symbol(move_rows<16, kLongSteps, 1, kAppends>), 1};
        if (variant.pieces == 1) return {symbol(move_rows<16, 1, 1, kAppends>), 1};
        return {symbol(move_rows<16, 1, kShortPieces, kAppends>), kShortPieces};
      case 8:
        return {symbol(move_rows<8, kLongSteps, 1, kAppends>), 1};
      case 4:
        return {symbol(move_rows<4, kLongSteps, 1, kAppends>), 1};
      case 2:
        return {symbol(move_rows<2, kLongSteps, 1, kAppends>), 1};
      default:
        return {symbol(move_rows<1, kLongSteps, 1, kAppends>), 1};
    }
  }

  // choose(constant) with the type of the rows.
  template <typename Choose>
  RowsKernel with_dtype(Choose choose) const {
    switch (call_.format.dtype_value) {
      case KVBM_KERNELS_DTYPE_F16:
        return choose(std::integral_constant<int, KVBM_KERNELS_DTYPE_F16>{});
      case KVBM_KERNELS_DTYPE_BF16:
        return choose(std::integral_constant<int, KVBM_KERNELS_DTYPE_BF16>{});
      default:
        return choose(std::integral_constant<int, KVBM_KERNELS_DTYPE_F32>{});
    }
  }

  RowsKernel quantizing(const Variant &variant) const {
    return with_dtype([&](auto dtype) -> RowsKernel {
      constexpr int kDtype = decltype(dtype)::value;
      if (variant.width == 4) {
        // Four rows of float32 are more than registers hold.
        if constexpr (kDtype != KVBM_KERNELS_DTYPE_F32) {
          if (variant.steps <= 2) return {symbol(quantize_rows<kDtype, 4, 2, 4>), 4};
        }
        if (variant.steps <= 4) return {symbol(quantize_rows<kDtype, 4, 4, 2>), 2};
        if (variant.steps <= 5) return {symbol(quantize_rows<kDtype, 4, 5, 1>), 1};
        return {symbol(quantize_rows<kDtype, 4, 0, 1>), 1};
      }
      if (variant.width == 2) {
        if (variant.steps <= 4) return {symbol(quantize_rows<kDtype, 2, 4, 2>), 2};
        return {symbol(quantize_rows<kDtype, 2, 0, 1>), 1};
      }
      return {symbol(quantize_rows<kDtype, 1, 0, 1>), 1};
    });
  }

  RowsKernel dequantizing(const Variant &variant) const {
    return with_dtype([&](auto dtype) -> RowsKernel {
      constexpr int kDtype = decltype(dtype)::value;
      if (variant.width == 4) return {symbol(dequantize_rows<kDtype, 4, 4, 2>), 2};
      if (variant.width == 2) return {symbol(dequantize_rows<kDtype, 2, 4, 2>), 2};
      return {symbol(dequantize_rows<kDtype, 1, 4, 1>), 1};
    });
  }

  template <typename Kernel>
  static const void *symbol(Kernel *kernel) {
    return reinterpret_cast<const void *>(kernel);
  }

  static constexpr uint32_t kShortPieces = 2;
  static constexpr uint32_t kLongSteps = 2;
  static constexpr size_t kLittle = size_t{2} << 20;
  static constexpr uint32_t kSectorNbytes = 32;

  const char *fn_;
  const Driver &driver_;
  const TokenRows &call_;
  kvbm_kernels_stream_t stream_;
  bool overlaps_;
  Plan plan_;
  RowsParams params_{};
};

// Judged by the first of each, as in a copy: ordinary memory is not for kernels.
int check_places(const char *fn, const Driver &driver, const StreamContext &context, const TokenRows &call) {
  const auto first = [](const kvbm_kernels_view &view) {
    return reinterpret_cast<uintptr_t>(view.bases[0]) + static_cast<uintptr_t>(view.offset);
  };
  const struct {
    const char *name;
    uintptr_t address;
  } places[] = {
      {"memory of rows", first(call.rows)},
      {"memory of the cache", first(call.cache)},
      {"array map->slots", reinterpret_cast<uintptr_t>(call.map.slots)},
      {"array map->block_tables", call.map.slots ? 0 : reinterpret_cast<uintptr_t>(call.map.block_tables)},
      {"array map->starts", call.map.slots ? 0 : reinterpret_cast<uintptr_t>(call.map.starts)},
  };
  for (const auto &place : places) {
    if (!place.address) continue;
    const Memory memory = memory_at(driver, place.address);
    if (memory.kind != Memory::kPageable) {
      if (int status = reach(fn, place.name, driver, context, memory, place.address)) return status;
      continue;
    }
    if (reads_pageable_memory(driver, context.device())) continue;
    return fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn,
                "the %s is ordinary host memory, expected device memory or pinned host memory", place.name);
  }
  return 0;
}

}  // namespace

int move_rows(const char *fn, const TokenRows &call, kvbm_kernels_stream_t stream) {
  const Driver &d = driver();
  if (d.status) return fail(d.status, fn, "there is no usable CUDA driver; the host functions need none");
  const StreamContext context(d, stream);
  if (context.status()) return fail(context.status(), fn, "the stream's device cannot be used");
  if (int status = check_places(fn, d, context, call)) return status;
  return Rows(fn, d, context, call, stream).run();
}

}  // namespace kvbm::device
