// Sums and maxima over ranks, element by element, in the order of ranks: the same bits wherever they are made.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../cpu/vector.h"

namespace merak {

enum class Element { float32, float64, bfloat16, float16, int32, int64 };
enum class Reduction { sum, max };

constexpr int kMostRanks = 64;

// Numbers of 16 bits are added in float32 and rounded once.
template <class T>
struct Wide {
  using type = T;
};
template <>
struct Wide<bf16> {
  using type = float;
};
template <>
struct Wide<fp16> {
  using type = float;
};

template <class T>
typename Wide<T>::type load(T value) {
  if constexpr (std::is_same_v<typename Wide<T>::type, T>)
    return value;
  else
    return widen(value);
}

template <class T>
T store(typename Wide<T>::type value) {
  if constexpr (std::is_same_v<typename Wide<T>::type, T>)
    return value;
  else
    return narrow<T>(value);
}

struct Sum {
  template <class A>
  static A of(A a, A b) {
    if constexpr (std::is_integral_v<A>)
      return A(std::make_unsigned_t<A>(a) + std::make_unsigned_t<A>(b));  // wraps around
    else
      return a + b;
  }
};

// NaN where either is NaN.
struct Max {
  template <class A>
  static A of(A a, A b) {
    return b > a || b != b ? b : a;
  }
};

// out[i] = from[0][i] . from[1][i] . ... for two ranks or more. `out` may be one of the inputs.
template <class Do, class T>
void reduce_as(T* out, const T* const* from, int ranks, size_t count) {
  using A = typename Wide<T>::type;
  const T *first = from[0], *second = from[1], *last = from[ranks - 1];
  if (ranks == 2) {
#pragma omp simd
    for (size_t i = 0; i < count; ++i) out[i] = store<T>(Do::of(load(first[i]), load(second[i])));
    return;
  }
  constexpr size_t kChunk = 1024;
  A sums[kChunk];
  for (size_t begin = 0; begin < count; begin += kChunk) {
    const size_t n = std::min(kChunk, count - begin);
#pragma omp simd
    for (size_t i = 0; i < n; ++i) sums[i] = Do::of(load(first[begin + i]), load(second[begin + i]));
    for (int rank = 2; rank < ranks - 1; ++rank) {
      const T* next = from[rank] + begin;
#pragma omp simd
      for (size_t i = 0; i < n; ++i) sums[i] = Do::of(sums[i], load(next[i]));
    }
#pragma omp simd
    for (size_t i = 0; i < n; ++i) out[begin + i] = store<T>(Do::of(sums[i], load(last[begin + i])));
  }
}

template <class T>
void reduce_of(Reduction reduction, char* out, const char* const* from, int ranks, size_t bytes) {
  const T* typed[kMostRanks];
  for (int rank = 0; rank < ranks; ++rank) typed[rank] = reinterpret_cast<const T*>(from[rank]);
  const auto reduce = reduction == Reduction::sum ? reduce_as<Sum, T> : reduce_as<Max, T>;
  reduce(reinterpret_cast<T*>(out), typed, ranks, bytes / sizeof(T));
}

inline void reduce(Element element, Reduction reduction, char* out, const char* const* from, int ranks, size_t bytes) {
  switch (element) {
    case Element::float32:
      return reduce_of<float>(reduction, out, from, ranks, bytes);
    case Element::float64:
      return reduce_of<double>(reduction, out, from, ranks, bytes);
    case Element::bfloat16:
      return reduce_of<bf16>(reduction, out, from, ranks, bytes);
    case Element::float16:
      return reduce_of<fp16>(reduction, out, from, ranks, bytes);
    case Element::int32:
      return reduce_of<int32_t>(reduction, out, from, ranks, bytes);
    case Element::int64:
      return reduce_of<int64_t>(reduction, out, from, ranks, bytes);
  }
}

}  // namespace merak
