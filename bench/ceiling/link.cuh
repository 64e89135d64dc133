// Across the link between the host and the device.
#pragma once

#include "kvbm_kernels.h"
#include "measure.cuh"

template <typename Copy>
void line_over_link(const char *name, const Call &engine, Copy copy) {
  std::printf("  %-62s%9.3f\n", name, compare({copy}, {engine}, 1).ratio());
}

inline void pieces_over_link(char *host) {
  constexpr size_t kCount = 2048;
  constexpr uint32_t kFew = 6;
  for (bool reads : {true, false}) {
    char *const from = reads ? host : memory, *const to = reads ? memory : host;
    const Table src(shuffled(kCount, kCount), from, kPiece), dst(shuffled(kCount, kCount), to, kPiece);
    const Call engine = engine_copy(to, from, kCount * kPiece);
    // The link wakes up.
    for (int i = 0; i < 20; ++i) engine();
    std::printf("\nPieces of 32 KiB %s the host, copy engine at %.1f GB/s\n", reads ? "from" : "to",
                kCount * kPiece / sample({engine}, 4, 1000) / 1e9);
    const auto by_few = [&](const char *name, uint32_t ctas) {
      line_over_link(name, engine, [&, ctas] {
        copy_pieces_by_few<512, 4><<<ctas, 512, 0, stream>>>(src.get(), dst.get(), 0, kCount);
      });
    };
    by_few("6 CTAs of 512 threads, 4 vectors each", kFew);
    by_few("32 of them", 32);
    line_over_link("264 CTAs of 128 threads, 2 vectors each", engine,
                   [&] { copy_pieces_by_few<128, 2><<<264, 128, 0, stream>>>(src.get(), dst.get(), 3, kCount * 8); });
    const auto bulk = copy_pieces_by_bulk<16384, 8>;
    CHECK(cudaFuncSetAttribute(bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, 8 * 16384));
    for (uint32_t ctas : {2, 6}) {
      char name[64];
      std::snprintf(name, sizeof name, "%u CTAs, bulk copies of 16 KiB", ctas);
      line_over_link(name, engine, [&] { bulk<<<ctas, 32, 8 * 16384, stream>>>(src.get(), dst.get(), 1, kCount * 2); });
    }
  }
}

// Universal blocks on the host, chunks in pools of a layer on the device: straight, or by the copy engine through two
// buffers on the device, one of which is converted on another stream while the other is on the link.
inline void conversion_over_link(char *host) {
  constexpr size_t kBlocks = 32, kPlaces = 160;
  char *const pool = memory, *const buffers = memory + kTotal;
  const auto ids = shuffled(kBlocks, kBlocks);
  std::vector<void *> chunks;
  for (size_t b = 0; b < kBlocks; ++b) {
    for (size_t place = 0; place < kPlaces; ++place) chunks.push_back(pool + (place * kBlocks + ids[b]) * kPiece);
  }
  const auto convert_blocks = [&](char *universal, size_t first, size_t n, bool to_universal, cudaStream_t on) {
    std::vector<void *> bases;
    for (size_t b = 0; b < n; ++b) bases.push_back(universal + b * kBlock);
    const kvbm_kernels_block_shape shape{80, 2, 8, 16, 256};
    kvbm_kernels_view universal_view{}, chunk_view{};
    universal_view.bases = bases.data();
    universal_view.num_bases = universal_view.num_blocks = n;
    universal_view.base_block_step = 1;
    universal_view.layer_stride = 8192;
    universal_view.outer_stride = 4096;
    universal_view.token_stride = 256;
    universal_view.head_stride = kPlaces * 4096;
    chunk_view.bases = chunks.data() + first * kPlaces;
    chunk_view.num_bases = n * kPlaces;
    chunk_view.num_blocks = n;
    chunk_view.base_block_step = kPlaces;
    chunk_view.base_layer_step = 2;
    chunk_view.base_outer_step = 1;
    chunk_view.token_stride = 2048;
    chunk_view.head_stride = 256;
    const kvbm_kernels_view &dst = to_universal ? universal_view : chunk_view;
    const kvbm_kernels_view &src = to_universal ? chunk_view : universal_view;
    CHECK(kvbm_kernels_copy_blocks(&dst, &src, &shape, n, nullptr, reinterpret_cast<kvbm_kernels_stream_t>(on)));
  };
  cudaEvent_t filled[2], emptied[2];
  for (auto *events : {filled, emptied}) {
    for (int i = 0; i < 2; ++i) CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
  }
  for (bool to_host : {false, true}) {
    std::printf("\nConversion %s the host, 32 blocks of 5 MiB\n", to_host ? "to" : "from");
    const size_t nbytes = kBlocks * kBlock;
    const Call engine = to_host ? engine_copy(host, buffers, nbytes) : engine_copy(buffers, host, nbytes);
    line_over_link("straight", engine, [&] { convert_blocks(host, 0, kBlocks, to_host, stream); });
    for (size_t n : {1, 2, 4, 8}) {
      const Call staged = [&] {
        const cudaStream_t fills = to_host ? other : stream, empties = to_host ? stream : other;
        CHECK(cudaEventRecord(filled[0], stream));
        CHECK(cudaStreamWaitEvent(other, filled[0], 0));
        for (size_t first = 0, i = 0; first < kBlocks; first += n, ++i) {
          char *const buffer = buffers + i % 2 * n * kBlock;
          if (i >= 2) CHECK(cudaStreamWaitEvent(fills, emptied[i % 2], 0));
          if (to_host) {
            convert_blocks(buffer, first, n, true, fills);
          } else {
            CHECK(cudaMemcpyAsync(buffer, host + first * kBlock, n * kBlock, cudaMemcpyDefault, fills));
          }
          CHECK(cudaEventRecord(filled[i % 2], fills));
          CHECK(cudaStreamWaitEvent(empties, filled[i % 2], 0));
          if (to_host) {
            CHECK(cudaMemcpyAsync(host + first * kBlock, buffer, n * kBlock, cudaMemcpyDefault, empties));
          } else {
            convert_blocks(buffer, first, n, false, empties);
          }
          CHECK(cudaEventRecord(emptied[i % 2], empties));
        }
        CHECK(cudaEventRecord(filled[0], other));
        CHECK(cudaStreamWaitEvent(stream, filled[0], 0));
      };
      char name[64];
      std::snprintf(name, sizeof name, "through two buffers of %zu blocks", n);
      line_over_link(name, engine, staged);
    }
  }
}
