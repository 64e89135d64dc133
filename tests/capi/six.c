/*
 * A program of the library this one takes over from: it knows the six documented functions, by these declarations, and
 * nothing of our header. tests/test_capi_programs.py links it with old_library.c and with the stub, and runs it with
 * other builds.
 */
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "check.h"

int kvbm_kernels_launch_universal_from_block(void *const *universal_ptrs_device, const void *const *block_ptrs_device,
                                             size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                             int dtype_value, int layout_value, void *stream);
int kvbm_kernels_launch_block_from_universal(const void *const *universal_ptrs_device, void *const *block_ptrs_device,
                                             size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                             int dtype_value, int layout_value, void *stream);
int kvbm_kernels_launch_vectorized_copy(void **src_ptrs_device, void **dst_ptrs_device, size_t copy_size_bytes,
                                        int num_pairs, void *stream);
int kvbm_kernels_memcpy_batch(const void *const *src_ptrs_host, void *const *dst_ptrs_host, size_t size_per_copy,
                              size_t num_copies, int mode_value, void *stream);
bool kvbm_kernels_has_memcpy_batch_async(void);
bool kvbm_kernels_is_stub_build(void);

int main(void) {
  const char from[16] = "sixteen bytes  ";
  char to[16] = "";
  const void *src[1];
  void *dst[1];
  int status;
  src[0] = from;
  dst[0] = to;

  CHECK(kvbm_kernels_launch_universal_from_block(NULL, NULL, 0, 8, 32, 2, 16, 128, 1, 0, NULL) == 0);
  CHECK(kvbm_kernels_launch_block_from_universal(NULL, NULL, 1, 8, 32, 2, 16, 128, 3, 2, NULL) == 1);
  CHECK(kvbm_kernels_launch_vectorized_copy(NULL, NULL, 16, INT_MIN, NULL) == 1);
  CHECK(kvbm_kernels_memcpy_batch(src, dst, 16, 1, 7, NULL) == 1);
  status = kvbm_kernels_memcpy_batch(src, dst, 16, 1, 0, NULL);
  if (kvbm_kernels_is_stub_build()) {
    CHECK(status == 34);
    CHECK(!kvbm_kernels_has_memcpy_batch_async());
  } else {
    /* Done, or the CUDA runtime's own word for no driver or no device. */
    CHECK(status == 0 || status == 35 || status == 100);
  }
  printf("%s: memcpy_batch answers %d\n", kvbm_kernels_is_stub_build() ? "stub" : "CUDA", status);
  return 0;
}
