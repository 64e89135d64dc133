#include "kernel.cuh"
#include "launcher.h"

namespace kvbm::device {
namespace {

template <typename P>
const void *symbol_of(const Head &head, Kernel kernel, Budget budget) {
  // The usual numbers of dimensions are known to the compiler: the indexing of two takes as long as the copy.
  const void *const by_dims[] = {
      reinterpret_cast<const void *>(move_tile<0, P>), reinterpret_cast<const void *>(move_tile<1, P>),
      reinterpret_cast<const void *>(move_tile<2, P>), reinterpret_cast<const void *>(move_tile<-1, P>)};
  switch (kernel) {
    case Kernel::kMoveTile:
      return by_dims[head.num_inner < 3 ? head.num_inner : 3];
    case Kernel::kGather:
      return reinterpret_cast<const void *>(gather<kBoundedThreads, P>);
    default:
      return budget.max_ctas
                 ? reinterpret_cast<const void *>(move<PassingAccess, kBoundedInFlight, kBoundedThreads, 1, P>)
                 : reinterpret_cast<const void *>(
                       move<Access<16>, kFullInFlight, kFullThreads, 1536 / kFullThreads, P>);
  }
}

}  // namespace

bool launches_overlap(const Driver &driver, CUdevice device) {
  int major = 0;
  // Graphs keep the dependency from CUDA 12.3 on.
  return driver.version >= 12030 &&
         driver.device_get_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) == CUDA_SUCCESS &&
         major >= 9;
}

int launch(const Driver &driver, const void *symbol, uint32_t ctas, uint32_t threads, bool overlaps, void *params,
           kvbm_kernels_stream_t stream) {
  CUfunction function;
  if (int status = function_of(symbol, &function)) return status;
  CUlaunchAttribute overlap{};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = ctas;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = threads;
  config.blockDimY = config.blockDimZ = 1;
  config.hStream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  void *arguments[] = {params};
  return driver.launch_kernel(&config, function, arguments, nullptr);
}

bool Launcher::overlaps() {
  if (overlaps_ < 0) overlaps_ = launches_overlap(driver_, context_.device());
  return overlaps_ != 0;
}

int Launcher::launch(LargeParams &params, size_t num_words, bool gathers, Budget budget, bool more) {
  Head &head = params.head;
  const Grid grid = choose_grid(head, gathers, budget);
  const size_t nbytes = choose_params(num_words);
  const void *const symbol = nbytes == kSmallParams    ? symbol_of<SmallParams>(head, grid.kernel, budget)
                             : nbytes == kMediumParams ? symbol_of<MediumParams>(head, grid.kernel, budget)
                                                       : symbol_of<LargeParams>(head, grid.kernel, budget);

  // A bounded launch lets the next one in only at its end, to stay within its budget.
  const bool lets_next = more && overlaps();
  const uint32_t before = chained_ ? kChainWait : overlaps() ? kChainFirst : kChainNone;
  const uint32_t after = !lets_next ? kChainNone : budget.max_ctas ? kChainLate : kChainEarly;
  head.chain = before | after;

  chained_ = lets_next;
  return device::launch(driver_, symbol, grid.ctas, grid.threads, overlaps(), &params, stream_);
}

}  // namespace kvbm::device
