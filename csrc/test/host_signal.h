// What merak/signal.h leaves to programs on the host.
#pragma once

#include "merak/signal.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include <sched.h>
#include <time.h>

namespace merak::signal {

// Where a thread is, and the last place at which it had to wait: for another thread that wants it to have waited.
// Relaxed, so that ThreadSanitizer takes nothing here for an order.
struct Place {
  int number = 0;
  std::atomic<int> waited{-1};
};
inline thread_local Place* place = nullptr;

uint64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1000000000u + time.tv_nsec;
}
void pause() {
  if (place != nullptr) place->waited.store(place->number, std::memory_order_relaxed);
  sched_yield();
}
void fail() {
  std::puts("a rank waited too long");
  std::_Exit(3);
}

}  // namespace merak::signal
