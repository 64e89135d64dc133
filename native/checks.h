// The checks that stand above both engines. Each returns a status, and explains a failure under the name of `fn`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine.h"
#include "kvbm_kernels.h"

namespace kvbm {

// A status and whether there is work left to do: checks can end a call early in success.
struct Checked {
  int status;
  bool work;
};
constexpr Checked kNothingToDo{0, false};
constexpr Checked kReady{0, true};
inline Checked failed(int status) { return {status, false}; }

// Bytes of an element of the type, or 0 for a value that is no type.
size_t dtype_nbytes(int dtype_value);

int check_dtype(const char *fn, int dtype_value);
int check_layout(const char *fn, int layout_value);
int check_not_negative(const char *fn, const char *name, int value);
int check_not_null(const char *fn, const char *name, const void *pointer);
int check_struct_nbytes(const char *fn, const char *name, size_t nbytes, size_t expected);

// Every entry of a host table.
int check_entries(const char *fn, const char *name, const void *const *table, size_t count);

// count pieces of nbytes, which have to fit size_t.
int check_pieces(const char *fn, const char *nbytes_name, size_t nbytes, const char *count_name, size_t count);

// The layouts as views; kvbm_kernels_*_view() under the name of the function that asks.
int block_stack_view(const char *fn, kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                     const kvbm_kernels_block_shape *shape, int layout_value);
int universal_view(const char *fn, kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                   const kvbm_kernels_block_shape *shape);

// The bytes of all rows, which have to fit size_t.
int check_total(const char *fn, const kvbm_kernels_block_shape &shape, size_t num_blocks);

// That a view has a row everywhere the shape asks for one. Sizes are not zero and their product fits.
int check_view(const char *fn, const char *name, const kvbm_kernels_view *view, const kvbm_kernels_block_shape &shape,
               size_t num_blocks);

inline bool is_empty(const kvbm_kernels_block_shape &shape) {
  return shape.num_layers == 0 || shape.num_outer == 0 || shape.num_heads == 0 || shape.num_tokens == 0 ||
         shape.row_nbytes == 0;
}

}  // namespace kvbm
