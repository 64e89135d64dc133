// The C API: checks, then a plan, then an engine.
#include "checks.h"
#include "engine.h"
#include "kvbm_kernels.h"
#include "plan.h"
#include "status.h"

#define KVBM_STRINGIFY(x) #x
#define KVBM_TO_STRING(x) KVBM_STRINGIFY(x)

namespace {

using namespace kvbm;

constexpr char kVersion[] = KVBM_TO_STRING(KVBM_KERNELS_VERSION_MAJOR) "." KVBM_TO_STRING(
    KVBM_KERNELS_VERSION_MINOR) "." KVBM_TO_STRING(KVBM_KERNELS_VERSION_PATCH);

void *const *table(const void *const *ptrs) { return const_cast<void *const *>(ptrs); }

// The documented conversions: a universal side and a block-stack side over pointer tables.
struct Conversion {
  kvbm_kernels_block_shape shape;
  kvbm_kernels_view universal;
  kvbm_kernels_view blocks;

  Checked check(const char *fn, const char *universal_name, void *const *universal_ptrs, const char *block_name,
                void *const *block_ptrs, size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                int dtype_value, int layout_value) {
    if (int status = check_dtype(fn, dtype_value)) return failed(status);
    if (int status = check_layout(fn, layout_value)) return failed(status);
    shape = {nl, no, nh, nt, hd};
    if (num_blocks == 0 || is_empty(shape)) return kNothingToDo;
    if (__builtin_mul_overflow(hd, dtype_nbytes(dtype_value), &shape.row_nbytes)) {
      return failed(
          fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn, "hd is %zu, a row of which is more than size_t holds", hd));
    }
    if (int status = check_total(fn, shape, num_blocks)) return failed(status);
    if (int status = check_not_null(fn, universal_name, universal_ptrs)) return failed(status);
    if (int status = check_not_null(fn, block_name, block_ptrs)) return failed(status);
    if (int status = universal_view(fn, &universal, universal_ptrs, num_blocks, &shape)) return failed(status);
    if (int status = block_stack_view(fn, &blocks, block_ptrs, num_blocks, &shape, layout_value)) {
      return failed(status);
    }
    return kReady;
  }
};

Checked check_copy(const char *fn, const kvbm_kernels_view *dst, const kvbm_kernels_view *src,
                   const kvbm_kernels_block_shape *shape, size_t num_blocks) {
  if (num_blocks == 0) return kNothingToDo;
  if (int status = check_not_null(fn, "shape", shape)) return failed(status);
  if (is_empty(*shape)) return kNothingToDo;
  if (int status = check_total(fn, *shape, num_blocks)) return failed(status);
  if (int status = check_view(fn, "dst", dst, *shape, num_blocks)) return failed(status);
  if (int status = check_view(fn, "src", src, *shape, num_blocks)) return failed(status);
  return kReady;
}

thread_local int last_batch_routes = 0;

int batch_on_stream(const char *fn, const Pieces &pieces, int mode_value, kvbm_kernels_stream_t stream,
                    size_t *failed_index) {
  device::BatchReport report{pieces.count, 0};
  const int status = device::memcpy_batch(fn, pieces, mode_value, stream, &report);
  last_batch_routes = report.routes;
  if (failed_index) *failed_index = report.failed;
  return status;
}

int check_mode(const char *fn, int mode_value) {
  if (mode_value >= KVBM_KERNELS_MODE_AUTO && mode_value <= KVBM_KERNELS_MODE_BATCH) return 0;
  return fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn, "mode_value is %d, expected 0 (auto), 1 (async) or 2 (batch)",
              mode_value);
}

// Pieces with a size each: the sizes first, then the tables, then the entries of pieces that are not empty.
Checked check_sized(const char *fn, const char *src_name, const void *const *src_ptrs, const char *dst_name,
                    void *const *dst_ptrs, const size_t *nbytes, size_t num_copies, size_t *failed_index) {
  if (num_copies == 0) return kNothingToDo;
  if (int status = check_not_null(fn, "nbytes", nbytes)) return failed(status);
  size_t total = 0;
  for (size_t i = 0; i < num_copies; ++i) {
    if (__builtin_add_overflow(total, nbytes[i], &total)) {
      if (failed_index) *failed_index = i;
      return failed(
          fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn, "nbytes[0] to nbytes[%zu] add up to more than size_t holds", i));
    }
  }
  if (total == 0) return kNothingToDo;
  if (int status = check_not_null(fn, src_name, src_ptrs)) return failed(status);
  if (int status = check_not_null(fn, dst_name, dst_ptrs)) return failed(status);
  for (size_t i = 0; i < num_copies; ++i) {
    if (nbytes[i] == 0 || (src_ptrs[i] && dst_ptrs[i])) continue;
    if (failed_index) *failed_index = i;
    return failed(fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn, "%s[%zu] is NULL", src_ptrs[i] ? dst_name : src_name, i));
  }
  return kReady;
}

