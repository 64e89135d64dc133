#include "kernel.cuh"
#include "launch.h"

namespace kvbm::device {
namespace {

// Few CTAs must have more on the way to hide the same latency.
constexpr uint32_t kBoundedInFlight = 4;
constexpr uint32_t kFullInFlight = 2;

struct Kernel {
  const void *symbol;
  uint32_t threads;
  uint32_t tiles;  // that a CTA takes at a time
};

template <typename P>
Kernel choose_kernel(const Head &head, bool gathers, Budget budget) {
  const uint32_t groups = budget.threads >> head.tile_log2;
  if (head.tile_log2 == kCtaTileLog2) {
    // The usual numbers of dimensions are known to the compiler: the indexing of two takes as long as the copy.
    const void *const by_dims[] = {
        reinterpret_cast<const void *>(move_tile<0, P>), reinterpret_cast<const void *>(move_tile<1, P>),
        reinterpret_cast<const void *>(move_tile<2, P>), reinterpret_cast<const void *>(move_tile<-1, P>)};
    return {by_dims[head.num_inner < 3 ? head.num_inner : 3], kCtaTileThreads, 1};
  }
  if (gathers) return {reinterpret_cast<const void *>(gather<kBoundedThreads, P>), budget.threads, groups};
  if (budget.max_ctas) {
    return {reinterpret_cast<const void *>(move<kBoundedInFlight, kBoundedThreads, 1, P>), budget.threads,
            groups * kBoundedInFlight};
  }
  return {reinterpret_cast<const void *>(move<kFullInFlight, kFullThreads, 1536 / kFullThreads, P>), budget.threads,
          groups * kFullInFlight};
}

}  // namespace

Budget choose_budget(bool src_on_host, bool dst_on_host, int max_sms) {
  const uint32_t limit = static_cast<uint32_t>(max_sms);
  if (!src_on_host && !dst_on_host) return {limit, limit ? kBoundedThreads : kFullThreads};
  const Budget enough = src_on_host ? kLinkRead : kLinkWrite;
  return {limit && limit < enough.max_ctas ? limit : enough.max_ctas, enough.threads};
}

bool Launcher::overlaps() {
  if (overlaps_ < 0) {
    int major = 0;
    // Graphs keep the dependency from CUDA 12.3 on.
    overlaps_ = driver_.version >= 12030 &&
                driver_.device_get_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, context_.device()) ==
                    CUDA_SUCCESS &&
                major >= 9;
  }
  return overlaps_ != 0;
}

int Launcher::launch(LargeParams &params, size_t num_words, bool gathers, Budget budget, bool more) {
  Head &head = params.head;
  const Kernel kernel = num_words <= SmallParams::kWords    ? choose_kernel<SmallParams>(head, gathers, budget)
                        : num_words <= MediumParams::kWords ? choose_kernel<MediumParams>(head, gathers, budget)
                                                            : choose_kernel<LargeParams>(head, gathers, budget);
  uint32_t ctas = (head.num_tiles - 1) / kernel.tiles + 1;
  if (budget.max_ctas && ctas > budget.max_ctas) ctas = budget.max_ctas;

  // A bounded launch lets the next one in only at its end, to stay within its budget.
  const bool lets_next = more && overlaps();
  head.chain =
      (lets_next ? (budget.max_ctas ? kChainLate : kChainEarly) : kChainNone) | (chained_ ? kChainWait : kChainNone);

  CUfunction function;
  if (int status = function_of(kernel.symbol, &function)) return status;

  CUlaunchAttribute overlap{};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = ctas;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = kernel.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.hStream = stream_;
  config.attrs = &overlap;
  config.numAttrs = chained_ ? 1 : 0;
  chained_ = lets_next;
  void *arguments[] = {&params};
  return driver_.launch_kernel(&config, function, arguments, nullptr);
}

}  // namespace kvbm::device
