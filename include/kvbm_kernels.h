/*
 * kvbm_kernels: move the KV-cache blocks of large language models between memory layouts and between memories.
 *
 * This header is the specification of the C API: what is not in it is private. It needs no CUDA header, compiles as
 * C99 and C++11, and may be included before or after cuda_runtime.h. Python reads this same file through cffi.
 *
 * Words and symbols
 *
 *   nb   blocks in a call
 *   nl   layers
 *   no   outer chunks: 2 for K and V, 1 for MLA or for K and V packed in one row
 *   nh   KV heads (of this rank)
 *   nt   tokens per block
 *   hd   head dimension, in elements
 *   row  the hd elements of one (block, layer, outer, token, head). Rows are always contiguous.
 *   chunk  the nt*nh rows of one (block, layer, outer)
 *
 * Layouts
 *
 *   NHD block stack  nl*no chunks a block, each [nt, nh, hd]
 *   HND block stack  nl*no chunks a block, each [nh, nt, hd]
 *   operational      one buffer a block, [nl, no, nt*nh*hd], the last dimension in NHD or HND order
 *   universal        one buffer a block, [nh, nl, no, nt, hd]: a range of heads is one contiguous slice
 *
 * Status codes
 *
 *   Every function that returns int, but for kvbm_kernels_last_batch_routes(), returns a value of CUDA's cudaError_t;
 *   0 is success. The library's own checks return KVBM_KERNELS_ERROR_INVALID_VALUE before any byte is touched, and
 *   leave a sentence naming the argument in kvbm_kernels_last_error_message(). A call that fails its checks changes
 *   nothing.
 *
 *   The checks come in this order: enumerated values and negative counts; then "nothing to do" (any count or size is
 *   zero), which returns 0 in every build whatever the pointers; then sizes that do not fit size_t; then null
 *   tables; then the entries of host tables.
 *
 * Threads and memory
 *
 *   Every function may be called from any number of threads at once. The library allocates no memory that outlives a
 *   call, never prints, never aborts, and lets no C++ exception out. The functions that take a stream and
 *   kvbm_kernels_explain_copy() use up to 160 KiB of the calling thread's stack, the others a few. Overlap between
 *   what one call reads and what it writes, or between two rows it writes, is undefined unless a function says
 *   otherwise.
 *
 * Builds
 *
 *   The build without CUDA (the stub) has the same symbols and the same checks. Its stream functions return
 *   KVBM_KERNELS_ERROR_STUB_LIBRARY where they would have started work; the host functions do real work in both
 *   builds. The CUDA build loads on a machine without a driver: its stream functions then return the CUDA runtime's
 *   own code (35 or 100).
 */
#ifndef KVBM_KERNELS_H
#define KVBM_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KVBM_KERNELS_API __attribute__((visibility("default")))
#else
#define KVBM_KERNELS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. kvbm_kernels_version() gives that of the library that was loaded. */
#define KVBM_KERNELS_VERSION_MAJOR 0
#define KVBM_KERNELS_VERSION_MINOR 1
#define KVBM_KERNELS_VERSION_PATCH 0

/* cudaStream_t. NULL is the NULL stream; CUDA's handles 0x1 (legacy) and 0x2 (per-thread) are understood. */
struct CUstream_st;
typedef struct CUstream_st *kvbm_kernels_stream_t;

/* Status codes with a meaning of their own here; values are cudaError_t's. */
#define KVBM_KERNELS_SUCCESS 0
/* An argument is not what the function's contract allows. */
#define KVBM_KERNELS_ERROR_INVALID_VALUE 1
/* The library could not get the memory it needed. */
#define KVBM_KERNELS_ERROR_MEMORY_ALLOCATION 2
/* This is the build without CUDA, and the call would have started work on a stream. */
#define KVBM_KERNELS_ERROR_STUB_LIBRARY 34
/* The route asked for cannot be used here: KVBM_KERNELS_MODE_BATCH without a usable cudaMemcpyBatchAsync. */
#define KVBM_KERNELS_ERROR_NOT_SUPPORTED 801

