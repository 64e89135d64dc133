#include "checks.h"

#include <cinttypes>
#include <climits>

#include "status.h"

namespace kvbm {
namespace {

constexpr int kInvalid = KVBM_KERNELS_ERROR_INVALID_VALUE;

// Sums of size*|stride| that say when they no longer fit 63 bits.
struct Extent {
  int64_t nbytes = 0;
  bool fits = true;

  void add(size_t count, int64_t stride) {
    // The magnitude of INT64_MIN has no int64_t.
    int64_t product = 0;
    fits = fits && stride != INT64_MIN && !__builtin_mul_overflow(count, stride < 0 ? -stride : stride, &product) &&
           !__builtin_add_overflow(nbytes, product, &nbytes);
  }
};

}  // namespace

size_t dtype_nbytes(int dtype_value) {
  switch (dtype_value) {
    case KVBM_KERNELS_DTYPE_F16:
    case KVBM_KERNELS_DTYPE_BF16:
      return 2;
    case KVBM_KERNELS_DTYPE_F32:
      return 4;
    case KVBM_KERNELS_DTYPE_F64:
      return 8;
    case KVBM_KERNELS_DTYPE_FP8_E4M3:
    case KVBM_KERNELS_DTYPE_FP8_E5M2:
    case KVBM_KERNELS_DTYPE_INT8:
    case KVBM_KERNELS_DTYPE_UINT8:
      return 1;
    default:
      return 0;
  }
}

int check_dtype(const char *fn, int dtype_value) {
  if (dtype_nbytes(dtype_value) != 0) return 0;
  return fail(kInvalid, fn,
              "dtype_value is %d, expected 0 (f16), 1 (bf16), 2 (f32), 3 (f64), 4 (fp8_e4m3), 5 (fp8_e5m2), 6 (int8) "
              "or 7 (uint8)",
              dtype_value);
}

int check_layout(const char *fn, int layout_value) {
  if (layout_value == KVBM_KERNELS_LAYOUT_NHD || layout_value == KVBM_KERNELS_LAYOUT_HND) return 0;
  return fail(kInvalid, fn, "layout_value is %d, expected 0 (NHD) or 1 (HND)", layout_value);
}

int check_not_negative(const char *fn, const char *name, int value) {
  if (value >= 0) return 0;
  return fail(kInvalid, fn, "%s is %d, expected 0 or more", name, value);
}

int check_not_null(const char *fn, const char *name, const void *pointer) {
  if (pointer) return 0;
  return fail(kInvalid, fn, "%s is NULL", name);
}

int check_struct_nbytes(const char *fn, const char *name, size_t nbytes, size_t expected) {
  if (nbytes >= expected) return 0;
  return fail(kInvalid, fn, "%s->struct_nbytes is %zu, expected at least %zu", name, nbytes, expected);
}

int check_entries(const char *fn, const char *name, const void *const *table, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (!table[i]) return fail(kInvalid, fn, "%s[%zu] is NULL", name, i);
  }
  return 0;
}

int check_pieces(const char *fn, const char *nbytes_name, size_t nbytes, const char *count_name, size_t count) {
  size_t total;
  if (!__builtin_mul_overflow(nbytes, count, &total)) return 0;
  return fail(kInvalid, fn, "%s=%zu and %s=%zu multiply to more than size_t holds", nbytes_name, nbytes, count_name,
              count);
}

int check_total(const char *fn, const kvbm_kernels_block_shape &shape, size_t num_blocks) {
  size_t total = num_blocks;
  const size_t factors[] = {shape.num_layers, shape.num_outer, shape.num_heads, shape.num_tokens, shape.row_nbytes};
  for (size_t factor : factors) {
    if (__builtin_mul_overflow(total, factor, &total)) {
      return fail(
          kInvalid, fn,
          "the sizes num_blocks=%zu, nl=%zu, no=%zu, nh=%zu, nt=%zu and rows of %zu bytes multiply to more than "
          "size_t holds",
          num_blocks, shape.num_layers, shape.num_outer, shape.num_heads, shape.num_tokens, shape.row_nbytes);
    }
  }
  return 0;
}

int check_view(const char *fn, const char *name, const kvbm_kernels_view *view, const kvbm_kernels_block_shape &shape,
               size_t num_blocks) {
  if (!view) return fail(kInvalid, fn, "%s is NULL", name);
  if (!view->bases) return fail(kInvalid, fn, "%s->bases is NULL", name);

  size_t last_id = 0;
  if (view->block_ids) {
    for (size_t i = 0; i < num_blocks; ++i) {
      const int64_t id = view->block_ids[i];
      if (id < 0 || static_cast<uint64_t>(id) >= view->num_blocks) {
        return fail(kInvalid, fn, "%s->block_ids[%zu] is %" PRId64 ", expected 0 to %zu (of num_blocks %zu)", name, i,
                    id, view->num_blocks ? view->num_blocks - 1 : 0, view->num_blocks);
      }
      if (static_cast<size_t>(id) > last_id) last_id = static_cast<size_t>(id);
    }
  } else {
    if (num_blocks > view->num_blocks) {
      return fail(kInvalid, fn, "num_blocks is %zu, but %s has %zu block%s", num_blocks, name, view->num_blocks,
                  view->num_blocks == 1 ? "" : "s");
    }
    last_id = num_blocks - 1;
  }

  size_t last_index = 0;
  bool fits = true;
  const size_t indices[][2] = {{last_id, view->base_block_step},
                               {shape.num_layers - 1, view->base_layer_step},
                               {shape.num_outer - 1, view->base_outer_step}};
  for (const auto &[last, step] : indices) {
    size_t part = 0;
    fits = fits && !__builtin_mul_overflow(last, step, &part) && !__builtin_add_overflow(last_index, part, &last_index);
  }
  if (!fits) return fail(kInvalid, fn, "the base steps and sizes of %s multiply to more than size_t holds", name);
  if (last_index >= view->num_bases) {
    return fail(kInvalid, fn, "%s->num_bases is %zu, but the copy would use bases[%zu]", name, view->num_bases,
                last_index);
  }

  Extent extent;
  extent.add(1, view->offset);
  extent.add(last_id, view->block_stride);
  extent.add(shape.num_layers - 1, view->layer_stride);
  extent.add(shape.num_outer - 1, view->outer_stride);
  extent.add(shape.num_tokens - 1, view->token_stride);
  extent.add(shape.num_heads - 1, view->head_stride);
  extent.add(shape.row_nbytes, 1);
  if (!extent.fits) return fail(kInvalid, fn, "the strides and sizes of %s span more than 63 bits", name);

  // Only the distinct entries: a dimension that does not move the table index is not walked.
  const size_t blocks = view->base_block_step ? num_blocks : 1;
  const size_t layers = view->base_layer_step ? shape.num_layers : 1;
  const size_t outers = view->base_outer_step ? shape.num_outer : 1;
  for (size_t i = 0; i < blocks; ++i) {
    const size_t id = view->block_ids ? static_cast<size_t>(view->block_ids[i]) : i;
    for (size_t l = 0; l < layers; ++l) {
      for (size_t o = 0; o < outers; ++o) {
        const size_t index = id * view->base_block_step + l * view->base_layer_step + o * view->base_outer_step;
        if (!view->bases[index]) return fail(kInvalid, fn, "%s->bases[%zu] is NULL", name, index);
      }
    }
  }
  return 0;
}

}  // namespace kvbm
