// Rows of caches: append, gather and the words that keep tables up to date. Checks, then an engine.
#include <cinttypes>

#include "checks.h"
#include "engine.h"
#include "kvbm_kernels.h"
#include "status.h"
#include "token_rows.h"

namespace {

using namespace kvbm;

constexpr int kInvalid = KVBM_KERNELS_ERROR_INVALID_VALUE;

int check_quantization(const char *fn, const kvbm_kernels_quantization *quantization) {
  if (!quantization) return 0;
  if (int status = check_struct_nbytes(fn, "quantization", quantization->struct_nbytes, sizeof *quantization)) {
    return status;
  }
  const int stored = quantization->stored_value, dtype = quantization->dtype_value;
  if (stored != KVBM_KERNELS_STORED_INT8 && stored != KVBM_KERNELS_STORED_FP8) {
    return fail(kInvalid, fn, "quantization->stored_value is %d, expected 1 (int8) or 2 (fp8)", stored);
  }
  if (dtype != KVBM_KERNELS_DTYPE_F16 && dtype != KVBM_KERNELS_DTYPE_BF16 && dtype != KVBM_KERNELS_DTYPE_F32) {
    return fail(kInvalid, fn, "quantization->dtype_value is %d, expected 0 (f16), 1 (bf16) or 2 (f32)", dtype);
  }
  const int scale = quantization->scale_dtype_value;
  if (scale != KVBM_KERNELS_DTYPE_F32 && scale != KVBM_KERNELS_DTYPE_F16) {
    return fail(kInvalid, fn, "quantization->scale_dtype_value is %d, expected 2 (f32) or 0 (f16)", scale);
  }
  return 0;
}

int check_map(const char *fn, const kvbm_kernels_token_map *map, size_t num_tokens) {
  if (int status = check_not_null(fn, "map", map)) return status;
  if (int status = check_struct_nbytes(fn, "map", map->struct_nbytes, sizeof *map)) return status;
  if (map->block_size == 0) return fail(kInvalid, fn, "map->block_size is 0, expected 1 or more");
  if (map->slots) return 0;
  if (!map->block_tables) return fail(kInvalid, fn, "map->slots and map->block_tables are NULL, expected one of them");
  if (map->num_sequences == 0 || num_tokens % map->num_sequences != 0) {
    return fail(kInvalid, fn, "map->num_sequences is %zu, expected a divisor of the %zu token%s of the shape",
                map->num_sequences, num_tokens, num_tokens == 1 ? "" : "s");
  }
  size_t nbytes;
  if (__builtin_mul_overflow(map->num_sequences, map->block_table_stride, &nbytes) ||
      __builtin_mul_overflow(nbytes, sizeof(uint32_t), &nbytes)) {
    return fail(kInvalid, fn,
                "map->num_sequences=%zu and map->block_table_stride=%zu multiply to more than size_t holds",
                map->num_sequences, map->block_table_stride);
  }
  return 0;
}

// What is to be as it is told for the views of these calls, beside all that check_view looks at.
int check_views(const char *fn, const TokenRows &call, const kvbm_kernels_view *cache, const kvbm_kernels_view *rows) {
  if (cache->block_ids) return fail(kInvalid, fn, "cache->block_ids is not NULL: the map says which blocks");
  if (cache->num_blocks > 1 && cache->base_block_step != 0) {
    return fail(kInvalid, fn, "cache->base_block_step is %zu, expected 0: the blocks of a layer have one base",
                cache->base_block_step);
  }
  if (rows->block_ids) return fail(kInvalid, fn, "rows->block_ids is not NULL: all tokens are one block");
  if (rows->num_blocks != 1) {
    return fail(kInvalid, fn, "rows->num_blocks is %zu, expected 1: all tokens are one block", rows->num_blocks);
  }
  kvbm_kernels_block_shape stored = call.shape;
  stored.num_tokens = call.map.block_size;
  if (call.format.converts()) stored.row_nbytes = call.format.stored_nbytes();
  int64_t slots;
  if (__builtin_mul_overflow(cache->num_blocks, call.map.block_size, &slots)) {
    return fail(kInvalid, fn, "cache->num_blocks=%zu and map->block_size=%zu multiply to more than 63 bits",
                cache->num_blocks, call.map.block_size);
  }
  if (int status = check_view(fn, "cache", cache, stored, cache->num_blocks)) return status;
  return check_view(fn, "rows", rows, call.shape, 1);
}

Checked check_rows(const char *fn, const kvbm_kernels_view *cache, const kvbm_kernels_view *rows,
                   const kvbm_kernels_block_shape *shape, const kvbm_kernels_token_map *map,
                   const kvbm_kernels_quantization *quantization, TokenRows *call) {
  if (int status = check_quantization(fn, quantization)) return failed(status);
  if (int status = check_not_null(fn, "shape", shape)) return failed(status);
  if (is_empty(*shape)) return kNothingToDo;
  if (int status = check_total(fn, *shape, 1)) return failed(status);
  call->shape = *shape;
  call->format = {};
  if (quantization) {
    const size_t element = dtype_nbytes(quantization->dtype_value);
    call->format = {quantization->stored_value, quantization->dtype_value, quantization->scale_dtype_value,
                    shape->row_nbytes / element};
    if (shape->row_nbytes % element != 0) {
      return failed(fail(kInvalid, fn, "shape->row_nbytes is %zu, expected a multiple of %zu, the size of an element",
                         shape->row_nbytes, element));
    }
  }
  if (int status = check_map(fn, map, shape->num_tokens)) return failed(status);
  call->map = *map;
  if (map->slots) call->map.num_sequences = 1;
  if (int status = check_not_null(fn, "cache", cache)) return failed(status);
  if (int status = check_not_null(fn, "rows", rows)) return failed(status);
  if (cache->num_blocks == 0) return kNothingToDo;
  if (int status = check_views(fn, *call, cache, rows)) return failed(status);
  call->cache = *cache;
  call->rows = *rows;
  return kReady;
}

int on_stream(const char *fn, bool appends, const kvbm_kernels_view *cache, const kvbm_kernels_view *rows,
              const kvbm_kernels_block_shape *shape, const kvbm_kernels_token_map *map,
              const kvbm_kernels_quantization *quantization, kvbm_kernels_stream_t stream) {
  TokenRows call;
  call.appends = appends;
  const Checked checked = check_rows(fn, cache, rows, shape, map, quantization, &call);
  return checked.work ? device::move_rows(fn, call, stream) : checked.status;
}

int on_host(const char *fn, bool appends, const kvbm_kernels_view *cache, const kvbm_kernels_view *rows,
            const kvbm_kernels_block_shape *shape, const kvbm_kernels_token_map *map,
            const kvbm_kernels_quantization *quantization, int num_threads) {
  if (int status = check_not_negative(fn, "num_threads", num_threads)) return status;
  TokenRows call;
  call.appends = appends;
  const Checked checked = check_rows(fn, cache, rows, shape, map, quantization, &call);
  if (checked.work) host::move_rows(call, num_threads);
  return checked.status;
}

}  // namespace