/*
 * Element types. The library moves bytes: a type stands for its size, and no value is ever converted but the rows of a
 * quantised cache.
 */
#define KVBM_KERNELS_DTYPE_F16 0
#define KVBM_KERNELS_DTYPE_BF16 1
#define KVBM_KERNELS_DTYPE_F32 2
#define KVBM_KERNELS_DTYPE_F64 3
#define KVBM_KERNELS_DTYPE_FP8_E4M3 4
#define KVBM_KERNELS_DTYPE_FP8_E5M2 5
#define KVBM_KERNELS_DTYPE_INT8 6
#define KVBM_KERNELS_DTYPE_UINT8 7

/* The order inside a chunk. */
#define KVBM_KERNELS_LAYOUT_NHD 0
#define KVBM_KERNELS_LAYOUT_HND 1

/* How kvbm_kernels_memcpy_batch moves its pieces. */
/* The fastest route that is correct for these pointers, this stream and this driver. */
#define KVBM_KERNELS_MODE_AUTO 0
/* One cudaMemcpyAsync a piece. */
#define KVBM_KERNELS_MODE_ASYNC 1
/* cudaMemcpyBatchAsync and nothing else, or KVBM_KERNELS_ERROR_NOT_SUPPORTED. */
#define KVBM_KERNELS_MODE_BATCH 2

/* The ways a batch can go, as bits: kvbm_kernels_last_batch_routes(). */
/* A kernel of this library. */
#define KVBM_KERNELS_ROUTE_KERNEL 1
/* cudaMemcpyAsync, a call for each piece or run of adjacent pieces. */
#define KVBM_KERNELS_ROUTE_ASYNC 2
/* cudaMemcpyBatchAsync. */
#define KVBM_KERNELS_ROUTE_BATCH 4

/*
 * About the library
 */

/* The library's version, "MAJOR.MINOR.PATCH". A static string. */
KVBM_KERNELS_API const char *kvbm_kernels_version(void);

/* True for the build without CUDA. */
KVBM_KERNELS_API bool kvbm_kernels_is_stub_build(void);

/*
 * True if kvbm_kernels_memcpy_batch can use cudaMemcpyBatchAsync with this driver: built with CUDA 12.8 or newer, and
 * a driver that has the entry. False in the stub and where there is no driver.
 */
KVBM_KERNELS_API bool kvbm_kernels_has_memcpy_batch_async(void);

/* What kvbm_kernels_get_build_info() fills in. */
typedef struct kvbm_kernels_build_info {
  /* Set by the caller to sizeof(kvbm_kernels_build_info), so that fields can be added at the end later. */
  size_t struct_nbytes;
  /* As kvbm_kernels_version(). */
  const char *version;
  /* The CUDA architectures compiled in, "80,86,..."; "" in the stub. The newest is also there as PTX. */
  const char *cuda_archs;
  /* The CUDA runtime linked in, 1000*major + 10*minor; 0 in the stub. */
  int cuda_version;
  /* The newest CUDA the installed driver supports, same form; 0 in the stub or without a driver. */
  int driver_version;
  /* CUDA devices this process can see; 0 in the stub or without a driver. */
  int num_devices;
  /* As kvbm_kernels_is_stub_build(). */
  bool is_stub_build;
} kvbm_kernels_build_info;

/*
 * Fill in *info. Only the first info->struct_nbytes bytes are written. The strings are static.
 * Returns 0, or 1 if info is NULL or info->struct_nbytes is smaller than that of version 0.1.
 */
KVBM_KERNELS_API int kvbm_kernels_get_build_info(kvbm_kernels_build_info *info);

/*
 * The name ("cudaErrorInvalidValue") and the meaning in a sentence of a status code. Static strings, never NULL; a
 * code nobody knows is "unrecognized".
 */
KVBM_KERNELS_API const char *kvbm_kernels_status_name(int status);
KVBM_KERNELS_API const char *kvbm_kernels_status_string(int status);

