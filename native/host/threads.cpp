#include "host/threads.h"

#include <pthread.h>
#include <signal.h>

namespace kvbm::host {
namespace {

struct Part {
  void (*work)(void *, int, int);
  void *context;
  int part, parts;
  pthread_t thread;
  bool started;
};

void *run(void *argument) {
  const Part &part = *static_cast<Part *>(argument);
  part.work(part.context, part.part, part.parts);
  return nullptr;
}

}  // namespace

void run_parts(int parts, void (*work)(void *, int, int), void *context) {
  if (parts > kMaxParts) parts = kMaxParts;
  Part list[kMaxParts];
  const int last = parts - 1;

  // Threads start with the signals of their creator; the application's handlers must not run in ours, but for those of
  // what a thread does to itself, such as touching a page that somebody watches.
  sigset_t others, before;
  sigfillset(&others);
  constexpr int kOwn[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  for (int own : kOwn) sigdelset(&others, own);
  // The helpers work on this frame: it must not go away while the joins below wait.
  int cancelable = PTHREAD_CANCEL_ENABLE;
  if (last > 0) {
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelable);
    pthread_sigmask(SIG_SETMASK, &others, &before);
  }
  for (int i = 0; i < last; ++i) {
    list[i] = {work, context, i, parts, {}, false};
    list[i].started = pthread_create(&list[i].thread, nullptr, run, &list[i]) == 0;
  }
  if (last > 0) pthread_sigmask(SIG_SETMASK, &before, nullptr);

  work(context, last, parts);
  for (int i = 0; i < last; ++i) {
    if (list[i].started) {
      pthread_join(list[i].thread, nullptr);
    } else {
      work(context, i, parts);
    }
  }
  if (last > 0) pthread_setcancelstate(cancelable, nullptr);
}

}  // namespace kvbm::host