int copy_on_host(const kvbm_kernels_view &dst, const kvbm_kernels_view &src, const kvbm_kernels_block_shape &shape,
                 size_t num_blocks, int num_threads) {
  host::copy(make_plan(dst, src, shape, num_blocks), num_threads);
  return 0;
}

void describe(const Plan &plan, kvbm_kernels_copy_explanation *out) {
  static_assert(sizeof out->loop_sizes == kMaxDims * sizeof(size_t), "a loop for each dimension");
  out->total_nbytes = plan.total_nbytes();
  out->num_segments = plan.num_items() * plan.segments_per_item();
  out->segment_nbytes = plan.segment_nbytes;
  out->num_items = plan.num_items();
  out->num_loops = static_cast<size_t>(plan.num_dims);
  for (int i = 0; i < plan.num_dims; ++i) {
    out->loop_sizes[i] = plan.dims[i].size;
    out->loop_src_strides[i] = plan.dims[i].src_stride;
    out->loop_dst_strides[i] = plan.dims[i].dst_stride;
  }
  out->alignment = plan.alignment;
}

}  // namespace

const char *kvbm_kernels_version(void) { return kVersion; }

bool kvbm_kernels_is_stub_build(void) { return device::is_stub_build(); }

bool kvbm_kernels_has_memcpy_batch_async(void) { return device::has_memcpy_batch_async(); }

int kvbm_kernels_get_build_info(kvbm_kernels_build_info *info) {
  const char *fn = "get_build_info";
  if (int status = check_not_null(fn, "info", info)) return status;
  if (int status = check_struct_nbytes(fn, "info", info->struct_nbytes, sizeof *info)) return status;
  *info = {info->struct_nbytes,      kVersion,
           device::archs(),          device::runtime_version(),
           device::driver_version(), device::num_devices(),
           device::is_stub_build()};
  return 0;
}

int kvbm_kernels_launch_universal_from_block(void *const *universal_ptrs_device, const void *const *block_ptrs_device,
                                             size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                             int dtype_value, int layout_value, kvbm_kernels_stream_t stream) {
  const char *fn = "universal_from_block";
  Conversion call;
  const Checked checked =
      call.check(fn, "universal_ptrs_device", universal_ptrs_device, "block_ptrs_device", table(block_ptrs_device),
                 num_blocks, nh, nl, no, nt, hd, dtype_value, layout_value);
  if (!checked.work) return checked.status;
  return device::copy(fn, make_plan(call.universal, call.blocks, call.shape, num_blocks),
                      device::Tables::kDeviceVisible, 0, stream);
}

int kvbm_kernels_launch_block_from_universal(const void *const *universal_ptrs_device, void *const *block_ptrs_device,
                                             size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                             int dtype_value, int layout_value, kvbm_kernels_stream_t stream) {
  const char *fn = "block_from_universal";
  Conversion call;
  const Checked checked = call.check(fn, "universal_ptrs_device", table(universal_ptrs_device), "block_ptrs_device",
                                     block_ptrs_device, num_blocks, nh, nl, no, nt, hd, dtype_value, layout_value);
  if (!checked.work) return checked.status;
  return device::copy(fn, make_plan(call.blocks, call.universal, call.shape, num_blocks),
                      device::Tables::kDeviceVisible, 0, stream);
}

