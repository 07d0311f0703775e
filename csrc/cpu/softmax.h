// Rows of scores and logits: their largest value, and sums of exponentials. -inf is a class that does not exist.
#pragma once

#include "tensor.h"

namespace merak {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// The reference of exponentials: a row's largest value, or 0 where there is none, since -inf - -inf is no number.
inline float reference(float largest) { return largest == kHidden ? 0.f : largest; }

// e^x for x <= 0 as `exponential` has it, in fewer instructions: 0 below -87.3, NaN for NaN.
inline float decay(float x) {
  const float shifted = x * 1.44269504f + 12583039.f;  // 1.5 * 2^23 + 127: its low bits are the exponent's
  const float whole = shifted - 12583039.f;
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.f;
  const float found = p * from_bits(bits(shifted) << 23);
  return x < -87.3f ? 0.f : found;
}

// NaN is passed over: the sum of the exponentials will be NaN.
template <class T>
float largest(const T* x, int64_t count) {
  float most = kHidden;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; ++i) {
    const float value = widen(x[i]);
    most = value > most ? value : most;
  }
  return most;
}

template <class T>
float sum_of_exponentials(const T* x, int64_t count, float from) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += decay(widen(x[i]) - from);
  return sum;
}

}  // namespace merak