/*
 * Why the calling thread's last failed call failed, for example
 * "universal_from_block: layout_value is 7, expected 0 (NHD) or 1 (HND)". "" if none has failed. A call that succeeds
 * leaves it as it was. The string belongs to the thread and is good until its next failing call.
 */
KVBM_KERNELS_API const char *kvbm_kernels_last_error_message(void);

/*
 * Documented functions, on a stream
 *
 * These six (the four below, kvbm_kernels_has_memcpy_batch_async and kvbm_kernels_is_stub_build) keep their names,
 * argument order and values for good.
 *
 * They start work on the stream and return: no synchronisation, no allocation, no host pointer kept. A
 * "device-visible" pointer is to device memory or to pinned host memory; source and destination may each be either.
 * Tables and blocks must stay as they are until the stream has passed the call. The current device is the same
 * afterwards; the work runs on the stream's device. A CUDA error left behind by an earlier call of somebody else is
 * neither returned nor cleared.
 *
 * Between places of one device a copy uses the whole GPU. Where it crosses the link it keeps to a few multiprocessors,
 * which reach the link's speed, and leaves the rest to the model beside it. What lies behind pointers in device memory
 * the library cannot see: with tables there it takes the copy to stay on the device. Tables in pinned memory,
 * kvbm_kernels_memcpy_batch and kvbm_kernels_copy_blocks do not have that limit.
 *
 * A kernel reaches memory of another device only with access to it: where a table that the library can read names
 * such memory, access is enabled as by cudaDeviceEnablePeerAccess and stays so, and memory without a way there is an
 * invalid value. What device tables name is for the caller to make reachable.
 */

/*
 * Block stacks to universal blocks.
 *
 *   universal_ptrs_device  device-visible table [nb] of device-visible buffers of nh*nl*no*nt*hd elements; written
 *   block_ptrs_device      device-visible table [nb*nl*no] of device-visible chunks of nt*nh*hd elements; chunk
 *                          (b, l, o) is entry (b*nl + l)*no + o; read
 *   dtype_value            KVBM_KERNELS_DTYPE_*
 *   layout_value           KVBM_KERNELS_LAYOUT_* of the chunks
 *
 * Pointers need no alignment; 16 bytes is fastest.
 */
KVBM_KERNELS_API int kvbm_kernels_launch_universal_from_block(void *const *universal_ptrs_device,
                                                              const void *const *block_ptrs_device, size_t num_blocks,
                                                              size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                                              int dtype_value, int layout_value,
                                                              kvbm_kernels_stream_t stream);

/* Universal blocks to block stacks: as above with the roles exchanged, the universal buffers read and the chunks
 * written. */
KVBM_KERNELS_API int kvbm_kernels_launch_block_from_universal(const void *const *universal_ptrs_device,
                                                              void *const *block_ptrs_device, size_t num_blocks,
                                                              size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                                              int dtype_value, int layout_value,
                                                              kvbm_kernels_stream_t stream);

/*
 * Copy num_pairs pieces of copy_size_bytes bytes, src_ptrs_device[i] to dst_ptrs_device[i].
 *
 *   src_ptrs_device, dst_ptrs_device  device-visible tables [num_pairs] of device-visible pointers, any alignment
 *
 * The access width is chosen for each pair by itself. num_pairs below zero is an invalid value.
 */
KVBM_KERNELS_API int kvbm_kernels_launch_vectorized_copy(void **src_ptrs_device, void **dst_ptrs_device,
                                                         size_t copy_size_bytes, int num_pairs,
                                                         kvbm_kernels_stream_t stream);

/*
 * Copy num_copies pieces of size_per_copy bytes, src_ptrs_host[i] to dst_ptrs_host[i].
 *
 *   src_ptrs_host, dst_ptrs_host  tables in ordinary host memory [num_copies], read before the call returns. The
 *                                 pointers in them may be to device, pinned or pageable memory. None may be NULL.
 *   mode_value                    KVBM_KERNELS_MODE_*
 *
 * Pageable memory follows cudaMemcpyAsync's rules: the call may wait for the copy.
 */