int kvbm_kernels_launch_vectorized_copy(void **src_ptrs_device, void **dst_ptrs_device, size_t copy_size_bytes,
                                        int num_pairs, kvbm_kernels_stream_t stream) {
  const char *fn = "vectorized_copy";
  if (int status = check_not_negative(fn, "num_pairs", num_pairs)) return status;
  const size_t count = static_cast<size_t>(num_pairs);
  // A pair is a block of one row.
  const kvbm_kernels_block_shape shape{1, 1, 1, 1, copy_size_bytes};
  if (count == 0 || is_empty(shape)) return 0;
  if (int status = check_pieces(fn, "copy_size_bytes", copy_size_bytes, "num_pairs", count)) return status;
  if (int status = check_not_null(fn, "src_ptrs_device", src_ptrs_device)) return status;
  if (int status = check_not_null(fn, "dst_ptrs_device", dst_ptrs_device)) return status;
  kvbm_kernels_view src, dst;
  if (int status = universal_view(fn, &src, src_ptrs_device, count, &shape)) return status;
  if (int status = universal_view(fn, &dst, dst_ptrs_device, count, &shape)) return status;
  return device::copy(fn, make_plan(dst, src, shape, count), device::Tables::kDeviceVisible, 0, stream);
}

int kvbm_kernels_memcpy_batch(const void *const *src_ptrs_host, void *const *dst_ptrs_host, size_t size_per_copy,
                              size_t num_copies, int mode_value, kvbm_kernels_stream_t stream) {
  const char *fn = "memcpy_batch";
  if (int status = check_mode(fn, mode_value)) return status;
  if (size_per_copy == 0 || num_copies == 0) return 0;
  if (int status = check_pieces(fn, "size_per_copy", size_per_copy, "num_copies", num_copies)) return status;
  if (int status = check_not_null(fn, "src_ptrs_host", src_ptrs_host)) return status;
  if (int status = check_not_null(fn, "dst_ptrs_host", dst_ptrs_host)) return status;
  if (int status = check_entries(fn, "src_ptrs_host", src_ptrs_host, num_copies)) return status;
  if (int status = check_entries(fn, "dst_ptrs_host", dst_ptrs_host, num_copies)) return status;
  return batch_on_stream(fn, {src_ptrs_host, dst_ptrs_host, nullptr, size_per_copy, num_copies}, mode_value, stream,
                         nullptr);
}

int kvbm_kernels_memcpy_batch_sized(const void *const *src_ptrs_host, void *const *dst_ptrs_host, const size_t *nbytes,
                                    size_t num_copies, int mode_value, kvbm_kernels_stream_t stream,
                                    size_t *failed_index) {
  const char *fn = "memcpy_batch_sized";
  if (failed_index) *failed_index = num_copies;
  if (int status = check_mode(fn, mode_value)) return status;
  const Checked checked =
      check_sized(fn, "src_ptrs_host", src_ptrs_host, "dst_ptrs_host", dst_ptrs_host, nbytes, num_copies, failed_index);
  if (!checked.work) return checked.status;
  return batch_on_stream(fn, {src_ptrs_host, dst_ptrs_host, nbytes, 0, num_copies}, mode_value, stream, failed_index);
}

int kvbm_kernels_last_batch_routes(void) { return last_batch_routes; }

int kvbm_kernels_get_memory_kind(const void *pointer, int *kind, int *device) {
  const char *fn = "get_memory_kind";
  if (int status = check_not_null(fn, "pointer", pointer)) return status;
  if (int status = check_not_null(fn, "kind", kind)) return status;
  int found = -1;
  *kind = device::memory_kind(pointer, &found);
  if (device) *device = *kind == KVBM_KERNELS_MEMORY_DEVICE ? found : -1;
  return 0;
}

int kvbm_kernels_copy_blocks(const kvbm_kernels_view *dst, const kvbm_kernels_view *src,
                             const kvbm_kernels_block_shape *shape, size_t num_blocks,
                             const kvbm_kernels_copy_options *options, kvbm_kernels_stream_t stream) {
  const char *fn = "copy_blocks";
  kvbm_kernels_copy_options chosen{sizeof chosen, 0};
  if (options) {
    if (int status = check_struct_nbytes(fn, "options", options->struct_nbytes, sizeof chosen)) return status;
    chosen = *options;
    if (int status = check_not_negative(fn, "options->max_sms", chosen.max_sms)) return status;
  }
  const Checked checked = check_copy(fn, dst, src, shape, num_blocks);
  if (!checked.work) return checked.status;
  return device::copy(fn, make_plan(*dst, *src, *shape, num_blocks), device::Tables::kHost, chosen.max_sms, stream);
}

