// What bounds the copies of the CUDA engine: kernels that do nothing but copy, beside cudaMemcpyAsync of the same
// bytes.
//
//   nvcc -std=c++17 -O3 -arch=native -Iinclude -Inative bench/ceiling/ceiling.cu -o ceiling LIBRARY && ./ceiling
//
// Only the last part uses the library. A figure is the time of one cudaMemcpyAsync of as many bytes divided by the time
// of the copy: medians of five samples in which the two take turns, each of several calls queued behind a kernel that
// holds the stream until all of them are.
#include <cstring>
#include <utility>

#include "link.cuh"

// Both sides' pieces, in order or shuffled within windows.
struct Pieces {
  size_t nbytes, count;
  Table src_in_order, src_shuffled, dst_in_order, dst_shuffled;

  Pieces(size_t piece, size_t window_nbytes)
      : nbytes(piece),
        count(kTotal / piece),
        src_in_order(shuffled(count, 1), memory, piece),
        src_shuffled(shuffled(count, window_nbytes / piece), memory, piece),
        dst_in_order(shuffled(count, 1), memory + kTotal, piece),
        dst_shuffled(shuffled(count, window_nbytes / piece), memory + kTotal, piece) {}

  // copy(src, dst), with neither, one or both sides shuffled.
  template <typename Copy>
  void line(const char *name, Copy copy) const {
    std::printf("  %-44s", name);
    unsigned *wrong;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    for (const auto &[src, dst] : {std::pair{&src_in_order, &dst_in_order},
                                   {&src_shuffled, &dst_in_order},
                                   {&src_in_order, &dst_shuffled},
                                   {&src_shuffled, &dst_shuffled}}) {
      const auto call = [&, src = src->get(), dst = dst->get()] { copy(src, dst); };
      const double ratio = compare({call}, {engine_copy(memory + kTotal, memory, kTotal)}).ratio();
      CHECK(cudaMemsetAsync(memory + kTotal, 0, kTotal, stream));
      call();
      CHECK(cudaMemsetAsync(wrong, 0, sizeof(unsigned), stream));
      compare_pieces<<<static_cast<unsigned>(count), 256, 0, stream>>>(src->get(), dst->get(), nbytes / 16, wrong);
      unsigned num_wrong;
      CHECK(cudaMemcpyAsync(&num_wrong, wrong, sizeof num_wrong, cudaMemcpyDefault, stream));
      CHECK(cudaStreamSynchronize(stream));
      std::printf(num_wrong ? "    WRONG" : "%9.3f", ratio);
    }
    std::printf("\n");
    CHECK(cudaFree(wrong));
  }

  template <int kThreads, int kVectors>
  void line_by_tiles(const char *name) const {
    constexpr size_t kTile = kThreads * kVectors * 16;
    line(name, [&](const uint64_t *src, const uint64_t *dst) {
      copy_pieces<kThreads, kVectors><<<kTotal / kTile, kThreads, 0, stream>>>(src, dst, log2_of(nbytes / kTile));
    });
  }

  template <int kNbytes, int kStages>
  void line_by_bulk(const char *name, int ctas_a_multiprocessor) const {
    const auto kernel = copy_pieces_by_bulk<kNbytes, kStages>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kNbytes * kStages));
    int multiprocessors;
    CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    line(name, [&](const uint64_t *src, const uint64_t *dst) {
      kernel<<<multiprocessors * ctas_a_multiprocessor, 32, kNbytes * kStages, stream>>>(
          src, dst, log2_of(nbytes / kNbytes), static_cast<uint32_t>(kTotal / kNbytes));
    });
  }
};

