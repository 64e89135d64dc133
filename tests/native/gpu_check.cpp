// The CUDA engine from C++, small enough for compute-sanitizer: every kernel and route once, and what happens to errors
// that others left. Linked with the engine's objects, so that both share one CUDA runtime.
//
//   gpu_check          prints what failed, returns how much did
//   gpu_check freed    hands memcpy_batch a freed device pointer
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kvbm_kernels.h"

namespace {

int failures = 0;

void expect(bool right, const char *what) {
  if (right) return;
  ++failures;
  std::printf("FAILED: %s (%s; pending %s)\n", what, kvbm_kernels_last_error_message(),
              cudaGetErrorName(cudaPeekAtLastError()));
}

std::vector<uint8_t> random_bytes(size_t n) {
  static uint32_t state = 1;
  std::vector<uint8_t> bytes(n);
  for (uint8_t &byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return bytes;
}

enum Where { kDevice, kPinned };

// Bytes that a kernel can reach.
struct Memory {
  uint8_t *data;
  size_t nbytes;
  Where where;

  Memory(size_t n, Where w) : data(nullptr), nbytes(n), where(w) {
    if (w == kDevice) {
      cudaMalloc(reinterpret_cast<void **>(&data), n);
    } else {
      cudaMallocHost(reinterpret_cast<void **>(&data), n);
    }
    cudaMemset(data, 0x5A, n);
  }
  Memory(const std::vector<uint8_t> &bytes, Where w) : Memory(bytes.size(), w) {
    cudaMemcpy(data, bytes.data(), nbytes, cudaMemcpyDefault);
  }
  template <typename T>
  explicit Memory(const std::vector<T *> &pointers) : Memory(pointers.size() * sizeof(T *), kDevice) {
    cudaMemcpy(data, pointers.data(), nbytes, cudaMemcpyDefault);
  }
  ~Memory() { where == kDevice ? cudaFree(data) : cudaFreeHost(data); }
  Memory(const Memory &) = delete;

  std::vector<uint8_t> read() const {
    std::vector<uint8_t> bytes(nbytes);
    cudaMemcpy(bytes.data(), data, nbytes, cudaMemcpyDefault);
    return bytes;
  }
};

// Block (b, l, o) of kv [nb, nl, no, nt, nh, row] in the order of a layout.
void convert(size_t nb, size_t nh, size_t nl, size_t no, size_t nt, size_t hd, int layout, Where blocks_at,
             Where universal_at, size_t shift) {
  const size_t row = hd * 2, chunk = nt * nh * row, block = nl * no * chunk;
  const std::vector<uint8_t> kv = random_bytes(nb * block);
  std::vector<uint8_t> expected(nb * block + 16);
  for (size_t i = 0; i < nb * nl * no * nt * nh; ++i) {
    const size_t h = layout == 0 ? i % nh : i / nt % nh, t = layout == 0 ? i / nh % nt : i % nt;
    const size_t o = i / (nh * nt) % no, l = i / (nh * nt * no) % nl, b = i / (nh * nt * no * nl);
    const size_t at = b * block + (((h * nl + l) * no + o) * nt + t) * row;
    std::memcpy(&expected[at], &kv[i * row], row);
  }
  Memory blocks(kv.size() + 16, blocks_at), universal(kv.size() + 16, universal_at);
  cudaMemcpy(blocks.data + shift, kv.data(), kv.size(), cudaMemcpyDefault);
  std::vector<void *> block_ptrs, universal_ptrs;
  for (size_t i = 0; i < nb * nl * no; ++i) block_ptrs.push_back(blocks.data + shift + i * chunk);
  for (size_t b = 0; b < nb; ++b) universal_ptrs.push_back(universal.data + b * block);
  const Memory block_table(block_ptrs), universal_table(universal_ptrs);
  auto *block_entries = reinterpret_cast<void **>(block_table.data);
  auto *universal_entries = reinterpret_cast<void **>(universal_table.data);
  expect(kvbm_kernels_launch_universal_from_block(universal_entries, block_entries, nb, nh, nl, no, nt, hd, 0, layout,
                                                  nullptr) == 0,
         "universal_from_block returns 0");
  cudaDeviceSynchronize();
  std::vector<uint8_t> got = universal.read();
  expect(std::memcmp(got.data(), expected.data(), kv.size()) == 0, "universal_from_block");
  cudaMemset(blocks.data, 0, blocks.nbytes);
  expect(kvbm_kernels_launch_block_from_universal(universal_entries, block_entries, nb, nh, nl, no, nt, hd, 0, layout,
                                                  nullptr) == 0,
         "block_from_universal returns 0");
  cudaDeviceSynchronize();
  got = blocks.read();
  expect(std::memcmp(got.data() + shift, kv.data(), kv.size()) == 0, "block_from_universal");

  // The same through host tables.
  const kvbm_kernels_block_shape shape{nl, no, nh, nt, row};
  kvbm_kernels_view from, to;
  kvbm_kernels_block_stack_view(&from, block_ptrs.data(), nb, &shape, layout);
  kvbm_kernels_universal_view(&to, universal_ptrs.data(), nb, &shape);
  cudaMemset(universal.data, 0, universal.nbytes);
  expect(kvbm_kernels_copy_blocks(&to, &from, &shape, nb, nullptr, nullptr) == 0, "copy_blocks returns 0");
  cudaDeviceSynchronize();
  got = universal.read();
  expect(std::memcmp(got.data(), expected.data(), kv.size()) == 0, "copy_blocks");
}

void batch(size_t nbytes, size_t count, Where src_at, Where dst_at, int mode, size_t gap_every, cudaStream_t stream) {
  const Memory src(random_bytes((nbytes + 16) * count), src_at);
  Memory dst(src.nbytes, dst_at);
  std::vector<uint8_t> expected = dst.read();
  const std::vector<uint8_t> bytes = src.read();
  std::vector<const void *> from;
  std::vector<void *> to;
  size_t at = 0;
  for (size_t i = 0; i < count; ++i, at += nbytes) {
    if (gap_every && i % gap_every == 0) at += 16;
    if (at + nbytes > src.nbytes) break;
    from.push_back(src.data + at);
    to.push_back(dst.data + at);
    std::memcpy(&expected[at], &bytes[at], nbytes);
  }
  expect(kvbm_kernels_memcpy_batch(from.data(), to.data(), nbytes, from.size(), mode,
                                   reinterpret_cast<kvbm_kernels_stream_t>(stream)) == 0,
         "memcpy_batch returns 0");
  cudaDeviceSynchronize();
  expect(dst.read() == expected, "memcpy_batch");
}

// What a token map's arrays are to, and the map.
struct Map {
  Memory slots, tables, starts;

  Map(const std::vector<int64_t> &s, const std::vector<uint32_t> &t, const std::vector<uint32_t> &p, Where where)
      : slots(bytes_of(s), where), tables(bytes_of(t), where), starts(bytes_of(p), where) {}

  template <typename T>
  static std::vector<uint8_t> bytes_of(const std::vector<T> &values) {
    const auto *first = reinterpret_cast<const uint8_t *>(values.data());
    return std::vector<uint8_t>(first, first + values.size() * sizeof(T));
  }
  kvbm_kernels_token_map map(bool by_slots, size_t block_size, size_t sequences) const {
    return {sizeof(kvbm_kernels_token_map),
            block_size,
            by_slots ? reinterpret_cast<const int64_t *>(slots.data) : nullptr,
            reinterpret_cast<const uint32_t *>(tables.data),
            tables.nbytes / 4 / sequences,
            reinterpret_cast<const uint32_t *>(starts.data),
            sequences};
  }
};

// Rows of 2 layers, K and V, into a cache and out of it, beside the host functions. stored is KVBM_KERNELS_STORED_*,
// or 0 for rows as they are.
void rows(size_t nh, size_t hd, int stored, int dtype, int scale, bool by_slots, bool hnd, size_t shift) {
  constexpr size_t kLayers = 2, kOuter = 2, kSequences = 3, kEach = 7, kBlockSize = 4, kBlocks = 12;
  constexpr size_t kTokens = kSequences * kEach;
  const size_t element = dtype == KVBM_KERNELS_DTYPE_F32 ? 4 : 2,
               scale_nbytes = scale == KVBM_KERNELS_DTYPE_F32 ? 4 : 2;
  const size_t row = hd * element;
  const size_t cached = stored ? (hd + scale_nbytes - 1) / scale_nbytes * scale_nbytes + scale_nbytes : row;
  const kvbm_kernels_quantization quantization{sizeof quantization, stored, dtype, scale};
  const kvbm_kernels_block_shape shape{kLayers, kOuter, nh, kTokens, row};

  std::vector<int64_t> slots;
  std::vector<uint32_t> tables, starts;
  for (size_t i = 0; i < kTokens; ++i) slots.push_back(i % 5 == 3 ? -1 : static_cast<int64_t>(i * 29 % 48));
  for (size_t i = 0; i < kBlocks; ++i) tables.push_back(i == 4 ? 0xffffffff : static_cast<uint32_t>(i * 5 % kBlocks));
  for (size_t i = 0; i < kSequences; ++i) starts.push_back(static_cast<uint32_t>(3 * i + 1));
  // Pinned memory is host memory too.
  const Map on_host(slots, tables, starts, kPinned), on_device(slots, tables, starts, kDevice);
  const kvbm_kernels_token_map host_map = on_host.map(by_slots, kBlockSize, kSequences);
  const kvbm_kernels_token_map device_map = on_device.map(by_slots, kBlockSize, kSequences);

  const size_t block = kBlockSize * nh * cached, chunk = kTokens * nh * row;
  const std::vector<uint8_t> cache_bytes = random_bytes(kLayers * kOuter * kBlocks * block + shift);
  const std::vector<uint8_t> row_bytes = random_bytes(kLayers * kOuter * chunk + shift);
  for (bool appends : {true, false}) {
    std::vector<uint8_t> results[2];
    for (Where where : {kPinned, kDevice}) {
      const Memory cache(cache_bytes, where), given(row_bytes, where);
      std::vector<void *> bases;
      for (size_t i = 0; i < kLayers * kOuter; ++i) bases.push_back(cache.data + shift + i * kBlocks * block);
      void *base = given.data + shift;
      kvbm_kernels_view of_cache{}, of_rows{};
      of_cache.bases = bases.data();
      of_cache.num_bases = bases.size();
      of_cache.base_layer_step = kOuter;
      of_cache.base_outer_step = 1;
      of_cache.num_blocks = kBlocks;
      of_cache.block_stride = static_cast<int64_t>(block);
      of_cache.token_stride = static_cast<int64_t>(hnd ? cached : nh * cached);
      of_cache.head_stride = static_cast<int64_t>(hnd ? kBlockSize * cached : cached);
      of_rows.bases = &base;
      of_rows.num_bases = of_rows.num_blocks = 1;
      of_rows.layer_stride = static_cast<int64_t>(kOuter * chunk);
      of_rows.outer_stride = static_cast<int64_t>(chunk);
      of_rows.token_stride = static_cast<int64_t>(nh * row);
      of_rows.head_stride = static_cast<int64_t>(row);
      const kvbm_kernels_quantization *as = stored ? &quantization : nullptr;
      const kvbm_kernels_view &dst = appends ? of_cache : of_rows, &src = appends ? of_rows : of_cache;
      int status;
      if (where == kPinned) {
        status = (appends ? kvbm_kernels_host_append : kvbm_kernels_host_gather)(&dst, &src, &shape, &host_map, as, 1);
      } else {
        status = (appends ? kvbm_kernels_launch_append : kvbm_kernels_launch_gather)(&dst, &src, &shape, &device_map,
                                                                                     as, nullptr);
      }
      expect(status == 0, "append or gather returns 0");
      cudaDeviceSynchronize();
      results[where] = (appends ? cache : given).read();
    }
    expect(results[kPinned] == results[kDevice], appends ? "append" : "gather");
  }
}

void all_rows() {
  for (bool by_slots : {true, false}) {
    for (bool hnd : {true, false}) {
      for (size_t hd : {64, 576, 13, 2}) {
        for (size_t shift : {0, 2, 1}) {
          rows(4, hd, 0, KVBM_KERNELS_DTYPE_BF16, 0, by_slots, hnd, shift);
          for (int stored : {KVBM_KERNELS_STORED_INT8, KVBM_KERNELS_STORED_FP8}) {
            const int dtype = static_cast<int>((hd + shift) % 3), scale = by_slots ? 0 : 2;
            rows(3, hd, stored, dtype, scale, by_slots, hnd, shift);
          }
        }
      }
    }
  }
  Memory words(256, kDevice);
  std::vector<uint8_t> expected = words.read();
  std::vector<uint32_t *> dsts;
  std::vector<uint32_t> values;
  for (uint32_t i = 0; i < 40; ++i) {
    dsts.push_back(reinterpret_cast<uint32_t *>(words.data) + i * 7 % 41);
    values.push_back(i * 0x01010101);
    std::memcpy(&expected[i * 7 % 41 * 4], &values.back(), 4);
  }
  expect(kvbm_kernels_launch_store_u32(dsts.data(), values.data(), 40, nullptr) == 0, "store_u32 returns 0");
  cudaDeviceSynchronize();
  expect(words.read() == expected, "store_u32");
}

void errors_of_others() {
  const Memory src(random_bytes(64), kDevice);
  Memory dst(64, kDevice);
  const std::vector<const void *> from{src.data, src.data + 32};
  const std::vector<void *> to{dst.data, dst.data + 32};
  void *nothing = nullptr;
  for (int mode = 0; mode < 3; ++mode) {
    expect(cudaMalloc(&nothing, size_t{1} << 60) == cudaErrorMemoryAllocation, "a failing call of somebody else");
    const int status = kvbm_kernels_memcpy_batch(from.data(), to.data(), 32, 2, mode, nullptr);
    expect(status == (mode == 2 ? 801 : 0), "the call's own result beside a pending error");
    expect(cudaGetLastError() == cudaErrorMemoryAllocation, "a pending error stays");
    expect(kvbm_kernels_memcpy_batch(from.data(), to.data(), 32, 2, mode, nullptr) == status, "the result without one");
    expect(cudaPeekAtLastError() == cudaSuccess, "no error is left behind");
  }
  expect(kvbm_kernels_launch_vectorized_copy(const_cast<void **>(from.data()), const_cast<void **>(to.data()), 32, 2,
                                             nullptr) == 1,
         "a table in ordinary memory");
  expect(cudaPeekAtLastError() == cudaSuccess, "no error is left behind by a refusal");
  cudaDeviceSynchronize();
  expect(dst.read() == src.read(), "bytes beside errors");
}

int freed() {
  const Memory src(random_bytes(4096), kDevice);
  void *gone = nullptr;
  cudaMalloc(&gone, size_t{64} << 20);
  cudaFree(gone);
  std::vector<const void *> from(8, src.data);
  std::vector<void *> to(8, src.data + 2048);
  to[5] = gone;
  const int status = kvbm_kernels_memcpy_batch(from.data(), to.data(), 16, 8, 0, nullptr);
  std::printf("a freed pointer: status %d, then %s, %s\n", status, cudaGetErrorName(cudaDeviceSynchronize()),
              kvbm_kernels_last_error_message());
  return 0;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc > 1 && std::strcmp(argv[1], "freed") == 0) return freed();
  for (int layout = 0; layout < 2; ++layout) {
    for (size_t hd : {64, 46, 1, 2, 4, 3}) {
      convert(2, 3, 2, 2, 5, hd, layout, kDevice, kDevice, 0);
      convert(2, 8, 2, 2, 16, hd, layout, kDevice, kDevice, 0);
      convert(2, 8, 2, 1, 16, hd, layout, kDevice, kDevice, 2);
    }
    convert(3, 4, 2, 2, 16, 64, layout, kPinned, kDevice, 0);
    convert(3, 4, 2, 2, 16, 64, layout, kDevice, kPinned, 8);
  }
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  for (cudaStream_t on : {stream, cudaStream_t{nullptr}, cudaStreamPerThread}) {
    for (int mode = 0; mode < 2; ++mode) {
      batch(100, 50, kDevice, kDevice, mode, 3, on);
      batch(64, 5000, kDevice, kDevice, mode, 1, on);
      batch(64, 5000, kPinned, kDevice, mode, 4, on);
      batch(600 << 10, 3, kPinned, kDevice, mode, 1, on);
    }
  }
  if (kvbm_kernels_has_memcpy_batch_async()) batch(64, 600, kDevice, kPinned, 2, 2, stream);
  cudaStreamDestroy(stream);
  all_rows();
  errors_of_others();
  std::printf("%d failures, batch entry %d\n", failures, kvbm_kernels_has_memcpy_batch_async());
  return failures;
}
