// How fast the host engine is, beside a plain memcpy of the same bytes by the same number of threads in the same run.
//
//   host_bench [MiB of KV data, 1 to 1048576, default 128]
//
// Payload GB/s (bytes moved once), best of several rounds in which all cases take turns; every result is checked.
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvbm_kernels.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMostMebibytes = size_t{1} << 20;

// Memory as NumPy allocates large arrays: huge pages where the system has them, the data at an offset in the first.
struct Buffer {
  Buffer(size_t nbytes, size_t offset)
      : pages(static_cast<char *>(
            std::aligned_alloc(kHugePage, (nbytes + offset + kHugePage - 1) / kHugePage * kHugePage))),
        data(pages + offset) {
    madvise(pages, nbytes + offset, MADV_HUGEPAGE);
    std::memset(data, 0xa5, nbytes);
  }
  ~Buffer() { std::free(pages); }
  Buffer(const Buffer &) = delete;
  char *pages, *data;
};

void plain_memcpy(char *dst, const char *src, size_t nbytes, int threads) {
  std::vector<std::thread> helpers;
  const size_t each = nbytes / static_cast<size_t>(threads);
  for (int i = 1; i < threads; ++i) {
    helpers.emplace_back([=] { std::memcpy(dst + i * each, src + i * each, each); });
  }
  std::memcpy(dst, src, each);
  for (std::thread &helper : helpers) helper.join();
}

double seconds(Clock::time_point since) { return std::chrono::duration<double>(Clock::now() - since).count(); }

struct Layout {
  const char *name;
  int value;  // -1: universal
};
constexpr Layout kNhd{"NHD", KVBM_KERNELS_LAYOUT_NHD};
constexpr Layout kHnd{"HND", KVBM_KERNELS_LAYOUT_HND};
constexpr Layout kUniversal{"universal", -1};

struct Case {
  Layout src, dst;
  double best = 1e30;
};

struct Setup {
  kvbm_kernels_block_shape shape;
  size_t num_blocks;
  Buffer source, target, back;
  std::vector<void *> source_chunks, target_chunks, back_chunks, source_blocks, target_blocks, back_blocks;

  Setup(kvbm_kernels_block_shape s, size_t nb, size_t offset)
      : shape(s), num_blocks(nb), source(nbytes(), offset), target(nbytes(), offset), back(nbytes(), offset) {
    std::mt19937_64 random(1);
    for (size_t i = 0; i + 8 <= nbytes(); i += 8) {
      const uint64_t bits = random();
      std::memcpy(source.data + i, &bits, 8);
    }
    fill(source, &source_chunks, &source_blocks, random);
    fill(target, &target_chunks, &target_blocks, random);
    fill(back, &back_chunks, &back_blocks, random);
  }
  size_t chunk_nbytes() const { return shape.num_heads * shape.num_tokens * shape.row_nbytes; }
  size_t block_nbytes() const { return shape.num_layers * shape.num_outer * chunk_nbytes(); }
  size_t nbytes() const { return num_blocks * block_nbytes(); }

  // Chunks of a block stack lie in any order, as a pool in use has them.
  void fill(const Buffer &buffer, std::vector<void *> *chunks, std::vector<void *> *blocks, std::mt19937_64 &random) {
    for (size_t i = 0; i * chunk_nbytes() < nbytes(); ++i) chunks->push_back(buffer.data + i * chunk_nbytes());
    for (size_t i = chunks->size() - 1; i > 0; --i) std::swap((*chunks)[i], (*chunks)[random() % (i + 1)]);
    for (size_t i = 0; i < num_blocks; ++i) blocks->push_back(buffer.data + i * block_nbytes());
  }

  kvbm_kernels_view view(Layout layout, std::vector<void *> &chunks, std::vector<void *> &blocks) {
    kvbm_kernels_view v;
    if (layout.value < 0) {
      kvbm_kernels_universal_view(&v, blocks.data(), num_blocks, &shape);
    } else {
      kvbm_kernels_block_stack_view(&v, chunks.data(), num_blocks, &shape, layout.value);
    }
    return v;
  }
};

void expect(bool right, const char *what) {
  if (right) return;
  std::fprintf(stderr, "host_bench: %s is wrong\n", what);
  std::exit(1);
}

// There and back gives the source again, chunk by chunk.
void check(Setup &setup, const Case &c) {
  auto src = setup.view(c.src, setup.source_chunks, setup.source_blocks);
  auto dst = setup.view(c.dst, setup.target_chunks, setup.target_blocks);
  auto back = setup.view(c.src, setup.back_chunks, setup.back_blocks);
  std::memset(setup.target.data, 0xa5, setup.nbytes());
  std::memset(setup.back.data, 0x5a, setup.nbytes());
  kvbm_kernels_host_copy_blocks(&dst, &src, &setup.shape, setup.num_blocks, 0);
  kvbm_kernels_host_copy_blocks(&back, &dst, &setup.shape, setup.num_blocks, 0);
  const auto &from = c.src.value < 0 ? setup.source_blocks : setup.source_chunks;
  const auto &to = c.src.value < 0 ? setup.back_blocks : setup.back_chunks;
  const size_t each = setup.nbytes() / from.size();
  for (size_t i = 0; i < from.size(); ++i) expect(std::memcmp(from[i], to[i], each) == 0, "a round trip");
}

