// What follows a row-parallel linear: residual + dropout(x + bias). The mask is a function of a seed and an element's
// place alone, so it is computed again in the backward instead of being kept, on any number of threads and any device.
#include "tensor.h"

#include <cmath>
#include <cstring>

namespace merak {
namespace {

constexpr int64_t kTile = 256;

// The output function of SplitMix64 (Steele, Lea and Flood, 2014).
inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

struct Mask {
  uint64_t seed = 0;
  uint32_t bound = 0;  // an element whose random bits are below it is dropped
  float scale = 1;     // of those that are kept

  Mask(double p, const std::optional<Tensor>& with, const char* op) {
    STD_TORCH_CHECK(p >= 0 && p <= 1, "merak::", op, ": a probability expected, not ", p);
    STD_TORCH_CHECK(p == 0 || with, "merak::", op, ": a seed expected");
    if (p == 0) return;
    STD_TORCH_CHECK(with->scalar_type() == ScalarType::Long && with->numel() == 1, "merak::", op,
                    ": a seed of one int64 expected");
    seed = uint64_t(*static_cast<const int64_t*>(with->const_data_ptr()));
    bound = uint32_t(std::min(std::ceil(p * 4294967296.0), 4294967295.0));
    scale = p < 1 ? float(1 / (1 - p)) : 0.f;
  }

  // The factors of elements first .. first + count, count <= kTile. An element takes the lower or the upper half of the
  // 64 bits that it shares with its neighbour.
  void factors(int64_t first, int64_t count, float* to) const {
    uint64_t words[kTile / 2 + 1];
    uint32_t halves[kTile + 2];
    const uint64_t start = uint64_t(first / 2);
    const int64_t odd = first % 2, pairs = (odd + count + 1) / 2;
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) words[i] = mix(seed + (start + uint64_t(i)) * 0x9e3779b97f4a7c15u);
    std::memcpy(halves, words, pairs * sizeof *words);  // little-endian: the lower half first
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = halves[i + odd] >= bound ? scale : 0.f;
  }
};

// work(row, start, count, factors) for tiles of the rows begin .. end; factors are null without dropout.
template <class Work>
void over_tiles(const Mask& mask, int64_t begin, int64_t end, int64_t width, const Work& work) {
  float factors[kTile];
  for (int64_t row = begin; row < end; ++row)
    for (int64_t start = 0; start < width; start += kTile) {
      const int64_t count = std::min(kTile, width - start);
      if (mask.bound) mask.factors(row * width + start, count, factors);
      work(row, start, count, mask.bound ? factors : nullptr);
    }
}

// to = more + f (x + bias); what is dropped is 0 whatever it was.
template <class T, class Factor>
void combine(const T* x, const float* bias, const T* more, T* to, int64_t count, const Factor& factor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float f = factor(i), value = f * (widen(x[i]) + bias[i]);
    to[i] = narrow<T>(widen(more[i]) + (f != 0.f ? value : 0.f));
  }
}

Tensor bias_dropout_add(const Tensor& input, std::optional<Tensor> bias, std::optional<Tensor> residual, double p,
                        std::optional<Tensor> seed) {
  const char* op = "bias_dropout_add";
  const Mask mask(p, seed, op);
  if (residual) check_alike(*residual, input, op);
  const Rows x(input), added(residual ? *residual : input);
  const int64_t width = x.width;
  if (bias) check_count(*bias, width, op);
  const Tensor wide = bias ? as_float(*bias) : input;
  const std::vector<float> zeros(width);  // in the place of what is absent; as T they are zeros as well
  Tensor made = empty_as(input);
  by_type(input, op, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = x.data<T>();
    const T* others = residual ? added.data<T>() : reinterpret_cast<const T*>(zeros.data());
    const int64_t stride = residual ? added.stride : 0;
    const float* b = bias ? read<float>(wide) : zeros.data();
    T* to = write<T>(made);
    over_rows(x.count, width, [&](int64_t begin, int64_t end) {
      over_tiles(mask, begin, end, width, [&](int64_t row, int64_t start, int64_t count, const float* factors) {
        const T *in = from + row * x.stride + start, *more = others + row * stride + start;
        T* out = to + row * width + start;
        if (factors)
          combine(in, b + start, more, out, count, [=](int64_t i) { return factors[i]; });
        else
          combine(in, b + start, more, out, count, [](int64_t) { return 1.f; });
      });
    });
  });
  return made;
}

std::tuple<Tensor, Tensor> bias_dropout_add_backward(const Tensor& upstream, double p, std::optional<Tensor> seed,
                                                     bool bias) {
  const Mask mask(p, seed, "bias_dropout_add_backward");
  const Rows grad(upstream);
  const int64_t width = grad.width;
  Tensor made = empty_as(upstream);
  std::vector<float> total;
  by_type(upstream, "bias_dropout_add_backward", [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = grad.data<T>();
    T* to = write<T>(made);
    total = sum_over_rows(grad.count, width, [&](int64_t begin, int64_t end, float* sums) {
      over_tiles(mask, begin, end, width, [&](int64_t row, int64_t start, int64_t count, const float* factors) {
        const T* in = from + row * grad.stride + start;
        T* out = to + row * width + start;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
          const float f = factors ? factors[i] : 1.f, value = f != 0.f ? f * widen(in[i]) : 0.f;
          out[i] = narrow<T>(value);
          sums[start + i] += value;
        }
      });
    });
  });
  if (!bias) return {made, torch::stable::new_empty(upstream, std::vector<int64_t>{0})};
  return {made, as_vector(upstream, upstream.scalar_type(), total.data(), width)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CPU, library) {
  library.impl("bias_dropout_add", TORCH_BOX(&bias_dropout_add));
  library.impl("bias_dropout_add_backward", TORCH_BOX(&bias_dropout_add_backward));
}

}  // namespace merak
