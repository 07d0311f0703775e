// One pass over flat buffers: AdamW, sums of squares, scaled copies and sums; and rows added to a table.
#pragma once

#include "merak/pack.h"

namespace merak {

// rest: 1 - beta. decay: 1 - rate * weight decay. step: rate / (1 - beta1^t). correction: (1 - beta2^t)^-1/2. scale: of
// the gradient. All found in fp64: 1 - 0.999 in fp32 is 5e-5 off.
struct AdamW {
  float rest1, beta2, rest2, decay, step, correction, eps, scale;
};

constexpr int kAdamPack = 4;  // elements of a thread: one 16-byte load of each fp32 buffer

// Loshchilov and Hutter, "Decoupled weight decay regularization", 2019. copy, unless null, gets the rounded master.
// Moments are updated and used in fp32, and rounded where they are stored.
template <class M, class S, class G, class C>
__global__ void __launch_bounds__(256) adamw(float* __restrict__ master, M* __restrict__ exp_avg,
                                             S* __restrict__ exp_avg_sq, const G* __restrict__ grad,
                                             C* __restrict__ copy, int64_t count, AdamW how, bool vector) {
  constexpr int N = kAdamPack;
  const int64_t start = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N, left = count - start;
  if (left <= 0) return;
  auto weight = load<float, N>(master + start, left, vector);
  auto first = load<M, N>(exp_avg + start, left, vector);
  auto second = load<S, N>(exp_avg_sq + start, left, vector);
  const auto gradient = load<G, N>(grad + start, left, vector);
  Pack<C, N> rounded;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float g = widen(gradient.at[i]) * how.scale;
    const float before = widen(first.at[i]), moment = before + how.rest1 * (g - before);
    const float square = how.beta2 * widen(second.at[i]) + how.rest2 * g * g;
    weight.at[i] = how.decay * weight.at[i] - how.step * moment / (sqrtf(square) * how.correction + how.eps);
    first.at[i] = narrow<M>(moment);
    second.at[i] = narrow<S>(square);
    rounded.at[i] = narrow<C>(weight.at[i]);
  }
  store(master + start, weight, left, vector);
  store(exp_avg + start, first, left, vector);
  store(exp_avg_sq + start, second, left, vector);
  if (copy != nullptr) store(copy + start, rounded, left, vector);
}

// The block's sum in fp64, to its first thread. Shared: double [32].
__device__ __forceinline__ double block_sum(double value, double* scratch) {
  value = warp_sum(value);
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  if (lane == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : 0.);
}

constexpr int kSumBlocks = 1024;  // whatever the device, so that the sum is the same on all

// parts[block]: the sum of the squares of every gridDim.x-th pack. Squares are exact in fp64. Shared: double [32].
template <class T>
__global__ void __launch_bounds__(256)
    square_parts(const T* __restrict__ from, int64_t count, double* __restrict__ parts, bool vector) {
  constexpr int N = kPack<T>, LOADS = 4;
  const int64_t step = int64_t(gridDim.x) * blockDim.x * N;
  double sum[2] = {0., 0.};
  for (int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N; at < count; at += LOADS * step) {
    Pack<T, N> pack[LOADS];
#pragma unroll
    for (int k = 0; k < LOADS; ++k) pack[k] = load<T, N>(from + at + k * step, count - at - k * step, vector);
#pragma unroll
    for (int i = 0; i < LOADS * N; ++i) {
      const double value = widen(pack[i / N].at[i % N]);
      sum[i % 2] += value * value;
    }
  }
  const double total = block_sum(sum[0] + sum[1], dynamic_shared<double>());
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

// One block. Shared: double [32].
static __global__ void __launch_bounds__(256)
    sum_parts(const double* __restrict__ parts, int count, double* __restrict__ to) {
  double sum = 0.;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += parts[i];
  sum = block_sum(sum, dynamic_shared<double>());
  if (threadIdx.x == 0) *to = sum;
}

constexpr int kScalePack = 8;

// into = scale * from, with ADD into += scale * from; in fp32, rounded once.
template <class Into, class From, bool ADD>
__global__ void __launch_bounds__(256)
    scale_into(Into* __restrict__ into, const From* __restrict__ from, int64_t count, float scale, bool vector) {
  constexpr int N = kScalePack;
  const int64_t start = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N, left = count - start;
  if (left <= 0) return;
  const auto values = load<From, N>(from + start, left, vector);
  Pack<Into, N> found{};
  if constexpr (ADD) found = load<Into, N>(into + start, left, vector);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float value = scale * widen(values.at[i]);
    found.at[i] = narrow<Into>(ADD ? widen(found.at[i]) + value : value);
  }
  store(into + start, found, left, vector);
}

