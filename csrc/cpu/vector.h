// Element types and elementary functions of the CPU kernels. No torch here; loops over these vectorise for any ISA.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace merak {

inline uint32_t bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

inline float from_bits(uint32_t word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

struct bf16 {
  uint16_t word;
};

struct fp16 {
  uint16_t word;
};

inline float widen(float value) { return value; }

inline float widen(bf16 value) { return from_bits(uint32_t(value.word) << 16); }

// Half to float without branches: normal numbers by a shift and a rescaling, denormal ones by a subtraction.
inline float widen(fp16 value) {
  const uint32_t word = uint32_t(value.word) << 16, sign = word & 0x80000000u, twice = word + word;
  const float normal = from_bits((twice >> 4) + (0xe0u << 23)) * 0x1p-112f;
  const float denormal = from_bits((twice >> 17) | (126u << 23)) - 0.5f;
  return from_bits(sign | (twice < (1u << 27) ? bits(denormal) : bits(normal)));
}

template <class T>
T narrow(float value);

template <>
inline float narrow<float>(float value) {
  return value;
}

// To nearest, ties to even; NaN stays NaN.
template <>
inline bf16 narrow<bf16>(float value) {
  const uint32_t word = bits(value), rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  return {uint16_t((word & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

// To nearest, ties to even: adding a power of two of the right size leaves just the bits that a half has.
template <>
inline fp16 narrow<fp16>(float value) {
  const uint32_t word = bits(value), sign = word & 0x80000000u, twice = word + word;
  const float magnitude = from_bits(word & 0x7fffffffu) * 0x1p+112f * 0x1p-110f;
  const uint32_t exponent = twice & 0xff000000u, bias = exponent < 0x71000000u ? 0x71000000u : exponent;
  const uint32_t sum = bits(from_bits((bias >> 1) + 0x07800000u) + magnitude);
  const uint32_t number = ((sum >> 13) & 0x00007c00u) + (sum & 0x00000fffu);
  return {uint16_t((sign >> 16) | (twice > 0xff000000u ? 0x7e00u : number))};
}

// x within [low, high]; NaN stays NaN.
inline float clamp(float x, float low, float high) {
  const float y = x < low ? low : x;
  return y > high ? high : y;
}

// The sum of value(i) over [0, count). Four sums run side by side: one would wait for each addition to end.
template <class Value>
inline float sum_of(int64_t count, Value value) {
  const int64_t part = count / 4;
  float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
  for (int64_t i = 0; i < part; ++i) {
    a += value(i);
    b += value(i + part);
    c += value(i + 2 * part);
    d += value(i + 3 * part);
  }
  for (int64_t i = 4 * part; i < count; ++i) a += value(i);
  return (a + b) + (c + d);
}

// e^x, |x| <= 87.3, and NaN for NaN: relative error below 1e-7. Range reduction by two-part ln 2, then a polynomial of
// degree 6 (the coefficients of Cephes' expf).
inline float exp_within(float x) {
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
  return p * from_bits(bits(shifted) << 23);
}

// e^x, x <= 0: 0 below -87.3, NaN for NaN.
inline float decay(float x) { return x < -87.3f ? 0.f : exp_within(x); }

// 1 / (1 + e^-x), and what it lacks to 1 without cancellation, |x| <= 87.3; NaN for NaN.
struct Logistic {
  float value, rest;
};

inline Logistic logistic(float x) {
  const float e = exp_within(-x), value = 1.f / (1.f + e);
  return {value, e * value};
}

// The normal distribution's density at x, and its part below x to 1.5e-7, of small parts 3e-6 of themselves.
struct Normal {
  float density, below;
};

// The tail beyond |x| is density(x) times a polynomial in 1 / (1 + c |x|), a form of Hastings (1955); the coefficients
// are a minimax fit over |x| < 12 that is exact at 0.
inline Normal normal(float x) {
  const float density = 0.398942280f * decay(-0.5f * x * x);
  const float t = 1.f / (1.f + 0.35f * __builtin_fabsf(x));
  float p = 0.112713732f;
  p = p * t - 0.465848953f;
  p = p * t + 0.534861863f;
  p = p * t + 0.0176375713f;
  p = p * t + 0.360904038f;
  p = p * t + 0.342642248f;
  p = p * t + 0.350403696f;
  const float tail = density * p * t;
  return {density, x > 0.f ? 1.f - tail : tail};
}

}  // namespace merak
