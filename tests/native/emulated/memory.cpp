#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

// Not every compiler comes with sanitizers. Without AddressSanitizer in use these do nothing anyway.
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, nbytes) static_cast<void>(start)
#define ASAN_UNPOISON_MEMORY_REGION(start, nbytes) static_cast<void>(start)
#endif

namespace emulated {
namespace {

std::mutex mutex;
std::map<uintptr_t, Allocation> allocations;  // by their starts

size_t whole_pages(size_t nbytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (nbytes / page + 1) * page;  // one byte more at the least, to be past the end
}

// Where an allocation is asked to be: of the device anywhere in 2^46 bytes, so that no two are near each other.
void *next_place(bool on_device) {
  static uint64_t random = 1;
  random = random * 6364136223846793005u + 1442695040888963407u;
  constexpr uint64_t kFirst = uint64_t{1} << 45, kSpacing = uint64_t{1} << 21;
  return on_device ? reinterpret_cast<void *>(kFirst + (random >> 18) / kSpacing * kSpacing) : nullptr;
}

}  // namespace

Allocation find_allocation(uintptr_t address) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return {};
  const Allocation &found = (--after)->second;
  return found.holds(address, 1) ? found : Allocation{};
}

}  // namespace emulated

void *kvbm_emulated_malloc(size_t nbytes, bool on_device) {
  const std::lock_guard<std::mutex> lock(emulated::mutex);
  const size_t mapped = emulated::whole_pages(nbytes);
  void *start =
      mmap(emulated::next_place(on_device), mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  std::memset(start, 0xdb, nbytes);
  ASAN_POISON_MEMORY_REGION(static_cast<char *>(start) + nbytes, mapped - nbytes);
  const uintptr_t address = reinterpret_cast<uintptr_t>(start);
  emulated::allocations[address] = {address, nbytes, on_device};
  return start;
}

void kvbm_emulated_free(void *start) {
  const std::lock_guard<std::mutex> lock(emulated::mutex);
  const auto found = emulated::allocations.find(reinterpret_cast<uintptr_t>(start));
  if (found == emulated::allocations.end()) return;
  const size_t mapped = emulated::whole_pages(found->second.nbytes);
  ASAN_UNPOISON_MEMORY_REGION(start, mapped);
  munmap(start, mapped);
  emulated::allocations.erase(found);
}
