// Status codes and this thread's last failure.
#pragma once

namespace kvbm {

// Keeps "fn: " and the formatted sentence as this thread's last error message, and returns status.
[[gnu::format(printf, 3, 4)]] int fail(int status, const char *fn, const char *format, ...);

}  // namespace kvbm