KVBM_KERNELS_API int kvbm_kernels_memcpy_batch(const void *const *src_ptrs_host, void *const *dst_ptrs_host,
                                               size_t size_per_copy, size_t num_copies, int mode_value,
                                               kvbm_kernels_stream_t stream);

/*
 * Extensions, on a stream
 */

/*
 * kvbm_kernels_memcpy_batch with a size for each piece: nbytes[i] bytes from src_ptrs_host[i] to dst_ptrs_host[i].
 *
 *   nbytes        host array [num_copies]; a piece of 0 bytes is skipped, whatever its pointers
 *   failed_index  may be NULL; set to the first piece found wrong or refused by CUDA, and to num_copies if there is
 *                 none or no piece in particular is at fault
 *
 * Once CUDA has refused a piece, the others may or may not be copied.
 */
KVBM_KERNELS_API int kvbm_kernels_memcpy_batch_sized(const void *const *src_ptrs_host, void *const *dst_ptrs_host,
                                                     const size_t *nbytes, size_t num_copies, int mode_value,
                                                     kvbm_kernels_stream_t stream, size_t *failed_index);

/*
 * Which ways the calling thread's last kvbm_kernels_memcpy_batch or _sized that had work to do went: the sum of
 * KVBM_KERNELS_ROUTE_*. 0 if none has started any.
 */
KVBM_KERNELS_API int kvbm_kernels_last_batch_routes(void);

/* Kinds of memory, as kvbm_kernels_get_memory_kind() tells them. */
/* Ordinary host memory, or an address CUDA knows nothing of. */
#define KVBM_KERNELS_MEMORY_PAGEABLE 0
/* Host memory that kernels can reach: allocated pinned, or registered. */
#define KVBM_KERNELS_MEMORY_PINNED 1
/* Memory of a device. */
#define KVBM_KERNELS_MEMORY_DEVICE 2

/*
 * Which kind of memory a pointer is to: *kind is KVBM_KERNELS_MEMORY_*. *device, if device is not NULL, is the device
 * of KVBM_KERNELS_MEMORY_DEVICE and else -1. In the stub and without a driver all memory is pageable.
 * Returns 0, or 1 if pointer or kind is NULL.
 */
KVBM_KERNELS_API int kvbm_kernels_get_memory_kind(const void *pointer, int *kind, int *device);

/*
 * Views
 *
 * A view says where each row of a set of blocks starts. Every layout above, and many more (packed K|V rows, padded
 * pages, a range of heads or layers, a cache of fixed capacity), is a view with other numbers. All strides are in
 * bytes and may be negative.
 */

/* The extents that two views share in one copy. */
typedef struct kvbm_kernels_block_shape {
  size_t num_layers; /* nl */
  size_t num_outer;  /* no */
  size_t num_heads;  /* nh */
  size_t num_tokens; /* nt */
  size_t row_nbytes; /* hd times the element size */
} kvbm_kernels_block_shape;

/*
 * Row (i, l, o, t, h) of a view, where i counts the blocks of the call, starts at
 *
 *   id = block_ids ? block_ids[i] : i
 *   (char *)bases[id*base_block_step + l*base_layer_step + o*base_outer_step] + offset
 *       + id*block_stride + l*layer_stride + o*outer_stride + t*token_stride + h*head_stride
 *
 * A pointer table of separate chunks has steps nl*no, no and 1 and no block, layer or outer stride; one tensor a layer
 * has steps 0, 1 and 0 and strides for the rest; one tensor for everything has one base and only strides.
 *
 * bases and block_ids are ordinary host arrays, read before a call returns: nothing has to be uploaded or kept.
 */
typedef struct kvbm_kernels_view {
  /*
   * Host table [num_bases] of base addresses. The entries that a call uses may not be NULL. What a source's are to is
   * only read, whatever their type says.
   */
  void *const *bases;
  size_t num_bases;
  /* How far the table index moves with the block id, the layer and the outer index. */
  size_t base_block_step;
  size_t base_layer_step;
  size_t base_outer_step;
  /* Host array with an id for each block of the call, or NULL for 0, 1, 2, ... */
  const int64_t *block_ids;
  /* How many blocks the view has: ids are in [0, num_blocks). */
  size_t num_blocks;
  /* Added to every address, in bytes. */
  int64_t offset;
  int64_t block_stride;
  int64_t layer_stride;
  int64_t outer_stride;
  int64_t token_stride;
  int64_t head_stride;
} kvbm_kernels_view;

