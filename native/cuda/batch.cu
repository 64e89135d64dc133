// Batch copies: each piece by the copy engine or by a kernel, whichever is faster for its length and its places.
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "engine.h"
#include "launcher.h"
#include "memory_map.h"
#include "status.h"
#include "tables.h"

namespace kvbm::device {
namespace {

// From which length on a piece that crosses the link goes to the copy engine. That reaches a little more of the link
// than a kernel (55 GB/s to 52) and leaves every multiprocessor to the model, but pauses between pieces: for half a
// microsecond and less inside a batch, for three where each is a call of its own.
constexpr size_t kLongInBatch = size_t{512} << 10;
constexpr size_t kLongAlone = size_t{2} << 20;
// Inside the device a kernel is as fast, and starts sooner.
constexpr size_t kLongOnDevice = size_t{64} << 20;

constexpr size_t kMostPieces = LargeParams::kWords / 2 - 2;  // of a launch: two words each at the least
constexpr size_t kMostCopies = 256;

std::atomic<bool> batches_refused{false};

// Whether this process has memory there. Asking the kernel costs little beside a copy of ordinary memory; where it
// does not answer, the copy will.
bool can_read(const void *address) {
  char byte;
  const iovec to{&byte, 1}, from{const_cast<void *>(address), 1};
  return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == 1 || errno != EFAULT;
}

class Batch {
 public:
  Batch(const char *fn, const Driver &driver, const StreamContext &context, const Pieces &pieces, BatchReport *report,
        kvbm_kernels_stream_t stream)
      : fn_(fn),
        driver_(driver),
        device_(context.device()),
        pieces_(pieces),
        report_(report),
        stream_(stream),
        launcher_(driver, context, stream),
        sources_(driver),
        destinations_(driver) {}

  int by_async() {
    if (int status = check_all()) return status;
    for (size_t i = 0; i < pieces_.count; ++i) {
      if (pieces_.size(i) == 0) continue;
      if (int status = copy_async({i, address(pieces_.src[i]), address(pieces_.dst[i]), pieces_.size(i)})) {
        return status;
      }
    }
    return 0;
  }

  int by_batches() {
    if (!batches_work()) {
      return fail(KVBM_KERNELS_ERROR_NOT_SUPPORTED, fn_,
                  "cudaMemcpyBatchAsync is not there, or not on this stream (the NULL stream, or one being captured)");
    }
    if (int status = check_all()) return status;
    for (size_t i = 0; i < pieces_.count; ++i) {
      if (pieces_.size(i) == 0) continue;
      copies_.add({i, address(pieces_.src[i]), address(pieces_.dst[i]), pieces_.size(i)});
      if (copies_.count < kMostCopies) continue;
      if (int status = submit_only_batch()) return status;
    }
    return copies_.count == 0 ? 0 : submit_only_batch();
  }

  int by_best() {
    if (int status = check_all()) return status;
    alone_ = pieces_.count == 1;
    long_ = batches_work() ? kLongInBatch : kLongAlone;
    Run run{};
    for (size_t i = 0; i < pieces_.count; ++i) {
      const size_t nbytes = pieces_.size(i);
      if (nbytes == 0) continue;
      const uintptr_t src = address(pieces_.src[i]), dst = address(pieces_.dst[i]);
      // A copy may not leave its allocation, even into one that begins where it ends.
      if (run.nbytes && src == run.src + run.nbytes && dst == run.dst + run.nbytes && from_->holds(src, nbytes) &&
          to_->holds(dst, nbytes)) {
        run.nbytes += nbytes;
        continue;
      }
      if (run.nbytes) {
        if (int status = put(run)) return status;
      }
      run = {i, src, dst, nbytes};
      if (!from_->holds(src, nbytes) || !to_->holds(dst, nbytes)) choose_places(src, dst, nbytes);
    }
    if (run.nbytes) {
      if (int status = put(run)) return status;
    }
    if (int status = launch_pieces(false)) return status;
    return submit_copies();
  }

 private:
  // Pieces that follow each other on both sides, the first of them pieces_[first].
  struct Run {
    size_t first;
    uintptr_t src, dst;
    size_t nbytes;
  };

  // Copies that wait to be handed to the copy engine.
  struct Copies {
    CUdeviceptr src[kMostCopies], dst[kMostCopies];
    size_t nbytes[kMostCopies];
    size_t first[kMostCopies];
    size_t count = 0;

    void add(const Run &run) {
      first[count] = run.first;
      src[count] = run.src;
      dst[count] = run.dst;
      nbytes[count++] = run.nbytes;
    }
    Run at(size_t i) const { return {first[i], src[i], dst[i], nbytes[i]}; }
  };

  static uintptr_t address(const void *p) { return reinterpret_cast<uintptr_t>(p); }

  bool batches_work() const {
    if (!has_memcpy_batch_async() || is_legacy_stream(stream_)) return false;
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    return driver_.stream_is_capturing(stream_, &capture) == CUDA_SUCCESS && capture == CU_STREAM_CAPTURE_STATUS_NONE;
  }

