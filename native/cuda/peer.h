// Memory of another device than the one that does the work.
#pragma once

#include <cstdint>

#include "runtime.h"

namespace kvbm::device {

// Sees to it that a kernel on the context's device may touch the memory around this address, which it would otherwise
// take the whole context down for. Access is enabled as by cudaDeviceEnablePeerAccess, and stays so.
// Returns a status, and explains a failure for the `side` of a copy.
int reach(const char *fn, const char *side, const Driver &driver, const StreamContext &context, const Memory &memory,
          uintptr_t address);

}  // namespace kvbm::device