/*
 * Fill in *view for a layout, without block ids and with tight strides.
 *
 *   block_stack  bases [num_blocks*nl*no]: chunk (b, l, o) is entry (b*nl + l)*no + o; layout_value is its order
 *   operational  bases [num_blocks]: one buffer a block; layout_value is the order of its last dimension
 *   universal    bases [num_blocks]: one buffer a block
 *
 * view->bases points at the caller's table, which must live as long as the view is used. A table of const pointers
 * needs a cast; a source's rows are only read. Returns 0, or 1 if a pointer is NULL (whatever the sizes), layout_value
 * is unknown, or a stride or table index does not fit.
 */
KVBM_KERNELS_API int kvbm_kernels_block_stack_view(kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                                                   const kvbm_kernels_block_shape *shape, int layout_value);
KVBM_KERNELS_API int kvbm_kernels_operational_view(kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                                                   const kvbm_kernels_block_shape *shape, int layout_value);
KVBM_KERNELS_API int kvbm_kernels_universal_view(kvbm_kernels_view *view, void *const *bases, size_t num_blocks,
                                                 const kvbm_kernels_block_shape *shape);

/* Choices for kvbm_kernels_copy_blocks. A NULL options pointer means all defaults. */
typedef struct kvbm_kernels_copy_options {
  /* Set by the caller to sizeof(kvbm_kernels_copy_options), so that fields can be added at the end later. */
  size_t struct_nbytes;
  /*
   * The largest number of multiprocessors the copy may keep busy; 0 lets the library choose: all of them between
   * places of one device, only as many as saturate the link where it is crossed. Negative is an invalid value.
   */
  int max_sms;
} kvbm_kernels_copy_options;

/*
 * Copy num_blocks blocks of the given shape from one view to another, on a stream.
 *
 * The rows must be in device or pinned host memory. Where a side's first row is in ordinary host memory the call is an
 * invalid value, unless the device reads such memory; of the other rows of the side that is taken on trust. The views,
 * their tables and their ids are host memory and are read before the call returns: nothing of them has to be uploaded
 * or kept, and a captured graph replays with the addresses of the capture. Otherwise as the functions above.
 *
 * Beyond the checks of all functions: ids outside [0, view->num_blocks), more blocks than a view without ids has, a
 * table index at or past num_bases, a NULL base that the call would use, strides and sizes that span more than 63 bits,
 * and an options->struct_nbytes smaller than that of version 0.1 are invalid values.
 */
KVBM_KERNELS_API int kvbm_kernels_copy_blocks(const kvbm_kernels_view *dst, const kvbm_kernels_view *src,
                                              const kvbm_kernels_block_shape *shape, size_t num_blocks,
                                              const kvbm_kernels_copy_options *options, kvbm_kernels_stream_t stream);

/* Assumptions and choices for kvbm_kernels_explain_copy(). A NULL options pointer means all defaults. */
typedef struct kvbm_kernels_explain_options {
  /* Set by the caller to sizeof(kvbm_kernels_explain_options), so that fields can be added at the end later. */
  size_t struct_nbytes;
  /* As in kvbm_kernels_copy_options. */
  int max_sms;
  /* As for kvbm_kernels_host_copy_blocks(). */
  int num_threads;
  /* Where a copy on a stream is to find the rows of a side: in pinned host memory, or else on the device. */
  bool src_on_host;
  bool dst_on_host;
} kvbm_kernels_explain_options;

