// Rotary position embedding (Su et al., 2021): pairs of features turned by an angle, which the inverse turns back.
#pragma once

#include "merak/pack.h"

namespace merak::rotary {

constexpr int kDims = 6;

template <class T>
struct Rotary {
  const T* x;
  Values cos, sin;
  T* y;  // x itself, or apart from it
  uint32_t rows;
  int dims;
  uint32_t sizes[kDims];  // of the leading dimensions, whose product is rows
  int64_t x_strides[kDims], angle_strides[kDims], y_strides[kDims];
  int features, half;  // 2 * half of the features are turned, the others copied
  bool inverse, vector;
};

// (a, b) -> (a cos - b sin, b cos + a sin). A pair is (i, i + half), or (2 i, 2 i + 1) if interleaved.
template <class T, bool interleaved>
__global__ void __launch_bounds__(256) rotate(const Rotary<T> a) {
  constexpr int N = kPack<T>;
  const float sign = a.inverse ? -1.f : 1.f;
  const int step = int(blockDim.x) * N, begin = int(threadIdx.x) * N;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < a.rows;
       row += int64_t(gridDim.x) * blockDim.y) {
    const T* x = a.x;
    T* y = a.y;
    int64_t angles = 0;
    uint32_t rest = uint32_t(row);
    for (int d = a.dims - 1; d >= 0; --d) {
      const uint32_t place = rest % a.sizes[d];
      rest /= a.sizes[d];
      x += place * a.x_strides[d];
      angles += place * a.angle_strides[d];
      y += place * a.y_strides[d];
    }
    if constexpr (interleaved) {
      for (int c = begin; c < 2 * a.half; c += step) {
        float cos[N / 2], sin[N / 2];
        read<T>(a.cos, angles + c / 2, a.half - c / 2, a.vector, cos);
        read<T>(a.sin, angles + c / 2, a.half - c / 2, a.vector, sin);
        const auto from = load<T, N>(x + c, 2 * a.half - c, a.vector);
        Pack<T, N> to;
#pragma unroll
        for (int j = 0; j < N / 2; ++j) {
          const float first = widen(from.at[2 * j]), second = widen(from.at[2 * j + 1]), turn = sign * sin[j];
          to.at[2 * j] = narrow<T>(first * cos[j] - second * turn);
          to.at[2 * j + 1] = narrow<T>(second * cos[j] + first * turn);
        }
        store(y + c, to, 2 * a.half - c, a.vector);
      }
    } else {
      for (int c = begin; c < a.half; c += step) {
        float cos[N], sin[N];
        read<T>(a.cos, angles + c, a.half - c, a.vector, cos);
        read<T>(a.sin, angles + c, a.half - c, a.vector, sin);
        const auto first = load<T, N>(x + c, a.half - c, a.vector);
        const auto second = load<T, N>(x + a.half + c, a.half - c, a.vector);
        Pack<T, N> low, high;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float turn = sign * sin[j];
          low.at[j] = narrow<T>(widen(first.at[j]) * cos[j] - widen(second.at[j]) * turn);
          high.at[j] = narrow<T>(widen(second.at[j]) * cos[j] + widen(first.at[j]) * turn);
        }
        store(y + c, low, a.half - c, a.vector);
        store(y + a.half + c, high, a.half - c, a.vector);
      }
    }
    if (x == y) continue;
    for (int c = 2 * a.half + begin; c < a.features; c += step)
      store(y + c, load<T, N>(x + c, a.features - c, a.vector), a.features - c, a.vector);
  }
}

}  // namespace merak::rotary
