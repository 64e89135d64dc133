/* To link six.c with: a library without soname and symbol versions. Not meant to run. */
#define OLD(name) \
  int name(void); \
  int name(void) { return -1; }

OLD(kvbm_kernels_launch_universal_from_block)
OLD(kvbm_kernels_launch_block_from_universal)
OLD(kvbm_kernels_launch_vectorized_copy)
OLD(kvbm_kernels_memcpy_batch)
OLD(kvbm_kernels_has_memcpy_batch_async)
OLD(kvbm_kernels_is_stub_build)