void scattered_pieces() {
  std::printf("\nPieces from and to anywhere, 640 MiB%10s%9s%9s%9s\nof 32 KiB, in order or shuffled over all:\n",
              "in order", "source", "target", "both");
  const Pieces pieces(kPiece, kTotal);
  pieces.line_by_tiles<128, 2>("128 threads, 2 vectors each");
  pieces.line_by_tiles<128, 1>("128 threads, 1 vector");
  pieces.line_by_tiles<128, 4>("128 threads, 4 vectors");
  pieces.line_by_tiles<64, 4>("64 threads, 4 vectors");
  pieces.line_by_tiles<256, 2>("256 threads, 2 vectors");
  pieces.line_by_tiles<512, 4>("512 threads, 4 vectors: a CTA a piece");
  pieces.line_by_bulk<4096, 4>("bulk copies of 4 KiB, 8 CTAs of 4 buffers", 8);
  pieces.line_by_bulk<16384, 6>("bulk copies of 16 KiB, 2 CTAs of 6 buffers", 2);
  pieces.line_by_bulk<32768, 6>("bulk copies of 32 KiB, 1 CTA of 6 buffers", 1);
  std::printf("of 32 KiB, shuffled within windows (128 threads, 2 vectors):\n");
  for (size_t window : {kMiB / 8, kMiB, 2 * kMiB, 4 * kMiB, 8 * kMiB, 16 * kMiB, 32 * kMiB, 64 * kMiB, 256 * kMiB}) {
    char name[64];
    std::snprintf(name, sizeof name, "%.3g MiB", double(window) / kMiB);
    Pieces(kPiece, window).line_by_tiles<128, 2>(name);
  }
  std::printf("of other sizes, shuffled over all:\n");
  for (size_t piece : {kMiB / 256, kMiB / 64, kMiB / 16, kMiB / 4, kMiB, 4 * kMiB}) {
    char name[64];
    std::snprintf(name, sizeof name, "%zu KiB", piece >> 10);
    Pieces(piece, kTotal).line_by_tiles<128, 2>(name);
  }
#if CUDART_VERSION >= 12080
  constexpr size_t kFew = 1024;
  const auto from = shuffled(kTotal / kPiece, kTotal), to = shuffled(kTotal / kPiece, kTotal);
  std::vector<void *> src, dst;
  for (size_t i = 0; i < kFew; ++i) {
    src.push_back(memory + from[i] * kPiece);
    dst.push_back(memory + kTotal + to[i] * kPiece);
  }
  std::vector<size_t> sizes(kFew, kPiece);
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  const Call batch = [&] {
#if CUDART_VERSION >= 13000
    CHECK(cudaMemcpyBatchAsync(const_cast<const void **>(dst.data()), const_cast<const void **>(src.data()),
                               sizes.data(), kFew, &attributes, &first, 1, stream));
#else
    CHECK(cudaMemcpyBatchAsync(dst.data(), src.data(), sizes.data(), kFew, &attributes, &first, 1, nullptr, stream));
#endif
  };
  const Times times = compare({batch}, {engine_copy(memory + kTotal, memory, kFew * kPiece)}, 1);
  std::printf("  %-71s%9.3f\n", "32 KiB, 1,024 of them by cudaMemcpyBatchAsync", times.ratio());
#endif
}

// Reading apart from writing, and memory apart from the way to it.
void one_way() {
  constexpr uint32_t kTiles = kPiece / 4096;
  const auto speed = [](size_t nbytes, const Call &call, int rounds) {
    call();
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) times.push_back(sample({call}, rounds, 500000));
    return static_cast<double>(nbytes) / median(times) / 1e9;
  };
  const auto read = [&](const Table &table, size_t nbytes, int rounds) {
    return speed(
        nbytes,
        [&] {
          read_pieces<<<static_cast<unsigned>(nbytes / 4096), 128, 0, stream>>>(table.get(), log2_of(kTiles), nullptr);
        },
        rounds);
  };
  const Pieces pieces(kPiece, kTotal);
  std::printf("\nOne way, pieces of 32 KiB [GB/s]%38s%9s\n", "in order", "shuffled");
  std::printf("  %-62s%6.0f%9.0f\n", "read 640 MiB", read(pieces.src_in_order, kTotal, 3),
              read(pieces.src_shuffled, kTotal, 3));
  const auto write = [&](const Table &table) {
    return speed(kTotal, [&] { write_pieces<<<kTotal / 4096, 128, 0, stream>>>(table.get(), log2_of(kTiles)); }, 3);
  };
  std::printf("  %-62s%6.0f%9.0f\n", "write 640 MiB", write(pieces.dst_in_order), write(pieces.dst_shuffled));
  constexpr size_t kFew = 512;
  std::vector<uint64_t> far;
  for (size_t page : shuffled(kFew, kFew)) far.push_back(page * 2 * kMiB / kPiece + page * 37 % (2 * kMiB / kPiece));
  std::printf("  %-62s%6.0f%9.0f\n", "read 16 MiB from the L2, of 8 pages of 2 MiB, and of 512",
              read(Table(shuffled(kFew, 1), memory, kPiece), kFew * kPiece, 40),
              read(Table(far, memory, kPiece), kFew * kPiece, 40));
}

