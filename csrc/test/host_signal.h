// What merak/signal.h leaves to programs on the host.
#pragma once

#include "merak/signal.h"

#include <cstdio>
#include <cstdlib>

#include <sched.h>
#include <time.h>

namespace merak::signal {
uint64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1000000000u + time.tv_nsec;
}
void pause() { sched_yield(); }
void fail() {
  std::puts("a rank waited too long");
  std::_Exit(3);
}
}  // namespace merak::signal
