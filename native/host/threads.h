// Running one piece of work in several threads.
#pragma once

namespace kvbm::host {

// More threads than this move nothing faster: a few saturate the memory of one socket.
constexpr int kMaxParts = 64;

// Calls work(context, part, parts) for each part, kMaxParts at most, the last in the calling thread, and returns when
// all have finished. A part whose thread cannot be started runs in the calling thread.
void run_parts(int parts, void (*work)(void *context, int part, int parts), void *context);

}  // namespace kvbm::host
