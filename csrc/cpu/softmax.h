// Rows of scores and logits: their largest value, and sums of exponentials. -inf is a class that does not exist.
#pragma once

#include "tensor.h"

namespace merak {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

// The reference of exponentials: a row's largest value, or 0 where there is none, since -inf - -inf is no number.
inline float reference(float largest) { return largest == kHidden ? 0.f : largest; }

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