// Where the chunks of 128 blocks lie, and the order in which a conversion goes through them.
void orders() {
  constexpr size_t kBlocks = 128, kPlaces = 160;
  std::printf("\nConversions of 128 blocks of 160 chunks%26s%18s\n", "block by block", "place by place");
  const auto ids = shuffled(kBlocks, kBlocks), other_ids = shuffled(kBlocks, kBlocks);
  const auto anywhere = shuffled(kBlocks * kPlaces, kBlocks * kPlaces);
  using Where = std::function<uint64_t(size_t, size_t)>;
  const Where pools = [&](size_t b, size_t place) { return (place * kBlocks + ids[b]) * kPiece; };
  const Where other_pools = [&](size_t b, size_t place) { return (place * kBlocks + other_ids[b]) * kPiece; };
  const Where scattered = [&](size_t b, size_t place) { return anywhere[b * kPlaces + place] * kPiece; };
  const Where universal = [&](size_t b, size_t place) { return b * kBlock + place * 4096; };
  struct Strides {
    int token, head;
  };
  const Strides nhd{2048, 256}, hnd{256, 4096}, of_universal{256, kPlaces * 4096};
  struct Case {
    const char *name;
    Where src, dst;
    Strides from, to;
  };
  for (const Case &c : {Case{"NHD to HND, pools of a layer, ids on both sides", pools, other_pools, nhd, hnd},
                        Case{"NHD in pools of a layer to universal", pools, universal, nhd, of_universal},
                        Case{"universal to NHD in pools of a layer", universal, pools, of_universal, nhd},
                        Case{"NHD anywhere to universal", scattered, universal, nhd, of_universal},
                        Case{"universal to NHD anywhere", universal, scattered, of_universal, nhd}}) {
    std::printf("  %-53s", c.name);
    for (bool by_place : {false, true}) {
      std::vector<uint64_t> src, dst;
      for (size_t i = 0; i < kBlocks * kPlaces; ++i) {
        const size_t b = by_place ? i % kBlocks : i / kPlaces, place = by_place ? i / kBlocks : i % kPlaces;
        src.push_back(c.src(b, place));
        dst.push_back(c.dst(b, place));
      }
      const Table from(src, memory, 1), to(dst, memory + kTotal, 1);
      const Call call = [&] {
        convert<<<kTotal / 4096, 128, 0, stream>>>(from.get(), to.get(), c.from.token, c.from.head, c.to.token,
                                                   c.to.head);
      };
      std::printf(by_place ? "%18.3f" : "%12.3f",
                  compare({call}, {engine_copy(memory + kTotal, memory, kTotal)}).ratio());
    }
    std::printf("\n");
  }
}

