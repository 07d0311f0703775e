// Runs CUDA kernels, unchanged, on an x86-64 CPU, so that they can be tested where there is no GPU.
//
// Every CUDA thread is a fiber with a stack of its own. The blocks of a grid run one after another; the warps of a block
// run in random order, each as far as its next block barrier, which is the largest skew there can be: a barrier that is
// missing shows as a wrong number. The lanes of a warp run in random order between its shuffles, votes and barriers. A
// barrier that some threads never reach, and a shuffle from a lane that takes no part, are errors of the launch.
//
// Not seen here: memory ordering inside a warp, barriers across blocks, tensor cores, asynchronous copies, speed, and
// the rounding of the approximate intrinsics (the C library's functions stand in). Compile with -fno-strict-aliasing.
#pragma once

#ifndef __x86_64__
#error "merak/simt.h switches stacks in x86-64 assembly"
#endif

#include <math.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
using cudaStream_t = void*;

// ---- Vector types

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- Numbers

inline unsigned __float_as_uint(float value) {
  unsigned word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}
inline float __uint_as_float(unsigned word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}
inline int __float_as_int(float value) { return int(__float_as_uint(value)); }
inline float __int_as_float(int word) { return __uint_as_float(unsigned(word)); }

struct __nv_bfloat16 {
  uint16_t word;
};
struct __half {
  uint16_t word;
};

inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(unsigned(value.word) << 16); }
inline __nv_bfloat16 __float2bfloat16(float value) {
  const unsigned word = __float_as_uint(value);
  return {uint16_t(value != value ? 0x7fffu : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
}

inline float __half2float(__half value) {
  const int exponent = value.word >> 10 & 31, fraction = value.word & 1023;
  const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                     : exponent == 0 ? ldexpf(float(fraction), -24)
                                     : ldexpf(float(1024 + fraction), exponent - 25);
  return value.word >> 15 ? -size : size;
}
inline __half __float2half(float value) {
  const unsigned word = __float_as_uint(value), sign = word >> 16 & 0x8000u, size = word & 0x7fffffffu;
  if (size > 0x7f800000u) return {0x7fff};
  if (size >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // 65520 and above
  if (size < 0x38800000u) return {uint16_t(sign | unsigned(nearbyintf(ldexpf(fabsf(value), 24))))};  // below 2^-14
  return {uint16_t(sign | ((size + 0xfffu + ((size >> 13) & 1u) - (112u << 23)) >> 13))};
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __float2bfloat16(value); }
inline __half __float2half_rn(float value) { return __float2half(value); }

inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float x, float y) { return x / y; }
__attribute__((noinline)) inline float __fadd_rn(float x, float y) { return x + y; }  // never part of an fma
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
#define rsqrtf simt_rsqrtf  // newer C libraries have one of that name
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline int __clz(int word) { return word ? __builtin_clz(unsigned(word)) : 32; }
using std::max;
using std::min;

// ---- Memory: no hint means anything here, and fibers never interleave inside an atomic operation

template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}
template <class T>
void __stcg(T* to, T value) {
  *to = value;
}
template <class T, class V>
T atomicAdd(T* at, V value) {
  const T old = *at;
  *at = old + T(value);
  return old;
}
template <class T, class V>
T atomicMax(T* at, V value) {
  const T old = *at;
  *at = std::max(old, T(value));
  return old;
}
template <class T, class V, class W>
T atomicCAS(T* at, V expected, W value) {
  const T old = *at;
  if (old == T(expected)) *at = T(value);
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- Threads

namespace simt {

constexpr int kWarp = 32, kStack = 1 << 17;

enum class State : uint8_t { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber {
  std::unique_ptr<char[]> stack;
  void* pointer = nullptr;
  State state = State::kReady;
  uint32_t mask = 0;  // of the warp barrier it waits at
  uint64_t slot = 0;  // what it shows its warp
};

struct Machine {
  std::vector<Fiber> fibers;
  void* scheduler = nullptr;
  int current = 0, threads = 0;
  const std::function<void()>* kernel = nullptr;
  std::unique_ptr<unsigned char, decltype(&std::free)> shared{nullptr, &std::free};
  std::mt19937 random{0};
  std::string error;
};
inline Machine machine;

// Keeps the callee-saved registers and the stack pointer of one side at *save, and goes on where `load` was kept.
__attribute__((naked, noinline, no_sanitize("address", "undefined"))) inline void switch_stack(void** save, void* load) {
  asm(R"(
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret)");
}

__attribute__((noinline)) inline void wait(State state) {
  Fiber& fiber = machine.fibers[machine.current];
  fiber.state = state;
  switch_stack(&fiber.pointer, machine.scheduler);
}

inline void fail(const char* reason) {
  if (machine.error.empty()) machine.error = reason;
}

inline void start() {
  (*machine.kernel)();
  wait(State::kDone);
  std::abort();
}

inline void prepare(Fiber& fiber) {
  if (!fiber.stack) fiber.stack.reset(new char[kStack]);
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(fiber.stack.get()) + kStack) & ~uintptr_t(15));
  *--top = nullptr;  // as if called from here, so that the stack is aligned
  *--top = reinterpret_cast<void*>(&start);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  fiber.pointer = top;
  fiber.state = State::kReady;
}

inline void resume(int thread) {
  machine.current = thread;
  threadIdx = dim3(thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y));
  switch_stack(&machine.scheduler, machine.fibers[thread].pointer);
}

// Lanes of the warp that starts at `first` which exist.
inline uint32_t lanes_of(int first) {
  const int count = std::min(kWarp, machine.threads - first);
  return count == kWarp ? ~0u : (1u << count) - 1;
}

// Lets lanes go on that wait for each other and have all arrived; false if there are none.
inline bool release(int first) {
  const uint32_t lanes = lanes_of(first);
  Fiber* warp = machine.fibers.data() + first;
  bool released = false;
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(lanes >> lane & 1) || warp[lane].state != State::kAtWarpBarrier) continue;
    const uint32_t mask = warp[lane].mask & lanes;
    bool complete = true;
    for (int other = 0; other < kWarp; ++other)
      if (mask >> other & 1)
        complete &= warp[other].state == State::kAtWarpBarrier && (warp[other].mask & lanes) == mask;
    for (int other = 0; complete && other < kWarp; ++other)
      if (mask >> other & 1) warp[other].state = State::kReady;
    released |= complete;
  }
  return released;
}