/* What kvbm_kernels_explain_copy() fills in. */
typedef struct kvbm_kernels_copy_explanation {
  /* Set by the caller to sizeof(kvbm_kernels_copy_explanation), so that fields can be added at the end later. */
  size_t struct_nbytes;

  /*
   * The plan, which both engines carry out: num_segments runs of segment_nbytes bytes that are contiguous on both
   * sides, total_nbytes in all. They are reached by loops of fixed strides, loop_sizes[0] the outermost, from num_items
   * pairs of addresses: 1 where strides reach everything.
   */
  size_t total_nbytes;
  size_t num_segments;
  size_t segment_nbytes;
  size_t num_items;
  size_t num_loops; /* of the arrays below, the entries in use */
  size_t loop_sizes[5];
  int64_t loop_src_strides[5]; /* in bytes */
  int64_t loop_dst_strides[5];
  /* The largest power of two, 16 at most, that divides every stride, every offset and segment_nbytes. */
  size_t alignment;

  /*
   * kvbm_kernels_host_copy_blocks(). host_rows names the code that copies a segment: "fixed" (moves of 1, 2, 4, 8 or 16
   * bytes), "memcpy", "avx2", and "stream_sse2" or "stream_avx2", whose stores go around the cache; the first segment
   * stands for all.
   */
  int host_threads;
  const char *host_rows;
  /* Segments that follow each other on both sides are found and moved as one. */
  bool host_joins_segments;
  /* Threads share single segments, which are long; else each takes whole ones. */
  bool host_cuts_segments;

  /*
   * kvbm_kernels_copy_blocks(): num_launches of a kernel, num_tiles tiles of up to tile_nbytes bytes among all of them.
   * The fields after num_tiles are those of the first launch. kernel is the name that a profiler shows, without its
   * template arguments: "move_tile" (a CTA a tile), "move" (up to a warp a tile, CTAs stride over the tiles), "gather"
   * (as move; a thread makes one vector of 16 bytes of several short rows).
   */
  size_t num_launches;
  size_t num_tiles;
  size_t tile_nbytes;
  size_t num_ctas;
  size_t cta_threads;
  size_t params_nbytes; /* of a launch's parameters, which carry the addresses */
  const char *kernel;
  /*
   * What a thread reads and writes at a time, in the item that has it narrowest. is_shifted: where source and
   * destination are equally far off alignment, the ends of each segment are moved byte by byte, and the rest so wide.
   */
  size_t read_nbytes;
  size_t write_nbytes;
  bool is_shifted;
} kvbm_kernels_copy_explanation;

/*
 * Say what kvbm_kernels_copy_blocks() and kvbm_kernels_host_copy_blocks() would do with these views, without doing it:
 * it is told by the code that decides it. The same in both builds; no driver is asked and no row is touched, so the
 * bases may be any addresses that are not NULL. What depends on the machine (host_threads, host_rows) is that of this
 * one.
 *
 * *explanation is filled in: all zero, with empty strings, where there is nothing to do. The strings are static; which
 * names there are, and what is chosen, may change with the version. The checks are those of kvbm_kernels_copy_blocks(),
 * with options->num_threads, and explanation->struct_nbytes smaller than that of version 0.1, among the first.
 */
KVBM_KERNELS_API int kvbm_kernels_explain_copy(const kvbm_kernels_view *dst, const kvbm_kernels_view *src,
                                               const kvbm_kernels_block_shape *shape, size_t num_blocks,
                                               const kvbm_kernels_explain_options *options,
                                               kvbm_kernels_copy_explanation *explanation);

/*
 * Rows of caches
 *
 * A paged cache is a view of blocks; what a model hands over at each step, and takes back, are rows of tokens. Append
 * puts the rows of tokens where a token map says they lie in the cache, gather fetches them from there, as they are or
 * quantised on the way in and dequantised on the way out.
 *
 *   cache  a view of the whole cache: num_blocks blocks of map->block_size tokens, block_ids NULL, base_block_step 0
 *   rows   a view of the rows given or wanted, as one block of shape->num_tokens tokens: num_blocks 1, block_ids NULL
 *   shape  nl, no, nh; in num_tokens the tokens of the call, of all sequences together; in row_nbytes the size of a row
 *          given or wanted, which without quantisation is also its size in the cache
 *
 * Both views' tables are host memory, nl*no pointers at most, and read before the call returns; so are the structs.
 * Tokens may share no place in the cache in an append.
 */

