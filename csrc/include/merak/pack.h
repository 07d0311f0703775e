// Elements in registers: the three types, widened to fp32 and narrowed from it, and packs of them that move as one load.
#pragma once

#include "device.h"

namespace merak {

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(bf16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(fp16 value) { return __half2float(value); }

template <class T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float value) {
  return __float2bfloat16(value);
}
template <>
__device__ __forceinline__ fp16 narrow<fp16>(float value) {
  return __float2half(value);
}

// Elements in the 16 bytes that one load or store of a thread moves.
template <class T>
constexpr int kPack = 16 / sizeof(T);

// N elements, N a power of two: moved 16 bytes at a time where they fill that, so addresses must be multiples of
// their size (of 16 for more).
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};

namespace word {  // the machine type that moves so many bytes
template <int bytes>
struct Of {
  using type = uint4;
};
template <>
struct Of<8> {
  using type = uint2;
};
template <>
struct Of<4> {
  using type = unsigned;
};
template <>
struct Of<2> {
  using type = unsigned short;
};
}  // namespace word

// What the caches should expect of data that is read: nothing in particular, nobody reads it again, or the kernel never
// writes it, so that its loads may move past stores.
enum class Hint { kNone, kOnce, kConstant };

template <class T, int N, Hint hint = Hint::kNone>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  using Word = typename word::Of<sizeof(Pack<T, N>)>::type;
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < int(sizeof pack / sizeof(Word)); ++i) {
    const Word* at = reinterpret_cast<const Word*>(from) + i;
    reinterpret_cast<Word*>(&pack)[i] = hint == Hint::kOnce ? __ldcs(at) : hint == Hint::kConstant ? __ldg(at) : *at;
  }
  return pack;
}

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  using Word = typename word::Of<sizeof(Pack<T, N>)>::type;
#pragma unroll
  for (int i = 0; i < int(sizeof pack / sizeof(Word)); ++i)
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(&pack)[i];
}

// The first `count` elements, zero past them: in one piece if there are N and addresses are aligned (`vector`).
template <class T, int N, Hint hint = Hint::kNone>
__device__ __forceinline__ Pack<T, N> load(const T* from, int64_t count, bool vector) {
  if (vector && count >= N) return load<T, N, hint>(from);
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = i < count ? from[i] : narrow<T>(0.f);
  return pack;
}

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack, int64_t count, bool vector) {
  if (vector && count >= N) return store(to, pack);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < count) to[i] = pack.at[i];
}

// A tensor that is read as fp32 and never written: of the kernel's own type, or, if wide, of fp32.
struct Values {
  const void* data;
  bool wide;
};

template <class T, int N>
__device__ __forceinline__ void read(const Values& values, int64_t at, int64_t count, bool vector, float (&into)[N]) {
  if (values.wide) {
    const auto pack = load<float, N, Hint::kConstant>(static_cast<const float*>(values.data) + at, count, vector);
#pragma unroll
    for (int i = 0; i < N; ++i) into[i] = pack.at[i];
  } else {
    const auto pack = load<T, N, Hint::kConstant>(static_cast<const T*>(values.data) + at, count, vector);
#pragma unroll
    for (int i = 0; i < N; ++i) into[i] = widen(pack.at[i]);
  }
}

// Whether every address is a multiple of 16, as null is.
template <class... Pointers>
bool aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace merak
