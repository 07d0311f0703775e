// Counters that devices set for each other, at system scope: what was written before a release is seen after an acquire.
#pragma once

#include "device.h"

namespace merak::signal {

#ifdef __CUDACC__
__device__ __forceinline__ void release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t now() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}
__device__ __forceinline__ void pause() { __nanosleep(20); }
__device__ __forceinline__ void fail() { __trap(); }
#else
inline void release(uint32_t* flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline uint32_t acquire(const uint32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
uint64_t now();
void pause();
void fail();
#endif

// Returns once a counter, which only grows, has reached `value`. patience: nanoseconds until the launch fails.
__device__ __forceinline__ void await(const uint32_t* counter, uint32_t value, uint64_t patience) {
  const uint64_t start = now();
  while (int32_t(acquire(counter) - value) < 0) {
    if (now() - start > patience) fail();
    pause();
  }
}

}  // namespace merak::signal