// One warp, as far as the next block barrier.
inline void run_warp(int first) {
  const int last = std::min(machine.threads, first + kWarp);
  do {
    const int turn = machine.random() % kWarp;
    for (int k = 0; k < kWarp; ++k) {
      const int thread = first + (k + turn) % kWarp;
      if (thread < last && machine.fibers[thread].state == State::kReady) resume(thread);
    }
  } while (release(first));
  for (int thread = first; thread < last; ++thread)
    if (machine.fibers[thread].state == State::kAtWarpBarrier) fail("some lanes never reach a warp barrier");
}

inline void run_block() {
  for (int thread = 0; thread < machine.threads; ++thread) prepare(machine.fibers[thread]);
  std::vector<int> order((machine.threads + kWarp - 1) / kWarp);
  std::iota(order.begin(), order.end(), 0);
  while (machine.error.empty()) {
    std::shuffle(order.begin(), order.end(), machine.random);
    for (int warp : order) run_warp(warp * kWarp);
    int done = 0;
    for (int thread = 0; thread < machine.threads; ++thread) done += machine.fibers[thread].state == State::kDone;
    if (done == machine.threads) return;
    if (done != 0) fail("some threads never reach a block barrier");
    for (int thread = 0; thread < machine.threads; ++thread) machine.fibers[thread].state = State::kReady;
  }
}

// Runs kernel() for every thread of the grid; 0, or 1 with the reason in machine.error. Shared memory starts as NaN.
inline int launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
  machine.error.clear();
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 ||
      grid.z == 0 || grid.z > 65535 || shared_bytes > (227u << 10))
    fail("invalid configuration argument");
  machine.threads = int(threads);
  machine.kernel = &kernel;
  if (machine.fibers.size() < threads && machine.error.empty()) machine.fibers.resize(threads);
  machine.shared.reset(shared_bytes ? static_cast<unsigned char*>(std::aligned_alloc(16, (shared_bytes + 15) & ~15ull))
                                    : nullptr);
  gridDim = grid;
  blockDim = block;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x && machine.error.empty(); ++x) {
        if (shared_bytes) std::memset(machine.shared.get(), 0xff, shared_bytes);
        blockIdx = dim3(x, y, z);
        run_block();
      }
  return machine.error.empty() ? 0 : 1;
}

inline int lane() { return machine.current % kWarp; }

inline void sync_warp(uint32_t mask) {
  if (!(mask >> lane() & 1)) fail("a lane waits at a warp barrier whose mask leaves it out");
  machine.fibers[machine.current].mask = mask;
  wait(State::kAtWarpBarrier);
}

// Shows value to the lanes of mask, and returns what `source` shows.
template <class T>
T exchange(uint32_t mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(Fiber::slot), "shuffles move at most 8 bytes");
  const int first = machine.current - lane();
  std::memcpy(&machine.fibers[machine.current].slot, &value, sizeof value);
  sync_warp(mask);
  if (!(mask & lanes_of(first) & 1u << source)) {
    fail("a shuffle reads a lane that takes no part");
    source = lane();
  }
  std::memcpy(&value, &machine.fibers[first + source].slot, sizeof value);
  sync_warp(mask);
  return value;
}

}  // namespace simt

inline void __syncthreads() { simt::wait(simt::State::kAtBlockBarrier); }
inline void __syncwarp(unsigned mask = ~0u) { simt::sync_warp(mask); }
inline unsigned __activemask() { return ~0u; }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = simt::kWarp) {
  return simt::exchange(mask, value, (simt::lane() & -width) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = simt::kWarp) {
  const int lane = simt::lane(), source = lane ^ bits;
  return simt::exchange(mask, value, source <= (lane | (width - 1)) ? source : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = simt::kWarp) {
  const int lane = simt::lane(), source = lane - int(delta);
  return simt::exchange(mask, value, source >= (lane & -width) ? source : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = simt::kWarp) {
  const int lane = simt::lane(), source = lane + int(delta);
  return simt::exchange(mask, value, source <= (lane | (width - 1)) ? source : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  simt::Machine& machine = simt::machine;
  const int first = machine.current - simt::lane();
  machine.fibers[machine.current].slot = predicate != 0;
  simt::sync_warp(mask);
  unsigned votes = 0;
  for (int lane = 0; lane < simt::kWarp; ++lane)
    if (mask & simt::lanes_of(first) & 1u << lane) votes |= unsigned(machine.fibers[first + lane].slot) << lane;
  simt::sync_warp(mask);
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// For the tests: another order of warps and lanes.
extern "C" __attribute__((used)) inline void simt_seed(unsigned seed) { simt::machine.random.seed(seed); }
