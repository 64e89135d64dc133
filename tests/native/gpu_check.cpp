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
  errors_of_others();
  std::printf("%d failures, batch entry %d\n", failures, kvbm_kernels_has_memcpy_batch_async());
  return failures;
}