  bool kernels_reach(const Memory &memory) const {
    return memory.kind == Memory::kHost || (memory.kind == Memory::kDevice && memory.device == device_);
  }

  // The places of the pieces from here on, until one lies elsewhere.
  void choose_places(uintptr_t src, uintptr_t dst, size_t nbytes) {
    from_ = &sources_.find(src, nbytes);
    to_ = &destinations_.find(dst, nbytes);
    src_on_host_now_ = from_->kind == Memory::kHost;
    dst_on_host_now_ = to_->kind == Memory::kHost;
    by_kernel_ =
        !alone_ && kernels_reach(*from_) && kernels_reach(*to_) && from_->holds(src, nbytes) && to_->holds(dst, nbytes);
    longest_by_kernel_ = src_on_host_now_ || dst_on_host_now_ ? long_ : kLongOnDevice;
  }

  int put(const Run &run) {
    if (!by_kernel_) return copy_async(run);
    if (run.nbytes >= longest_by_kernel_) {
      copies_.add(run);
      return copies_.count == kMostCopies ? submit_copies() : 0;
    }
    if (num_pieces_ == kMostPieces) {
      if (int status = launch_pieces(true)) return status;
    }
    src_on_host_ |= src_on_host_now_;
    dst_on_host_ |= dst_on_host_now_;
    piece_src_[num_pieces_] = run.src;
    piece_dst_[num_pieces_] = run.dst;
    piece_nbytes_[num_pieces_++] = static_cast<uint32_t>(run.nbytes);
    return 0;
  }

  // Freed memory of a device is memory that CUDA knows nothing of, and would be read as ordinary memory.
  int check_piece(size_t i, const Memory &from, const Memory &to) {
    const bool src_there = from.kind != Memory::kPageable || can_read(pieces_.src[i]);
    if (src_there && (to.kind != Memory::kPageable || can_read(pieces_.dst[i]))) return 0;
    report_->failed = i;
    return fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn_,
                "%s of piece %zu is %p, which is neither memory of CUDA nor of this process",
                src_there ? "the destination" : "the source", i, src_there ? pieces_.dst[i] : pieces_.src[i]);
  }

  int check_all() {
    for (size_t i = 0; i < pieces_.count; ++i) {
      const size_t nbytes = pieces_.size(i);
      if (nbytes == 0) continue;
      const Memory &from = sources_.find(address(pieces_.src[i]), nbytes);
      const Memory &to = destinations_.find(address(pieces_.dst[i]), nbytes);
      if (int status = check_piece(i, from, to)) return status;
    }
    return 0;
  }

  int copy_async(const Run &run) {
    launcher_.interrupt();
    report_->routes |= KVBM_KERNELS_ROUTE_ASYNC;
    const int status = driver_.memcpy_async(run.dst, run.src, run.nbytes, stream_);
    if (status == 0) return 0;
    report_->failed = run.first;
    return fail(status, fn_, "CUDA refused piece %zu, %zu bytes from %p to %p", run.first, run.nbytes,
                reinterpret_cast<void *>(run.src), reinterpret_cast<void *>(run.dst));
  }

  int submit_copies() {
    if (copies_.count > 1 && batches_work()) {
      const size_t none = report_->failed;
      if (submit_batch() == 0) {
        copies_.count = 0;
        return 0;
      }
      // Whatever is wrong with a batch, its copies one by one either work or tell.
      report_->failed = none;
    }
    for (size_t i = 0; i < copies_.count; ++i) {
      if (int status = copy_async(copies_.at(i))) return status;
    }
    copies_.count = 0;
    return 0;
  }

  int submit_only_batch() {
    const int status = submit_batch();
    if (status)
      return fail(status, fn_, "cudaMemcpyBatchAsync refused a batch that starts at piece %zu", copies_.first[0]);
    copies_.count = 0;
    return 0;
  }

  int submit_batch() {
    launcher_.interrupt();
    int status = KVBM_KERNELS_ERROR_NOT_SUPPORTED;
#if CUDART_VERSION >= 12080
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    size_t first = 0, failed = SIZE_MAX;
    status = driver_.memcpy_batch_async(copies_.dst, copies_.src, copies_.nbytes, copies_.count, &attributes, &first, 1,
                                        &failed, stream_);
    if (status && failed < copies_.count) report_->failed = copies_.first[failed];
#endif
    if (status == 0) report_->routes |= KVBM_KERNELS_ROUTE_BATCH;
    if (status == cudaErrorCallRequiresNewerDriver || status == cudaErrorInvalidDeviceFunction ||
        status == cudaErrorNotSupported) {
      batches_refused.store(true, std::memory_order_relaxed);
      return KVBM_KERNELS_ERROR_NOT_SUPPORTED;
    }
    return status;
  }

