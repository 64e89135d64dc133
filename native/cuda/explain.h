// What the launches of a copy would be, without launching: both builds can tell.
#pragma once

#include "launches.h"
#include "widths.h"

namespace kvbm::device {
namespace {

// Takes the place of the launcher, and writes down what it is asked for.
class Recorder {
 public:
  explicit Recorder(kvbm_kernels_copy_explanation *out) : out_(out) {}

  const Head &head() const { return head_; }
  Kernel kernel() const { return kernel_; }

  int launch(const LargeParams &params, size_t num_words, bool gathers, Budget budget, bool) {
    const Grid grid = choose_grid(params.head, gathers, budget);
    if (out_->num_launches++ == 0) {
      head_ = params.head;
      kernel_ = grid.kernel;
      out_->kernel = name_of(grid.kernel);
      out_->num_ctas = grid.ctas;
      out_->cta_threads = grid.threads;
      out_->tile_nbytes = size_t{kVectorNbytes} << params.head.tile_log2;
      out_->params_nbytes = choose_params(num_words);
    }
    out_->num_tiles += params.head.num_tiles;
    return 0;
  }

 private:
  kvbm_kernels_copy_explanation *out_;
  Head head_{};
  Kernel kernel_{};
};

// The accesses of a whole tile, and whether they are shifted, of the item that has the narrowest.
struct Narrowest {
  size_t read_nbytes = kVectorNbytes, write_nbytes = kVectorNbytes;
  bool shifted = false;

  void see(const Head &head, Kernel kernel, const Tile &tile) {
    if (kernel == Kernel::kGather && is_gathered(head, tile)) {
      add(head.segment_nbytes, kVectorNbytes, false);
    } else if (!is_whole(head, tile)) {
      const Width width = choose_width(head, tile);
      add(size_t{1} << width.log2, size_t{1} << width.log2, width.shifted);
    }
  }

 private:
  void add(size_t read, size_t write, bool is_shifted) {
    if (write < write_nbytes || (write == write_nbytes && read < read_nbytes)) {
      read_nbytes = read;
      write_nbytes = write;
      shifted = is_shifted;
    } else if (write == write_nbytes && read == read_nbytes) {
      shifted |= is_shifted;
    }
  }
};

Narrowest narrowest_of(const Plan &plan, const Head &head, Kernel kernel) {
  constexpr size_t kAtOnce = 256;
  uint64_t src[kAtOnce], dst[kAtOnce];
  const Order order(plan, false);
  const HostSide src_side(plan, plan.src, order), dst_side(plan, plan.dst, order);
  Narrowest narrowest;
  for (size_t first = 0, total = plan.num_items(); first < total; first += kAtOnce) {
    const size_t n = total - first < kAtOnce ? total - first : kAtOnce;
    src_side.list(first, n, src);
    dst_side.list(first, n, dst);
    for (size_t i = 0; i < n; ++i) {
      const auto see = [&](uint64_t past_src, uint64_t past_dst) {
        narrowest.see(head, kernel,
                      {reinterpret_cast<const char *>(src[i] + past_src), reinterpret_cast<char *>(dst[i] + past_dst),
                       0, head.tiles_per_item.size, head.item_nbytes});
      };
      see(0, 0);
      // Whatever else the outer dimensions of a launch reach is aligned at least as well as one of their first steps.
      for (uint32_t k = 0; k < head.num_outer_dims; ++k) {
        see(static_cast<uint64_t>(head.outer[k].src_stride), static_cast<uint64_t>(head.outer[k].dst_stride));
      }
    }
  }
  return narrowest;
}

[[gnu::noinline]] int explain_launches(const char *fn, const Plan &plan, const Assumed &assumed,
                                       kvbm_kernels_copy_explanation *out) {
  const Budget budget = choose_budget(assumed.src_on_host, assumed.dst_on_host, assumed.max_sms);
  const Plan ordered = in_launch_order(plan);
  Recorder recorder(out);
  if (int status = Launches<Recorder>(fn, recorder, Tables::kHost, budget).run(ordered)) return status;
  const Narrowest narrowest = narrowest_of(ordered, recorder.head(), recorder.kernel());
  out->read_nbytes = narrowest.read_nbytes;
  out->write_nbytes = narrowest.write_nbytes;
  out->is_shifted = narrowest.shifted;
  return 0;
}

}  // namespace
}  // namespace kvbm::device