int kvbm_kernels_launch_append(const kvbm_kernels_view *cache, const kvbm_kernels_view *rows,
                               const kvbm_kernels_block_shape *shape, const kvbm_kernels_token_map *map,
                               const kvbm_kernels_quantization *quantization, kvbm_kernels_stream_t stream) {
  return on_stream("append", true, cache, rows, shape, map, quantization, stream);
}

int kvbm_kernels_launch_gather(const kvbm_kernels_view *rows, const kvbm_kernels_view *cache,
                               const kvbm_kernels_block_shape *shape, const kvbm_kernels_token_map *map,
                               const kvbm_kernels_quantization *quantization, kvbm_kernels_stream_t stream) {
  return on_stream("gather", false, cache, rows, shape, map, quantization, stream);
}

int kvbm_kernels_host_append(const kvbm_kernels_view *cache, const kvbm_kernels_view *rows,
                             const kvbm_kernels_block_shape *shape, const kvbm_kernels_token_map *map,
                             const kvbm_kernels_quantization *quantization, int num_threads) {
  return on_host("host_append", true, cache, rows, shape, map, quantization, num_threads);
}

int kvbm_kernels_host_gather(const kvbm_kernels_view *rows, const kvbm_kernels_view *cache,
                             const kvbm_kernels_block_shape *shape, const kvbm_kernels_token_map *map,
                             const kvbm_kernels_quantization *quantization, int num_threads) {
  return on_host("host_gather", false, cache, rows, shape, map, quantization, num_threads);
}

int kvbm_kernels_launch_store_u32(uint32_t *const *dsts, const uint32_t *values, size_t n,
                                  kvbm_kernels_stream_t stream) {
  const char *fn = "store_u32";
  if (n == 0) return 0;
  if (int status = check_pieces(fn, "n", n, "the size of a pointer", sizeof *dsts)) return status;
  if (int status = check_not_null(fn, "dsts", dsts)) return status;
  if (int status = check_not_null(fn, "values", values)) return status;
  for (size_t i = 0; i < n; ++i) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(dsts[i]);
    if (address == 0) return fail(kInvalid, fn, "dsts[%zu] is NULL", i);
    if (address % sizeof(uint32_t) != 0) {
      return fail(kInvalid, fn, "dsts[%zu] is 0x%" PRIxPTR ", expected a multiple of 4", i, address);
    }
  }
  return device::store_u32(fn, dsts, values, n, stream);
}