  int launch_pieces(bool more_follow) {
    const Budget budget = choose_budget(src_on_host_, dst_on_host_, 0);
    bool same_size = true;
    for (size_t i = 1; i < num_pieces_; ++i) same_size &= piece_nbytes_[i] == piece_nbytes_[0];
    for (size_t first = 0; first < num_pieces_;) {
      size_t n = num_pieces_ - first;
      const Packing src(piece_src_ + first, n), dst(piece_dst_ + first, n);
      const size_t room = (LargeParams::kWords - 4) / (src.words_each() + dst.words_each() + (same_size ? 0 : 2));
      if (n > room) n = room;
      Words words(params_);
      params_.head = Head{};
      src.write(piece_src_ + first, n, words, &params_.head.src);
      dst.write(piece_dst_ + first, n, words, &params_.head.dst);
      if (same_size) {
        describe_equal(n, piece_nbytes_[first], budget);
      } else {
        describe_ragged(n, piece_nbytes_ + first, budget, words);
      }
      first += n;
      const int status = launcher_.launch(params_, words.used(), false, budget, more_follow || first < num_pieces_);
      if (status) return fail(status, fn_, "CUDA refused the launch of the copy");
      report_->routes |= KVBM_KERNELS_ROUTE_KERNEL;
    }
    num_pieces_ = 0;
    src_on_host_ = dst_on_host_ = false;
    return 0;
  }

  void describe_equal(size_t n, uint32_t nbytes, Budget budget) {
    Head &head = params_.head;
    head.item_nbytes = head.segment_nbytes = nbytes;
    head.alignment = (nbytes | kVectorNbytes) & (0 - (nbytes | kVectorNbytes));
    head.congruence = kVectorNbytes;
    head.tile_log2 = choose_tile_log2(nbytes, budget.max_ctas == 0);
    head.num_tiles = static_cast<uint32_t>(n * divide_in_tiles(head, nbytes));
  }

  void describe_ragged(size_t n, const uint32_t *nbytes, Budget budget, Words &words) {
    Head &head = params_.head;
    head.alignment = 1;
    head.congruence = kVectorNbytes;
    uint64_t total = 0;
    for (size_t i = 0; i < n; ++i) total += nbytes[i];
    head.tile_log2 = choose_tile_log2(total / n, budget.max_ctas == 0) == kCtaTileLog2 ? kCtaTileLog2 : kWarpTileLog2;
    head.num_pieces = static_cast<uint32_t>(n);
    uint32_t *first_tiles = words.take(2 * n, &head.ragged_words);
    for (size_t i = 0; i < n; ++i) {
      first_tiles[i] = head.num_tiles;
      first_tiles[n + i] = nbytes[i];
      head.num_tiles += ((nbytes[i] - 1) / kVectorNbytes >> head.tile_log2) + 1;
    }
  }

  const char *fn_;
  const Driver &driver_;
  CUdevice device_;
  const Pieces &pieces_;
  BatchReport *report_;
  kvbm_kernels_stream_t stream_;
  Launcher launcher_;
  MemoryMap sources_, destinations_;
  const Memory nowhere_{};
  const Memory *from_ = &nowhere_, *to_ = &nowhere_;
  bool src_on_host_now_ = false, dst_on_host_now_ = false, by_kernel_ = false;
  size_t longest_by_kernel_ = 0;
  bool alone_ = false;
  size_t long_ = 0;
  Copies copies_;
  bool src_on_host_ = false, dst_on_host_ = false;
  size_t num_pieces_ = 0;
  uint64_t piece_src_[kMostPieces], piece_dst_[kMostPieces];
  uint32_t piece_nbytes_[kMostPieces];
  LargeParams params_;
};

// By itself, so that only a batch that is carried out takes the room that it needs on the stack.
[[gnu::noinline]] int run(const char *fn, const Driver &driver, const StreamContext &context, const Pieces &pieces,
                          int mode, kvbm_kernels_stream_t stream, BatchReport *report) {
  Batch batch(fn, driver, context, pieces, report, stream);
  switch (mode) {
    case KVBM_KERNELS_MODE_ASYNC:
      return batch.by_async();
    case KVBM_KERNELS_MODE_BATCH:
      return batch.by_batches();
    default:
      return batch.by_best();
  }
}

}  // namespace

bool has_memcpy_batch_async() {
  const Driver &d = driver();
  return d.status == 0 && d.memcpy_batch_async != nullptr && !batches_refused.load(std::memory_order_relaxed);
}

int memcpy_batch(const char *fn, const Pieces &pieces, int mode, kvbm_kernels_stream_t stream, BatchReport *report) {
  const Driver &d = driver();
  if (d.status) return fail(d.status, fn, "there is no usable CUDA driver; the host functions need none");
  const StreamContext context(d, stream);
  if (context.status()) return fail(context.status(), fn, "the stream's device cannot be used");
  return run(fn, d, context, pieces, mode, stream, report);
}

}  // namespace kvbm::device
