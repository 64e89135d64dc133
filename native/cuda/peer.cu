#include "peer.h"
#include "status.h"

namespace kvbm::device {
namespace {

// Not one of the calls that a capture anywhere in the process forbids, whatever other threads are at.
class AnyCapture {
 public:
  explicit AnyCapture(const Driver &driver) : driver_(driver) { driver_.thread_exchange_stream_capture_mode(&mode_); }
  ~AnyCapture() { driver_.thread_exchange_stream_capture_mode(&mode_); }
  AnyCapture(const AnyCapture &) = delete;
  AnyCapture &operator=(const AnyCapture &) = delete;

 private:
  const Driver &driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace

int reach(const char *fn, const char *side, const Driver &driver, const StreamContext &context, const Memory &memory,
          uintptr_t address) {
  if (memory.kind != Memory::kDevice || memory.device < 0 || memory.device == context.device()) return 0;
  CUcontext owner = nullptr;
  unsigned access = 0, is_managed = 0;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
                                 CU_POINTER_ATTRIBUTE_IS_MANAGED};
  void *values[] = {&owner, &access, &is_managed};
  const bool known = driver.pointer_get_attributes(3, names, values, address) == CUDA_SUCCESS;
  if (known && is_managed != 0) return 0;
  // What was mapped with access for chosen devices has no context, and tells the truth. What was allocated claims to be
  // open to every peer, whether or not that has been enabled.
  bool can = known && access != 0;
  if (can && owner) {
    const AnyCapture capture(driver);
    const CUresult status = driver.ctx_enable_peer_access(owner, 0);
    can = status == CUDA_SUCCESS || status == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  }
  if (can) return 0;
  return fail(KVBM_KERNELS_ERROR_INVALID_VALUE, fn,
              "the %s is memory of device %d, expected memory that the stream's device %d has access to", side,
              memory.device, static_cast<int>(context.device()));
}

}  // namespace kvbm::device
