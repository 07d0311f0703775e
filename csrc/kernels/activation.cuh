// SiLU and GELU (Hendrycks and Gimpel, 2016), gated (Shazeer, 2020) or with a bias, and their gradients.
#pragma once

#include "columns.cuh"

namespace merak::activation {

enum Kind { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// An activation and its derivative at one place.
struct Curve {
  float value, slope;
};

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

// Past +-16 the functions below are 0 or x to the last bit; powers of x are taken inside only, where they are finite.
__device__ __forceinline__ float inner(float x) { return x > 16.f ? 16.f : (x < -16.f ? -16.f : x); }

template <int kind>
__device__ __forceinline__ Curve curve(float x) {
  if constexpr (kind == kSilu) {
    const float s = sigmoid(x);
    return {x * s, s + x * s * (1.f - s)};
  } else if constexpr (kind == kGelu) {
    const float y = inner(x);
    const float below = 0.5f + 0.5f * erff(y * 0.707106781f), density = 0.398942280f * expf(-0.5f * y * y);
    return {x * below, below + y * density};
  } else {
    // (1 + tanh u) / 2 is the logistic function of 2 u.
    const float y = inner(x), root = 1.59576912f, cubic = 0.044715f;
    const float s = sigmoid(root * (y + cubic * y * y * y));
    return {x * s, s + y * s * (1.f - s) * root * (1.f + 3.f * cubic * y * y)};
  }
}

template <class T>
struct Gated {
  const T *grad, *gate, *up;
  T *y, *grad_gate, *grad_up;
  int64_t gate_stride, up_stride, grad_gate_stride, grad_up_stride;
  Columns over;
};

// activation(gate) * up
template <class T, int kind>
__global__ void __launch_bounds__(256) gated(const Gated<T> a) {
  constexpr int N = kPack<T>;
  const int64_t column = a.over.template first<T>(), left = a.over.width - column;
  if (left <= 0) return;
  for (int64_t row = a.over.group(); row < a.over.rows; row += a.over.groups()) {
    const auto gate = load<T, N>(a.gate + row * a.gate_stride + column, left, a.over.vector);
    const auto up = load<T, N>(a.up + row * a.up_stride + column, left, a.over.vector);
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) y.at[j] = narrow<T>(curve<kind>(widen(gate.at[j])).value * widen(up.at[j]));
    store(a.y + row * a.over.width + column, y, left, a.over.vector);
  }
}

template <class T, int kind>
__global__ void __launch_bounds__(256) gated_backward(const Gated<T> a) {
  constexpr int N = kPack<T>;
  const int64_t column = a.over.template first<T>(), left = a.over.width - column;
  if (left <= 0) return;
  for (int64_t row = a.over.group(); row < a.over.rows; row += a.over.groups()) {
    const auto grad = load<T, N, Hint::kOnce>(a.grad + row * a.over.width + column, left, a.over.vector);
    const auto gate = load<T, N>(a.gate + row * a.gate_stride + column, left, a.over.vector);
    const auto up = load<T, N>(a.up + row * a.up_stride + column, left, a.over.vector);
    Pack<T, N> grad_gate, grad_up;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const Curve at = curve<kind>(widen(gate.at[j]));
      const float g = widen(grad.at[j]);
      grad_gate.at[j] = narrow<T>(g * widen(up.at[j]) * at.slope);
      grad_up.at[j] = narrow<T>(g * at.value);
    }
    store(a.grad_gate + row * a.grad_gate_stride + column, grad_gate, left, a.over.vector);
    store(a.grad_up + row * a.grad_up_stride + column, grad_up, left, a.over.vector);
  }
}

template <class T>
struct Biased {
  const T *grad, *x;
  Values bias;
  T* y;  // or the gradient of x
  float* parts;
  Columns over;
};

// activation(x + bias)
template <class T, int kind>
__global__ void __launch_bounds__(256) biased(const Biased<T> a) {
  constexpr int N = kPack<T>;
  const int64_t column = a.over.template first<T>(), left = a.over.width - column;
  if (left <= 0) return;
  float bias[N] = {};
  if (a.bias.data) read<T>(a.bias, column, left, a.over.vector, bias);
  for (int64_t row = a.over.group(); row < a.over.rows; row += a.over.groups()) {
    const int64_t at = row * a.over.width + column;
    const auto x = load<T, N>(a.x + at, left, a.over.vector);
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) y.at[j] = narrow<T>(curve<kind>(widen(x.at[j]) + bias[j]).value);
    store(a.y + at, y, left, a.over.vector);
  }
}

// With parts, float [gridDim.y * blockDim.y, width]: each group of rows leaves its sum of the gradient there.
template <class T, int kind>
__global__ void __launch_bounds__(256) biased_backward(const Biased<T> a) {
  constexpr int N = kPack<T>;
  const int64_t column = a.over.template first<T>(), left = a.over.width - column;
  if (left <= 0) return;
  float bias[N] = {};
  Pack<float, N> sum = {};
  if (a.bias.data) read<T>(a.bias, column, left, a.over.vector, bias);
  for (int64_t row = a.over.group(); row < a.over.rows; row += a.over.groups()) {
    const int64_t at = row * a.over.width + column;
    const auto grad = load<T, N, Hint::kOnce>(a.grad + at, left, a.over.vector);
    const auto x = load<T, N>(a.x + at, left, a.over.vector);
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float found = widen(grad.at[j]) * curve<kind>(widen(x.at[j]) + bias[j]).slope;
      sum.at[j] += found;
      y.at[j] = narrow<T>(found);
    }
    store(a.y + at, y, left, a.over.vector);
  }
  if (a.parts) store(a.parts + a.over.group() * a.over.width + column, sum, left, a.over.vector);
}

}  // namespace merak::activation
