// What the host engine has to know of the machine.
#pragma once

#include <cstddef>

namespace kvbm::host {

// The processors this process may run on.
int available_processors();

// The size of the cache that stands before memory; what it costs to ask is paid once.
size_t last_level_cache_nbytes();

}  // namespace kvbm::host
