// The layouts as views: kvbm_kernels_*_view().
#include "checks.h"
#include "kvbm_kernels.h"
#include "status.h"

namespace {

using namespace kvbm;

// Products of sizes as strides and table steps; `fits` turns false when one is more than 63 bits hold.
struct Strides {
  bool fits = true;

  int64_t of(size_t a, size_t b) {
    int64_t product = 0;
    fits = fits && !__builtin_mul_overflow(a, b, &product);
    return product;
  }
  int64_t of(size_t a, int64_t b) { return of(a, static_cast<size_t>(b)); }
};

int check_arguments(const char *fn, const kvbm_kernels_view *view, void *const *bases,
                    const kvbm_kernels_block_shape *shape) {
  if (int status = check_not_null(fn, "view", view)) return status;
  if (int status = check_not_null(fn, "bases", bases)) return status;
  return check_not_null(fn, "shape", shape);
}

void set_chunk_order(kvbm_kernels_view *view, const kvbm_kernels_block_shape &shape, int layout_value,
                     Strides *strides) {
  const bool nhd = layout_value == KVBM_KERNELS_LAYOUT_NHD;
  view->token_stride = strides->of(nhd ? shape.num_heads : 1, shape.row_nbytes);
  view->head_stride = strides->of(nhd ? 1 : shape.num_tokens, shape.row_nbytes);
}

int finish(const char *fn, const Strides &strides, kvbm_kernels_view *view, const kvbm_kernels_view &filled) {
  if (!strides.fits) return fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn, "the strides of this shape do not fit 63 bits");
  *view = filled;
  return 0;
}

}  // namespace

namespace kvbm {

int block_stack_view(const char *fn, kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                     const kvbm_kernels_block_shape *shape, int layout_value) {
  if (int status = check_layout(fn, layout_value)) return status;
  if (int status = check_arguments(fn, view, bases, shape)) return status;
  Strides strides;
  kvbm_kernels_view filled{};
  filled.bases = bases;
  filled.num_blocks = num_blocks;
  filled.base_block_step = static_cast<size_t>(strides.of(shape->num_layers, shape->num_outer));
  filled.base_layer_step = shape->num_outer;
  filled.base_outer_step = 1;
  filled.num_bases = static_cast<size_t>(strides.of(num_blocks, filled.base_block_step));
  set_chunk_order(&filled, *shape, layout_value, &strides);
  return finish(fn, strides, view, filled);
}

int universal_view(const char *fn, kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                   const kvbm_kernels_block_shape *shape) {
  if (int status = check_arguments(fn, view, bases, shape)) return status;
  Strides strides;
  kvbm_kernels_view filled{};
  filled.bases = bases;
  filled.num_bases = num_blocks;
  filled.num_blocks = num_blocks;
  filled.base_block_step = 1;
  filled.token_stride = strides.of(size_t{1}, shape->row_nbytes);
  filled.outer_stride = strides.of(shape->num_tokens, filled.token_stride);
  filled.layer_stride = strides.of(shape->num_outer, filled.outer_stride);
  filled.head_stride = strides.of(shape->num_layers, filled.layer_stride);
  return finish(fn, strides, view, filled);
}

}  // namespace kvbm

int kvbm_kernels_block_stack_view(kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                                  const kvbm_kernels_block_shape *shape, int layout_value) {
  return block_stack_view("block_stack_view", view, bases, num_blocks, shape, layout_value);
}

int kvbm_kernels_operational_view(kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                                  const kvbm_kernels_block_shape *shape, int layout_value) {
  const char *fn = "operational_view";
  if (int status = check_layout(fn, layout_value)) return status;
  if (int status = check_arguments(fn, view, bases, shape)) return status;
  Strides strides;
  kvbm_kernels_view filled{};
  filled.bases = bases;
  filled.num_bases = num_blocks;
  filled.num_blocks = num_blocks;
  filled.base_block_step = 1;
  set_chunk_order(&filled, *shape, layout_value, &strides);
  filled.outer_stride = strides.of(shape->num_heads, strides.of(shape->num_tokens, shape->row_nbytes));
  filled.layer_stride = strides.of(shape->num_outer, filled.outer_stride);
  return finish(fn, strides, view, filled);
}

int kvbm_kernels_universal_view(kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                                const kvbm_kernels_block_shape *shape) {
  return universal_view("universal_view", view, bases, num_blocks, shape);
}
