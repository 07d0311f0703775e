// Softmax over keys of masked attention scores, and its gradient. A row of up to 32 values per thread is read once and
// kept in registers, by a warp (up to 1024 keys) or a block (up to 8192); longer rows are read twice.
//
// Longer rows take their maximum and sum in one pass: Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018.
#pragma once

#include "merak/pack.h"

namespace merak {

// scores [batch, heads, queries, keys]. causal hides keys past i + keys - queries from query i. mask bool, of which
// False hides: strides of its leading dimensions, 0 where it broadcasts; null for none. vector: packs are whole and
// aligned.
struct Scores {
  int rows, heads, queries, keys;
  float scale;
  bool causal, vector;
  const bool* mask;
  int64_t mask_batch, mask_head, mask_query;
};

// How many of a row's keys come before those that causality hides.
__device__ __forceinline__ int visible_keys(const Scores& scores, int row) {
  if (!scores.causal) return scores.keys;
  return max(0, min(scores.keys, row % scores.queries + scores.keys - scores.queries + 1));
}

__device__ __forceinline__ const bool* mask_row(const Scores& scores, int row) {
  if (scores.mask == nullptr) return nullptr;
  const int matrix = row / scores.queries, query = row - matrix * scores.queries;
  const int batch = matrix / scores.heads, head = matrix - batch * scores.heads;
  return scores.mask + batch * scores.mask_batch + head * scores.mask_head + query * scores.mask_query;
}

// value = scaled scores of the keys from `at` on, -inf where the mask hides and from `visible` on.
template <class T, int N>
__device__ __forceinline__ void mask_scores(const Pack<T, N>& pack, const Scores& scores, const bool* mask, int at,
                                            int visible, float (&value)[N]) {
  Pack<bool, N> shown;
  if (mask != nullptr && scores.vector && at < visible) shown = load<bool, N>(mask + at);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    value[i] = -INFINITY;
    if (at + i < visible && (mask == nullptr || (scores.vector ? shown.at[i] : mask[at + i])))
      value[i] = widen(pack.at[i]) * scores.scale;
  }
}

// What exponents are taken relative to: a row without any number above -inf must not become inf - inf.
__device__ __forceinline__ float base_of(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// What exponentials are multiplied by: zero in a row where all is hidden, NaN in one that holds NaN.
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.f ? 0.f : 1.f / sum; }

// As row_sum of merak/device.h; NaN is passed over.
__device__ __forceinline__ float row_max(float value, float* scratch) {
  value = warp_max(value);
  const int warps = blockDim.x / kWarp, first = threadIdx.y * warps, lane = threadIdx.x % kWarp;
  if (warps == 1) return value;
  if (lane == 0) scratch[first + threadIdx.x / kWarp] = value;
  __syncthreads();
  value = warp_max(lane < warps ? scratch[first + lane] : -INFINITY);
  __syncthreads();
  return value;
}

// The sum of exp(x - max) over the numbers seen so far, beside their maximum. Merges in any order.
struct RunningSum {
  float max = -INFINITY, sum = 0.f;

  __device__ __forceinline__ void merge(float other_max, float other_sum) {
    const float found = fmaxf(max, other_max), base = base_of(found);
    sum = sum * __expf(max - base) + other_sum * __expf(other_max - base);
    max = found;
  }

  template <int N>
  __device__ __forceinline__ void add(const float (&value)[N]) {
    float peak = max;
#pragma unroll
    for (int i = 0; i < N; ++i) peak = fmaxf(peak, value[i]);
    const float base = base_of(peak);
    float found = sum * __expf(max - base);
#pragma unroll
    for (int i = 0; i < N; ++i) found += __expf(value[i] - base);
    max = peak;
    sum = found;
  }
};

// Merges over a row as row_sum does: every thread gets the same bits. scratch: float [64].
__device__ __forceinline__ RunningSum row_merge(RunningSum own, float* scratch) {
  const auto over_warp = [&] {
#pragma unroll
    for (int bits = kWarp / 2; bits > 0; bits /= 2) {
      const float max = __shfl_xor_sync(kAllLanes, own.max, bits), sum = __shfl_xor_sync(kAllLanes, own.sum, bits);
      own.merge(max, sum);
    }
    own.sum = __shfl_sync(kAllLanes, own.sum, 0);  // a fused multiply-add is not symmetric: lanes differ by a rounding
  };
  over_warp();
  const int warps = blockDim.x / kWarp, first = threadIdx.y * warps, lane = threadIdx.x % kWarp;
  if (warps == 1) return own;
  if (lane == 0) {
    scratch[2 * (first + threadIdx.x / kWarp)] = own.max;
    scratch[2 * (first + threadIdx.x / kWarp) + 1] = own.sum;
  }
  __syncthreads();
  own = RunningSum();
  if (lane < warps) {
    own.max = scratch[2 * (first + lane)];
    own.sum = scratch[2 * (first + lane) + 1];
  }
  over_warp();
  __syncthreads();
  return own;
}

