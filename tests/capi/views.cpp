// View copies on the host engine: NHD block stack to HND operational, then two heads of it to a universal block.
#include <cstdio>
#include <cstring>
#include <vector>

#include "check.h"
#include "kvbm_kernels.h"

namespace {

constexpr size_t kBlocks = 2, kLayers = 3, kOuter = 2, kHeads = 4, kTokens = 5, kRow = 6;
constexpr size_t kChunk = kTokens * kHeads * kRow;
constexpr size_t kBlock = kLayers * kOuter * kChunk;

using Bytes = std::vector<unsigned char>;

std::vector<void *> pointers(Bytes &bytes, size_t stride) {
  std::vector<void *> result;
  for (size_t at = 0; at < bytes.size(); at += stride) result.push_back(bytes.data() + at);
  return result;
}

void show(const char *call, int status) {
  std::printf("%s: %d %s: %s\n", call, status, kvbm_kernels_status_name(status), kvbm_kernels_last_error_message());
}

}  // namespace

int main() {
  Bytes stack(kBlocks * kBlock), operational(kBlocks * kBlock);
  for (size_t i = 0; i < stack.size(); ++i) stack[i] = static_cast<unsigned char>(i * 7 + i / 256);
  std::vector<void *> chunks = pointers(stack, kChunk), buffers = pointers(operational, kBlock);

  const kvbm_kernels_block_shape shape = {kLayers, kOuter, kHeads, kTokens, kRow};
  kvbm_kernels_view src, dst;
  CHECK(kvbm_kernels_block_stack_view(&src, chunks.data(), kBlocks, &shape, KVBM_KERNELS_LAYOUT_NHD) == 0);
  CHECK(kvbm_kernels_operational_view(&dst, buffers.data(), kBlocks, &shape, KVBM_KERNELS_LAYOUT_HND) == 0);
  CHECK(kvbm_kernels_host_copy_blocks(&dst, &src, &shape, kBlocks, 2) == 0);
  for (size_t chunk = 0; chunk < kBlocks * kLayers * kOuter; ++chunk) {
    for (size_t t = 0; t < kTokens; ++t) {
      for (size_t h = 0; h < kHeads; ++h) {
        CHECK(std::memcmp(&operational[chunk * kChunk + (h * kTokens + t) * kRow],
                          &stack[chunk * kChunk + (t * kHeads + h) * kRow], kRow) == 0);
      }
    }
  }
  std::printf("NHD -> operational HND: %zu blocks equal\n", kBlocks);

  // Heads 1 and 2 of block 1, found through a block id.
  const size_t first = 1, count = 2;
  const int64_t id = 1;
  const kvbm_kernels_block_shape part = {kLayers, kOuter, count, kTokens, kRow};
  Bytes slice(part.num_heads * kLayers * kOuter * kTokens * kRow);
  std::vector<void *> slices = pointers(slice, slice.size());
  kvbm_kernels_view universal;
  CHECK(kvbm_kernels_universal_view(&universal, slices.data(), 1, &part) == 0);
  src.offset += static_cast<int64_t>(first) * src.head_stride;
  src.block_ids = &id;
  CHECK(kvbm_kernels_host_copy_blocks(&universal, &src, &part, 1, 0) == 0);
  const unsigned char *row = slice.data();
  for (size_t h = first; h < first + count; ++h) {
    for (size_t chunk = 0; chunk < kLayers * kOuter; ++chunk) {
      for (size_t t = 0; t < kTokens; ++t, row += kRow) {
        CHECK(std::memcmp(row, &stack[kBlock + chunk * kChunk + (t * kHeads + h) * kRow], kRow) == 0);
      }
    }
  }
  std::printf("heads 1 and 2 -> universal: equal\n");

  const size_t sizes[] = {stack.size(), 0};
  const void *const from[] = {stack.data(), nullptr};
  void *const to[] = {operational.data(), nullptr};
  size_t failed = 99;
  CHECK(kvbm_kernels_host_copy_batch(from, to, sizes, 2, 0, &failed) == 0);
  CHECK(failed == 2);
  CHECK(stack == operational);

  const int64_t outside = 2;
  src.block_ids = &outside;
  const int status = kvbm_kernels_copy_blocks(&universal, &src, &part, 1, nullptr, nullptr);
  show("copy_blocks", status);
  CHECK(status == KVBM_KERNELS_ERROR_INVALID_VALUE);
  show("launch_vectorized_copy", kvbm_kernels_launch_vectorized_copy(nullptr, nullptr, 0, 0, nullptr));
  return 0;
}