/* How rows are stored in a quantised cache. */
#define KVBM_KERNELS_STORED_INT8 1
#define KVBM_KERNELS_STORED_FP8 2 /* E4M3 */

/*
 * A quantised row is hd bytes, zeros up to a multiple of the scale's size, and the scale. With amax the largest
 * magnitude in the row, every operation in float32 and rounded to nearest even:
 *
 *   scale = amax / limit          limit is 127 for int8 and 448 for fp8; a float16 scale is rounded to that type before
 *                                 it is used, and 65504 at most
 *   stored = round(x / scale)     to nearest even, at most the limit in magnitude; zeros where the scale is 0
 *   x' = stored * scale           rounded to the type of the rows
 *
 * A row with a NaN or an infinity in it is stored as zeros with a NaN for a scale (0x7fc00000, 0x7e00), and so reads
 * back as NaNs. Every NaN that comes out is 0x7fc00000 as float32, 0x7e00 as float16 and 0x7fc0 as bfloat16. The bits
 * are the same from the host and from any GPU.
 */
typedef struct kvbm_kernels_quantization {
  /* Set by the caller to sizeof(kvbm_kernels_quantization), so that fields can be added at the end later. */
  size_t struct_nbytes;
  /* KVBM_KERNELS_STORED_*. */
  int stored_value;
  /* The type of the rows given or wanted: KVBM_KERNELS_DTYPE_F16, _BF16 or _F32. */
  int dtype_value;
  /* The type of the scales: KVBM_KERNELS_DTYPE_F32 or _F16. */
  int scale_dtype_value;
} kvbm_kernels_quantization;

/*
 * Where the tokens of a call lie in a cache: by slots, or by block tables and the position at which each sequence
 * starts. A token without a place is skipped, and nothing is written for it: one whose slot is negative or past the
 * last block, whose entry of the table is no block of the cache (as that of a null block is not), or whose position is
 * past the end of the table.
 *
 * The arrays are device-visible memory for functions that take a stream, naturally aligned, and are read when the
 * stream gets there: a captured graph replays with what is in them then. For the host functions they are host memory.
 */
typedef struct kvbm_kernels_token_map {
  /* Set by the caller to sizeof(kvbm_kernels_token_map), so that fields can be added at the end later. */
  size_t struct_nbytes;
  /* Tokens in a block of the cache. */
  size_t block_size;
  /* [shape->num_tokens], of each token block*block_size + its place in the block; or NULL, and the rest counts. */
  const int64_t *slots;
  /* [num_sequences, block_table_stride], the blocks of each sequence in order. */
  const uint32_t *block_tables;
  /* Entries from the table of one sequence to that of the next, and the length of each. */
  size_t block_table_stride;
  /* [num_sequences], the position of the first token of the call in each sequence: appending, its length. NULL for 0 */
  const uint32_t *starts;
  /* shape->num_tokens is a multiple of it; token i is of sequence i / (num_tokens / num_sequences). */
  size_t num_sequences;
} kvbm_kernels_token_map;

/*
 * Rows into a cache, and rows out of it, on a stream. quantization may be NULL: rows are then stored as they are given.
 * The rows of both views must be in device or pinned host memory, of any alignment; 16 bytes is fastest.
 *
 * Beyond the checks of all functions and of kvbm_kernels_copy_blocks: a struct_nbytes smaller than that of version 0.1,
 * an unknown stored_value, dtype_value or scale_dtype_value, a row_nbytes that is no multiple of the element, a block
 * size of zero, a map without slots and tables, sequences that do not divide the tokens, and views that are not as
 * above are invalid values. A cache of no blocks is nothing to do.
 */
KVBM_KERNELS_API int kvbm_kernels_launch_append(const kvbm_kernels_view *cache, const kvbm_kernels_view *rows,
                                                const kvbm_kernels_block_shape *shape,
                                                const kvbm_kernels_token_map *map,
                                                const kvbm_kernels_quantization *quantization,
                                                kvbm_kernels_stream_t stream);