__device__ __forceinline__ void fail_launch() {
#ifdef __CUDACC__
  __trap();
#else
  simt::fail("an index is out of range");
#endif
}

constexpr int kRowPack = 8;

// Rounds sums of a row's columns, of which the row has `left` more.
template <class T>
__device__ __forceinline__ void store_sums(T* to, const float (&sums)[kRowPack], int64_t left, bool vector) {
  Pack<T, kRowPack> out;
#pragma unroll
  for (int i = 0; i < kRowPack; ++i) out.at[i] = narrow<T>(sums[i]);
  store(to, out, left, vector);
}

// into[index[k]] += from[order[k]] for rows of `width`, index sorted: the block at the first of equal indices adds all
// their rows in order, in fp32, so that the sum is the same every time and no thread waits for another.
template <class Into, class From>
__global__ void __launch_bounds__(128)
    add_rows(Into* __restrict__ into, const int64_t* __restrict__ index, const int64_t* __restrict__ order,
             const From* __restrict__ from, int count, int64_t table_rows, int64_t width, bool vector) {
  constexpr int N = kRowPack, LOADS = 2;
  const int first = blockIdx.x;
  const int64_t row = index[first], start = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N, left = width - start;
  if (row < 0 || row >= table_rows) return fail_launch();
  if (left <= 0 || (first > 0 && index[first - 1] == row)) return;
  const auto held = load<Into, N>(into + row * width + start, left, vector);
  float sum[N];
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] = widen(held.at[i]);
  for (int k = first; k < count && index[k] == row; k += LOADS) {
    Pack<From, N> pack[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
      const bool same = k + j < count && index[k + j] == row;
      const int64_t at = same ? order[k + j] * width + start : 0;
      pack[j] = load<From, N>(from + at, same ? left : 0, vector);
    }
#pragma unroll
    for (int i = 0; i < LOADS * N; ++i) sum[i % N] += widen(pack[i / N].at[i % N]);
  }
  store_sums(into + row * width + start, sum, left, vector);
}

// to[t] = the sum of from[places[t k]], ..., from[places[t k + k - 1]] for rows of `width`, in order and in fp32.
template <class T>
__global__ void __launch_bounds__(128)
    sums_of_rows(const T* __restrict__ from, const int64_t* __restrict__ places, T* __restrict__ to, int k,
                 int64_t count, int64_t width, bool vector) {
  constexpr int N = kRowPack, LOADS = 4;
  const int64_t token = blockIdx.x, start = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N, left = width - start;
  if (left <= 0) return;
  float sum[N] = {};
  for (int first = 0; first < k; first += LOADS) {
    Pack<T, N> pack[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) {
      const bool wanted = first + j < k;
      const int64_t place = wanted ? places[token * k + first + j] : 0;
      if (place < 0 || place >= count) return fail_launch();
      pack[j] = load<T, N, Hint::kOnce>(from + place * width + (wanted ? start : 0), wanted ? left : 0, vector);
    }
#pragma unroll
    for (int i = 0; i < LOADS * N; ++i) sum[i % N] += widen(pack[i / N].at[i % N]);
  }
  store_sums(to + token * width + start, sum, left, vector);
}

}  // namespace merak