// A row per threadIdx.y; PACKS packs for each of its threads hold it. Shared: float [32].
template <class T, int PACKS>
__global__ void __launch_bounds__(256) masked_softmax(const T* __restrict__ from, T* __restrict__ to, Scores scores) {
  constexpr int N = kPack<T>;
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  const int64_t start = int64_t(row) * scores.keys;
  const int visible = row < scores.rows ? visible_keys(scores, row) : 0;
  Pack<T, N> pack[PACKS];
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int at = (k * blockDim.x + threadIdx.x) * N;
    if (at < visible) pack[k] = load<T, N, Hint::kOnce>(from + start + at, scores.keys - at, scores.vector);
  }
  const bool* mask = visible > 0 ? mask_row(scores, row) : nullptr;
  float value[PACKS][N], peak = -INFINITY;
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    mask_scores(pack[k], scores, mask, (k * blockDim.x + threadIdx.x) * N, visible, value[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) peak = fmaxf(peak, value[k][i]);
  }
  float* scratch = dynamic_shared<float>();
  const float base = base_of(row_max(peak, scratch));
  float sum[1] = {0.f};
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[0] += value[k][i] = __expf(value[k][i] - base);
  }
  row_sum(sum, scratch);
  if (row >= scores.rows) return;
  const float inverse = inverse_of(sum[0]);
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int at = (k * blockDim.x + threadIdx.x) * N;
    Pack<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) out.at[i] = narrow<T>(value[k][i] * inverse);
    if (at < scores.keys) store(to + start + at, out, scores.keys - at, scores.vector);
  }
}

// The same for rows of any length, one per block. Shared: float [64].
template <class T>
__global__ void __launch_bounds__(512)
    masked_softmax_long(const T* __restrict__ from, T* __restrict__ to, Scores scores) {
  constexpr int N = kPack<T>;
  const int row = blockIdx.x, visible = visible_keys(scores, row), step = blockDim.x * N;
  const int64_t start = int64_t(row) * scores.keys;
  const bool* mask = mask_row(scores, row);
  float value[N];
  RunningSum seen;
  for (int at = threadIdx.x * N; at < visible; at += step) {
    const auto pack = load<T, N>(from + start + at, scores.keys - at, scores.vector);
    mask_scores(pack, scores, mask, at, visible, value);
    seen.add(value);
  }
  seen = row_merge(seen, dynamic_shared<float>());
  const float base = base_of(seen.max), inverse = inverse_of(seen.sum);
  for (int at = threadIdx.x * N; at < scores.keys; at += step) {
    Pack<T, N> out{};
    if (at < visible) {
      const auto pack = load<T, N>(from + start + at, scores.keys - at, scores.vector);
      mask_scores(pack, scores, mask, at, visible, value);
#pragma unroll
      for (int i = 0; i < N; ++i) out.at[i] = narrow<T>(__expf(value[i] - base) * inverse);
    }
    store(to + start + at, out, scores.keys - at, scores.vector);
  }
}

// Adds g p of the keys from `at` on; then their scale p (g - dot), zero from `visible` on.
template <class T, int N>
__device__ __forceinline__ void add_products(const Pack<T, N>& g, const Pack<T, N>& p, int at, int visible,
                                             float& dot) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (at + i < visible) dot += widen(g.at[i]) * widen(p.at[i]);
}

template <class T, int N>
__device__ __forceinline__ Pack<T, N> gradient_of(const Pack<T, N>& g, const Pack<T, N>& p, int at, int visible,
                                                  float dot, float scale) {
  Pack<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i)
    out.at[i] = narrow<T>(at + i < visible ? scale * widen(p.at[i]) * (widen(g.at[i]) - dot) : 0.f);
  return out;
}

// scale p (g - sum(g p)); what causality hides counts as zero. Geometry as masked_softmax. Shared: float [32].
template <class T, int PACKS>
__global__ void __launch_bounds__(256)
    masked_softmax_backward(const T* __restrict__ grad, const T* __restrict__ probabilities, T* __restrict__ to,
                            Scores scores) {
  constexpr int N = kPack<T>;
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  const int64_t start = int64_t(row) * scores.keys;
  const int visible = row < scores.rows ? visible_keys(scores, row) : 0;
  Pack<T, N> g[PACKS], p[PACKS];
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int at = (k * blockDim.x + threadIdx.x) * N;
    if (at >= visible) continue;
    g[k] = load<T, N, Hint::kOnce>(grad + start + at, scores.keys - at, scores.vector);
    p[k] = load<T, N, Hint::kOnce>(probabilities + start + at, scores.keys - at, scores.vector);
  }
  float dot[1] = {0.f};
#pragma unroll
  for (int k = 0; k < PACKS; ++k) add_products(g[k], p[k], (k * blockDim.x + threadIdx.x) * N, visible, dot[0]);
  row_sum(dot, dynamic_shared<float>());
  if (row >= scores.rows) return;
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int at = (k * blockDim.x + threadIdx.x) * N;
    const auto out = gradient_of(g[k], p[k], at, visible, dot[0], scores.scale);
    if (at < scores.keys) store(to + start + at, out, scores.keys - at, scores.vector);
  }
}

template <class T>
__global__ void __launch_bounds__(512)
    masked_softmax_backward_long(const T* __restrict__ grad, const T* __restrict__ probabilities,
                                 T* __restrict__ to, Scores scores) {
  constexpr int N = kPack<T>;
  const int row = blockIdx.x, visible = visible_keys(scores, row), step = blockDim.x * N;
  const int64_t start = int64_t(row) * scores.keys;
  float dot[1] = {0.f};
  for (int at = threadIdx.x * N; at < visible; at += step) {
    const auto g = load<T, N>(grad + start + at, scores.keys - at, scores.vector);
    const auto p = load<T, N>(probabilities + start + at, scores.keys - at, scores.vector);
    add_products(g, p, at, visible, dot[0]);
  }
  row_sum(dot, dynamic_shared<float>());
  for (int at = threadIdx.x * N; at < scores.keys; at += step) {
    Pack<T, N> out{};
    if (at < visible) {
      const auto g = load<T, N>(grad + start + at, scores.keys - at, scores.vector);
      const auto p = load<T, N>(probabilities + start + at, scores.keys - at, scores.vector);
      out = gradient_of(g, p, at, visible, dot[0], scores.scale);
    }
    store(to + start + at, out, scores.keys - at, scores.vector);
  }
}

}  // namespace merak
