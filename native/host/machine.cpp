#include "host/machine.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace kvbm::host {
namespace {

constexpr size_t kUsualCache = size_t{32} << 20;

// The kernel's figure. sysconf(_SC_LEVEL3_CACHE_SIZE) can give the sum over all clusters of a socket, ten times what
// one core has.
size_t read_cache_nbytes() {
  const int file = open("/sys/devices/system/cpu/cpu0/cache/index3/size", O_RDONLY | O_CLOEXEC);
  if (file < 0) return kUsualCache;
  char text[32] = {};
  const ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return kUsualCache;
  char *unit;
  const size_t size = std::strtoul(text, &unit, 10);
  const size_t nbytes = *unit == 'K' ? size << 10 : *unit == 'M' ? size << 20 : size;
  return nbytes > 0 ? nbytes : kUsualCache;
}

}  // namespace

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<int>(online) : 1;
}

size_t last_level_cache_nbytes() {
  static std::atomic<size_t> known{0};
  size_t nbytes = known.load(std::memory_order_relaxed);
  if (nbytes == 0) {
    nbytes = read_cache_nbytes();
    known.store(nbytes, std::memory_order_relaxed);
  }
  return nbytes;
}

}  // namespace kvbm::host
