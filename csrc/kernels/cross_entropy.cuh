// Cross entropy over logits [rows, columns], one block per row, packs wherever they are aligned: rows of odd width have
// a few elements before and after them. Statistics take one pass (see softmax.cuh).
#pragma once

#include "softmax.cuh"

namespace merak {

// Elements before the first address that is a multiple of 16.
template <class T>
__device__ __forceinline__ int before_packs(const T* row, int count) {
  return min(count, int((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T)));
}

// Calls take(float (&)[n]) with all values of a row, each once, on some thread; LOADS packs are in flight at a time.
template <int LOADS, class T, class Take>
__device__ __forceinline__ void each_value(const T* row, int count, const Take& take) {
  constexpr int N = kPack<T>;
  const int head = before_packs(row, count), packs = (count - head) / N, tail = head + packs * N;
  const T* body = row + head;
  const int threads = blockDim.x, thread = threadIdx.x;
  for (const int i : {thread < head ? thread : count, tail + thread}) {
    if (i >= count) continue;
    const float one[1] = {widen(row[i])};
    take(one);
  }
  int at = thread;
  for (; at + (LOADS - 1) * threads < packs; at += LOADS * threads) {
    Pack<T, N> pack[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; ++k) pack[k] = load<T, N>(body + int64_t(at + k * threads) * N);
    float value[LOADS * N];
#pragma unroll
    for (int i = 0; i < LOADS * N; ++i) value[i] = widen(pack[i / N].at[i % N]);
    take(value);
  }
  for (; at < packs; at += threads) {
    const auto pack = load<T, N>(body + int64_t(at) * N);
    float value[N];
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = widen(pack.at[i]);
    take(value);
  }
}

// to[i] = map(i, from[i]) for a row; from and to may be the same.
template <class T, class Map>
__device__ __forceinline__ void map_values(const T* from, T* to, int count, const Map& map) {
  constexpr int N = kPack<T>;
  const bool together = (reinterpret_cast<uintptr_t>(from) - reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  const int head = together ? before_packs(from, count) : count, packs = (count - head) / N, tail = head + packs * N;
  const int threads = blockDim.x, thread = threadIdx.x;
  for (int i = thread; i < head; i += threads) to[i] = narrow<T>(map(i, widen(from[i])));
  for (int i = tail + thread; i < count; i += threads) to[i] = narrow<T>(map(i, widen(from[i])));
  for (int at = thread; at < packs; at += 2 * threads) {
    const int first = head + at * N, second = first + threads * N;
    const bool both = at + threads < packs;
    Pack<T, N> a = load<T, N>(from + first), b{};
    if (both) b = load<T, N>(from + second);
#pragma unroll
    for (int i = 0; i < N; ++i) a.at[i] = narrow<T>(map(first + i, widen(a.at[i])));
    store(to + first, a);
    if (!both) break;
#pragma unroll
    for (int i = 0; i < N; ++i) b.at[i] = narrow<T>(map(second + i, widen(b.at[i])));
    store(to + second, b);
  }
}

template <class T>
__device__ __forceinline__ void clear(T* to, int count) {
  constexpr int N = kPack<T>;
  const int head = before_packs(to, count), packs = (count - head) / N, tail = head + packs * N;
  const int threads = blockDim.x, thread = threadIdx.x;
  if (thread < head) to[thread] = T{};
  if (tail + thread < count) to[tail + thread] = T{};
  for (int at = thread; at < packs; at += threads) store(to + head + at * N, Pack<T, N>{});
}

// A shard's rows: classes start .. start + classes of the vocabulary, then padding; `stride` from row to row.
struct Shard {
  int64_t stride, start;
  int classes, columns;
};

// Where the target lies in the shard, -1: in another.
__device__ __forceinline__ int target_in(const Shard& shard, int64_t target) {
  const int64_t at = target - shard.start;
  return at >= 0 && at < shard.classes ? int(at) : -1;
}

// stats float [rows, 3], or with SMOOTHING [rows, 5]. Shared: float [64].
template <class T, bool SMOOTHING>
__global__ void __launch_bounds__(256)
    cross_entropy_stats(const T* __restrict__ logits, const int64_t* __restrict__ target, float* __restrict__ stats,
                        Shard shard) {
  const T* row = logits + blockIdx.x * shard.stride;
  RunningSum seen;
  float extra[2] = {0.f, 0.f};
  each_value<4>(row, shard.classes, [&](const auto& value) {
    seen.add(value);
    if constexpr (SMOOTHING) {
      for (const float x : value) {
        extra[0] += x == -INFINITY ? 0.f : x;
        extra[1] += x == -INFINITY ? 0.f : 1.f;
      }
    }
  });
  float* scratch = dynamic_shared<float>();
  seen = row_merge(seen, scratch);
  if constexpr (SMOOTHING) row_sum(extra, scratch);
  if (threadIdx.x != 0) return;
  const int at = target_in(shard, target[blockIdx.x]);
  float* out = stats + int64_t(blockIdx.x) * (SMOOTHING ? 5 : 3);
  out[0] = seen.max;
  out[1] = seen.sum;
  out[2] = at < 0 ? -INFINITY : widen(row[at]);
  if constexpr (SMOOTHING) {
    out[3] = extra[0];
    out[4] = extra[1];
  }
}

// The gradient of the statistics by the logits, `terms` (3 or 5) of each per row; to has rows of `columns`, to_stride
// apart, and may be logits. A row without a gradient is zero whatever its logits are.
template <class T>
__global__ void __launch_bounds__(256)
    cross_entropy_grad(const T* logits, T* to, int64_t to_stride, const int64_t* __restrict__ target,
                       const float* __restrict__ stats, const float* __restrict__ grad, int terms, Shard shard) {
  const int64_t row = blockIdx.x;
  const float base = base_of(stats[row * terms]), of_sum = grad[row * terms + 1], of_target = grad[row * terms + 2];
  const float of_each = terms == 5 ? grad[row * terms + 3] : 0.f;
  if (of_sum == 0.f && of_target == 0.f && of_each == 0.f) return clear(to + row * to_stride, shard.columns);
  const int chosen = target_in(shard, target[row]);
  map_values(logits + row * shard.stride, to + row * to_stride, shard.columns, [&](int i, float x) {
    if (i >= shard.classes) return 0.f;
    const float found = __expf(x - base) * of_sum + (x == -INFINITY ? 0.f : of_each);
    return i == chosen ? found + of_target : found;
  });
}

// logits -> e = exp(logits - max), less the row's sum at the target; 0 beyond the classes. Shared: float [64].
template <class T>
__global__ void __launch_bounds__(256) exponentiate(T* logits, const int64_t* __restrict__ target,
                                                    float* __restrict__ loss, float* __restrict__ total, Shard shard) {
  T* row = logits + blockIdx.x * shard.stride;
  RunningSum seen;
  each_value<4>(row, shard.classes, [&](const auto& value) { seen.add(value); });
  const int chosen = target_in(shard, target[blockIdx.x]);
  const float at_target = chosen < 0 ? -INFINITY : widen(row[chosen]);
  seen = row_merge(seen, dynamic_shared<float>());  // and all threads have read the row's target
  const float base = base_of(seen.max), sum = seen.sum;
  if (threadIdx.x == 0) {
    loss[blockIdx.x] = logf(sum) - (at_target - base);
    total[blockIdx.x] = sum;
  }
  map_values(row, row, shard.columns, [&](int i, float x) {
    if (i >= shard.classes) return 0.f;
    const float e = __expf(x - base);
    return i == chosen ? e - sum : e;
  });
}

}  // namespace merak