void throughput(const char *title, kvbm_kernels_block_shape shape, size_t num_blocks, int repeats, size_t offset = 0) {
  Setup setup(shape, num_blocks, offset);
  const double gigabytes = static_cast<double>(setup.nbytes()) / 1e9;
  std::printf("%s: %zu blocks, %.1f MiB\n", title, num_blocks, static_cast<double>(setup.nbytes()) / (1 << 20));
  for (int threads = 1; threads <= static_cast<int>(std::thread::hardware_concurrency()) && threads <= 8;
       threads *= 2) {
    Case cases[] = {{kNhd, kUniversal}, {kUniversal, kNhd}, {kHnd, kUniversal},
                    {kUniversal, kHnd}, {kNhd, kHnd},       {kHnd, kNhd}};
    double plain = 1e30;
    for (int round = 0; round < 9; ++round) {
      auto start = Clock::now();
      for (int i = 0; i < repeats; ++i) plain_memcpy(setup.target.data, setup.source.data, setup.nbytes(), threads);
      plain = std::min(plain, seconds(start) / repeats);
      for (Case &c : cases) {
        auto src = setup.view(c.src, setup.source_chunks, setup.source_blocks);
        auto dst = setup.view(c.dst, setup.target_chunks, setup.target_blocks);
        start = Clock::now();
        for (int i = 0; i < repeats; ++i) {
          kvbm_kernels_host_copy_blocks(&dst, &src, &setup.shape, num_blocks, threads);
        }
        c.best = std::min(c.best, seconds(start) / repeats);
      }
    }
    std::printf("  %d thread%s  plain memcpy %.2f GB/s\n", threads, threads == 1 ? " " : "s", gigabytes / plain);
    for (const Case &c : cases) {
      check(setup, c);
      std::printf("    %-9s -> %-9s  %6.2f GB/s  %.2f of memcpy\n", c.src.name, c.dst.name, gigabytes / c.best,
                  plain / c.best);
    }
  }
}

void latency() {
  Setup setup({1, 2, 8, 16, 256}, 1, 0);
  const size_t nbytes = setup.nbytes();
  constexpr int kCalls = 20000;
  const auto convert = [&] {
    return kvbm_kernels_host_universal_from_block(setup.target_blocks.data(), setup.source_chunks.data(), 1, 8, 1, 2,
                                                  16, 128, KVBM_KERNELS_DTYPE_BF16, KVBM_KERNELS_LAYOUT_NHD, 0);
  };
  double best = 1e30;
  for (int round = 0; round < 5; ++round) {
    const auto start = Clock::now();
    for (int i = 0; i < kCalls; ++i) expect(convert() == 0, "a status");
    best = std::min(best, seconds(start) / kCalls);
  }
  std::printf("one block of %zu KiB, NHD -> universal: %.2f microseconds a call\n", nbytes / 1024, best * 1e6);
}

// The whole number of a text, or 0 where it is none from 1 to most.
size_t number(const char *text, size_t most) {
  size_t value = 0;
  for (; *text >= '0' && *text <= '9' && value <= most; ++text) value = value * 10 + static_cast<size_t>(*text - '0');
  return *text == '\0' && value <= most ? value : 0;
}

}  // namespace

int main(int argc, char **argv) {
  const size_t mebibytes = argc > 1 ? number(argv[1], kMostMebibytes) : 128;
  if (argc > 2 || mebibytes == 0) {
    std::fprintf(stderr, "usage: host_bench [MiB of KV data, 1 to %zu, default 128]\n", kMostMebibytes);
    return 2;
  }
  const auto blocks = [=](size_t block_nbytes) { return std::max<size_t>(1, (mebibytes << 20) / block_nbytes); };
  std::printf("kvbm_kernels %s, host engine, %u processors\n", kvbm_kernels_version(),
              std::thread::hardware_concurrency());
  throughput("bf16, hd=128, nt=16", {32, 2, 8, 16, 256}, blocks(size_t{2} << 20), 1);
  throughput("bf16, hd=128, nt=64", {32, 2, 8, 64, 256}, blocks(size_t{8} << 20), 1);
  throughput("bf16, hd=64, nt=16", {32, 2, 8, 16, 128}, blocks(size_t{1} << 20), 1);
  throughput("one byte, hd=128, nt=16", {32, 2, 8, 16, 128}, blocks(size_t{1} << 20), 1);
  throughput("bf16, hd=128, nt=16, 16 bytes past a cache line", {32, 2, 8, 16, 256}, blocks(size_t{2} << 20), 1, 16);
  throughput("bf16, hd=128, in cache", {32, 2, 8, 16, 256}, 2, 20);
  latency();
  return 0;
}