KVBM_KERNELS_API int kvbm_kernels_launch_gather(const kvbm_kernels_view *rows, const kvbm_kernels_view *cache,
                                                const kvbm_kernels_block_shape *shape,
                                                const kvbm_kernels_token_map *map,
                                                const kvbm_kernels_quantization *quantization,
                                                kvbm_kernels_stream_t stream);

/*
 * values[i] to *dsts[i], n words of 32 bits, on a stream: how a host keeps small tables of the device up to date
 * without a copy that waits.
 *
 *   dsts    host table [n] of device-visible addresses, multiples of 4, none of them twice
 *   values  host array [n]
 *
 * Both are read before the call returns; a captured graph replays with the addresses and values of the capture.
 */
KVBM_KERNELS_API int kvbm_kernels_launch_store_u32(uint32_t *const *dsts, const uint32_t *values, size_t n,
                                                   kvbm_kernels_stream_t stream);

/*
 * Host functions: the same work on host memory by the calling thread and helpers
 *
 * They do real work in both builds, and have finished when they return. num_threads is the number of threads to use, 64
 * at most, the caller's among them; 0 lets the library choose from the amount of data and the processors this process
 * may run on; negative is an invalid value. A thread that cannot be started is done without. All memory is ordinary
 * host memory (pinned memory is fine) and needs no alignment.
 */

/* kvbm_kernels_copy_blocks for host memory. */
KVBM_KERNELS_API int kvbm_kernels_host_copy_blocks(const kvbm_kernels_view *dst, const kvbm_kernels_view *src,
                                                   const kvbm_kernels_block_shape *shape, size_t num_blocks,
                                                   int num_threads);

/* kvbm_kernels_launch_universal_from_block for host tables of host memory. No table entry may be NULL. */
KVBM_KERNELS_API int kvbm_kernels_host_universal_from_block(void *const *universal_ptrs, const void *const *block_ptrs,
                                                            size_t num_blocks, size_t nh, size_t nl, size_t no,
                                                            size_t nt, size_t hd, int dtype_value, int layout_value,
                                                            int num_threads);

/* kvbm_kernels_launch_block_from_universal for host tables of host memory. No table entry may be NULL. */
KVBM_KERNELS_API int kvbm_kernels_host_block_from_universal(const void *const *universal_ptrs, void *const *block_ptrs,
                                                            size_t num_blocks, size_t nh, size_t nl, size_t no,
                                                            size_t nt, size_t hd, int dtype_value, int layout_value,
                                                            int num_threads);

/*
 * Copy num_copies pieces of host memory, nbytes[i] bytes from src_ptrs[i] to dst_ptrs[i].
 *
 *   src_ptrs, dst_ptrs  host tables [num_copies]
 *   nbytes              host array [num_copies]; a piece of 0 bytes is skipped, whatever its pointers
 *   failed_index        may be NULL; set to the first piece found wrong, and to num_copies if there is none
 */
KVBM_KERNELS_API int kvbm_kernels_host_copy_batch(const void *const *src_ptrs, void *const *dst_ptrs,
                                                  const size_t *nbytes, size_t num_copies, int num_threads,
                                                  size_t *failed_index);

/* kvbm_kernels_launch_append and kvbm_kernels_launch_gather for host memory, the map's arrays too. */
KVBM_KERNELS_API int kvbm_kernels_host_append(const kvbm_kernels_view *cache, const kvbm_kernels_view *rows,
                                              const kvbm_kernels_block_shape *shape, const kvbm_kernels_token_map *map,
                                              const kvbm_kernels_quantization *quantization, int num_threads);
KVBM_KERNELS_API int kvbm_kernels_host_gather(const kvbm_kernels_view *rows, const kvbm_kernels_view *cache,
                                              const kvbm_kernels_block_shape *shape, const kvbm_kernels_token_map *map,
                                              const kvbm_kernels_quantization *quantization, int num_threads);

#ifdef __cplusplus
}
#endif

#endif /* KVBM_KERNELS_H */
