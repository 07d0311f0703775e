// residual + dropout(x + bias), and its gradient. The mask is computed again wherever it is needed, from a seed and the
// element's place, by SplitMix64 (Steele, Lea and Flood, 2014).
#pragma once

#include "columns.cuh"

namespace merak::residual {

__device__ __forceinline__ uint64_t splitmix(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebull;
  return state ^ (state >> 31);
}

// 32 random bits for each of the elements index, index + 1, ...: of the number of their pair the low half if the index
// is even, the high half if it is odd.
template <int N>
__device__ __forceinline__ void random_bits(uint64_t seed, uint64_t index, uint32_t (&bits)[N]) {
  constexpr uint64_t step = 0x9e3779b97f4a7c15ull;
  const uint64_t state = seed + index / 2 * step;
  uint64_t number = splitmix(state);
  if (index % 2 == 0) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      if (j > 0) number = splitmix(state + j / 2 * step);
      bits[j] = uint32_t(number);
      bits[j + 1] = uint32_t(number >> 32);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      bits[j] = uint32_t(number >> 32);
      number = splitmix(state + (j / 2 + 1) * step);
      bits[j + 1] = uint32_t(number);
    }
  }
}

struct Dropout {
  const int64_t* seed;  // null: keeps all
  uint64_t threshold;   // of 2^32: less is dropped
  float scale;
};

// Drops and scales N elements from `index` on. What is dropped is 0, NaN or not.
template <int N>
__device__ __forceinline__ void drop(const Dropout& dropout, uint64_t seed, uint64_t index, float (&values)[N]) {
  uint32_t bits[N];
  random_bits(seed, index, bits);
#pragma unroll
  for (int j = 0; j < N; ++j) values[j] = bits[j] >= dropout.threshold ? values[j] * dropout.scale : 0.f;
}

template <class T>
struct Add {
  const T *x, *residual;  // x: or the upstream gradient
  Values bias;
  Dropout dropout;
  T* y;
  float* parts;
  Columns over;
};

template <class T>
__global__ void __launch_bounds__(256) bias_dropout_add(const Add<T> a) {
  constexpr int N = kPack<T>;
  const int64_t column = a.over.template first<T>(), left = a.over.width - column;
  if (left <= 0) return;
  const uint64_t seed = a.dropout.seed ? *a.dropout.seed : 0;
  float bias[N] = {};
  if (a.bias.data) read<T>(a.bias, column, left, a.over.vector, bias);
  for (int64_t row = a.over.group(); row < a.over.rows; row += a.over.groups()) {
    const int64_t at = row * a.over.width + column;
    const auto x = load<T, N, Hint::kOnce>(a.x + at, left, a.over.vector);
    Pack<T, N> y;
    if (a.residual) y = load<T, N>(a.residual + at, left, a.over.vector);
    float values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = widen(x.at[j]) + bias[j];
    if (a.dropout.seed) drop(a.dropout, seed, at, values);
#pragma unroll
    for (int j = 0; j < N; ++j) y.at[j] = narrow<T>(a.residual ? widen(y.at[j]) + values[j] : values[j]);
    store(a.y + at, y, left, a.over.vector);
  }
}

// The gradient of x; with parts, float [groups, width], its sums over the rows of each group.
template <class T>
__global__ void __launch_bounds__(256) bias_dropout_add_backward(const Add<T> a) {
  constexpr int N = kPack<T>;
  const int64_t column = a.over.template first<T>(), left = a.over.width - column;
  if (left <= 0) return;
  const uint64_t seed = a.dropout.seed ? *a.dropout.seed : 0;
  Pack<float, N> sum = {};
  for (int64_t row = a.over.group(); row < a.over.rows; row += a.over.groups()) {
    const int64_t at = row * a.over.width + column;
    const auto grad = load<T, N>(a.x + at, left, a.over.vector);
    float values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = widen(grad.at[j]);
    if (a.dropout.seed) drop(a.dropout, seed, at, values);
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sum.at[j] += values[j];
      y.at[j] = narrow<T>(values[j]);
    }
    store(a.y + at, y, left, a.over.vector);
  }
  if (a.parts) store(a.parts + a.over.group() * a.over.width + column, sum, left, a.over.vector);
}

}  // namespace merak::residual