int kvbm_kernels_explain_copy(const kvbm_kernels_view *dst, const kvbm_kernels_view *src,
                              const kvbm_kernels_block_shape *shape, size_t num_blocks,
                              const kvbm_kernels_explain_options *options, kvbm_kernels_copy_explanation *explanation) {
  const char *fn = "explain_copy";
  if (int status = check_not_null(fn, "explanation", explanation)) return status;
  const size_t struct_nbytes = explanation->struct_nbytes;
  if (int status = check_struct_nbytes(fn, "explanation", struct_nbytes, sizeof *explanation)) return status;
  kvbm_kernels_explain_options chosen{sizeof chosen, 0, 0, false, false};
  if (options) {
    if (int status = check_struct_nbytes(fn, "options", options->struct_nbytes, sizeof chosen)) return status;
    chosen = *options;
    if (int status = check_not_negative(fn, "options->max_sms", chosen.max_sms)) return status;
    if (int status = check_not_negative(fn, "options->num_threads", chosen.num_threads)) return status;
  }
  kvbm_kernels_copy_explanation found{};
  found.struct_nbytes = struct_nbytes;
  found.host_rows = found.kernel = "";
  const Checked checked = check_copy(fn, dst, src, shape, num_blocks);
  if (checked.status) return checked.status;
  if (checked.work) {
    const Plan plan = make_plan(*dst, *src, *shape, num_blocks);
    describe(plan, &found);
    host::explain(plan, chosen.num_threads, &found);
    const device::Assumed assumed{chosen.src_on_host, chosen.dst_on_host, chosen.max_sms};
    if (int status = device::explain(fn, plan, assumed, &found)) return status;
  }
  *explanation = found;
  return 0;
}

int kvbm_kernels_host_copy_blocks(const kvbm_kernels_view *dst, const kvbm_kernels_view *src,
                                  const kvbm_kernels_block_shape *shape, size_t num_blocks, int num_threads) {
  const char *fn = "host_copy_blocks";
  if (int status = check_not_negative(fn, "num_threads", num_threads)) return status;
  const Checked checked = check_copy(fn, dst, src, shape, num_blocks);
  if (!checked.work) return checked.status;
  return copy_on_host(*dst, *src, *shape, num_blocks, num_threads);
}

int kvbm_kernels_host_universal_from_block(void *const *universal_ptrs, const void *const *block_ptrs,
                                           size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                           int dtype_value, int layout_value, int num_threads) {
  const char *fn = "host_universal_from_block";
  if (int status = check_not_negative(fn, "num_threads", num_threads)) return status;
  Conversion call;
  const Checked checked = call.check(fn, "universal_ptrs", universal_ptrs, "block_ptrs", table(block_ptrs), num_blocks,
                                     nh, nl, no, nt, hd, dtype_value, layout_value);
  if (!checked.work) return checked.status;
  if (int status = check_entries(fn, "universal_ptrs", universal_ptrs, call.universal.num_bases)) return status;
  if (int status = check_entries(fn, "block_ptrs", block_ptrs, call.blocks.num_bases)) return status;
  return copy_on_host(call.universal, call.blocks, call.shape, num_blocks, num_threads);
}

int kvbm_kernels_host_block_from_universal(const void *const *universal_ptrs, void *const *block_ptrs,
                                           size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                           int dtype_value, int layout_value, int num_threads) {
  const char *fn = "host_block_from_universal";
  if (int status = check_not_negative(fn, "num_threads", num_threads)) return status;
  Conversion call;
  const Checked checked = call.check(fn, "universal_ptrs", table(universal_ptrs), "block_ptrs", block_ptrs, num_blocks,
                                     nh, nl, no, nt, hd, dtype_value, layout_value);
  if (!checked.work) return checked.status;
  if (int status = check_entries(fn, "universal_ptrs", universal_ptrs, call.universal.num_bases)) return status;
  if (int status = check_entries(fn, "block_ptrs", block_ptrs, call.blocks.num_bases)) return status;
  return copy_on_host(call.blocks, call.universal, call.shape, num_blocks, num_threads);
}

int kvbm_kernels_host_copy_batch(const void *const *src_ptrs, void *const *dst_ptrs, const size_t *nbytes,
                                 size_t num_copies, int num_threads, size_t *failed_index) {
  const char *fn = "host_copy_batch";
  if (failed_index) *failed_index = num_copies;
  if (int status = check_not_negative(fn, "num_threads", num_threads)) return status;
  const Checked checked = check_sized(fn, "src_ptrs", src_ptrs, "dst_ptrs", dst_ptrs, nbytes, num_copies, failed_index);
  if (!checked.work) return checked.status;
  host::copy_batch({src_ptrs, dst_ptrs, nbytes, 0, num_copies}, num_threads);
  return 0;
}