void short_copies() {
  std::printf("\nOne contiguous piece, calls in a row%20s%12s%12s\n", "engine [us]", "kernel", "early");
  constexpr long long kHold = 1500000;
  for (size_t mib : {5, 20, 40, 160}) {
    const size_t nbytes = mib * kMiB, sets = std::min<size_t>(40, 3 * kTotal / 2 / nbytes);
    std::vector<Call> copies, plain, early;
    for (size_t i = 0; i < sets; ++i) {
      char *const src = memory + 2 * i * nbytes, *const dst = src + nbytes;
      copies.push_back(engine_copy(dst, src, nbytes));
      plain.push_back([=] { launch(copy_flat<128, 2>, nbytes / 4096, 128, false, src, dst, false); });
      early.push_back([=] { launch(copy_flat<128, 2>, nbytes / 4096, 128, true, src, dst, true); });
    }
    const Times times = compare(plain, copies, 1, kHold);
    std::printf("  %3zu MiB%48.2f%12.3f%12.3f\n", mib, 1e6 * times.engine, times.ratio(),
                compare(early, copies, 1, kHold).ratio());
  }
  const Call empty = [] { nothing<<<1280, 128, 0, stream>>>(); };
  std::printf("  an empty kernel of 1,280 CTAs%27.2f us\n", 1e6 * sample(std::vector<Call>(40, empty), 1, kHold));
}

template <typename Word>
void by_parameters(const char *name, const std::vector<uint64_t> &from, const std::vector<uint64_t> &to,
                   const Call &copy) {
  const char *const src = memory;
  char *const dst = memory + kTotal;
  constexpr size_t kCount = Places<Word>::kCount;
  std::vector<Places<Word>> launches(from.size() / kCount + 1);
  for (size_t i = 0; i < from.size(); ++i) {
    Places<Word> &places = launches[i / kCount];
    places.src[i % kCount] = static_cast<Word>(from[i]);
    places.dst[i % kCount] = static_cast<Word>(to[i]);
  }
  const Call call = [&] {
    for (size_t i = 0; i < launches.size(); ++i) {
      const size_t count = std::min<size_t>(kCount, from.size() - i * kCount);
      launch(copy_by_parameters<Word>, count, 128, i > 0, launches[i], src, dst, i > 0);
    }
  };
  std::printf("  %-55s%3zu launches%9.3f\n", name, launches.size(), compare({call}, {copy}, 2, 4000000).ratio());
}

void parameter_tables() {
  constexpr size_t kCount = 40960, kNbytes = 4096;
  std::printf("\n40,960 pieces of 4 KiB from and to anywhere in 160 MiB\n");
  const auto from = shuffled(kCount, kCount), to = shuffled(kCount, kCount);
  const Call copy = engine_copy(memory + kTotal, memory, kCount * kNbytes);
  const Table src(from, memory, kNbytes), dst(to, memory + kTotal, kNbytes);
  const Call by_tables = [&] { copy_pieces<128, 2><<<kCount, 128, 0, stream>>>(src.get(), dst.get(), 0); };
  std::printf("  %-55s%3d launch  %9.3f\n", "tables in device memory", 1, compare({by_tables}, {copy}).ratio());
  by_parameters<uint32_t>("tables in the parameters, 32 bits an address", from, to, copy);
  by_parameters<uint16_t>("tables in the parameters, 16 bits an address", from, to, copy);
}

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  int driver;
  CHECK(cudaDriverGetVersion(&driver));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  CHECK(cudaMalloc(&memory, 3 * kTotal));
  randomize<<<1024, 256, 0, stream>>>(reinterpret_cast<uint64_t *>(memory), 3 * kTotal / 8);
  CHECK(cudaStreamSynchronize(stream));
  char *host;
  CHECK(cudaMallocHost(&host, 32 * kBlock));
  std::memset(host, 1, 32 * kBlock);
  const Times times =
      compare({engine_copy(memory + kTotal, memory, kTotal)}, {engine_copy(memory + kTotal, memory, kTotal)});
  std::printf(
      "%s, CUDA %d.%d, driver for %d.%d; cudaMemcpyAsync of 640 MiB: %.0f GB/s read and written, beside itself %.3f\n",
      device.name, CUDART_VERSION / 1000, CUDART_VERSION / 10 % 100, driver / 1000, driver / 10 % 100,
      2 * kTotal / times.engine / 1e9, times.ratio());
  scattered_pieces();
  one_way();
  orders();
  short_copies();
  parameter_tables();
  pieces_over_link(host);
  conversion_over_link(host);
  return 0;
}
