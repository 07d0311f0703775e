// RMSNorm (Zhang and Sennrich, 2019): y = x r w with r = (mean(x^2) + eps)^-1/2, statistics in float32.
#include "tensor.h"

#include <cmath>

namespace merak {
namespace {

template <class T>
float sum_of_squares(const T* x, int64_t width) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) {
    const float value = widen(x[i]);
    sum += value * value;
  }
  return sum;
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, const Tensor& scale, double eps) {
  const Tensor x = dense(input), weight = as_float(scale);
  const int64_t width = x.size(-1), rows = rows_of(x);
  Tensor y = torch::stable::empty_like(x), rstd = torch::stable::new_empty(x, leading(x), ScalarType::Float);
  by_type(x, "rms_norm", [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = read<T>(x);
    const float* w = read<float>(weight);
    T* to = write<T>(y);
    float* reciprocal = write<float>(rstd);
    over_rows(rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = from + row * width;
        T* out = to + row * width;
        const float r = 1.f / std::sqrt(sum_of_squares(in, width) / width + float(eps));
        reciprocal[row] = r;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) out[i] = narrow<T>(widen(in[i]) * r * w[i]);
      }
    });
  });
  return {y, rstd};
}

// With n = x r, g = grad w: grad_x = r (g - n mean(g n)), grad_w = sum over rows of grad n.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& upstream, const Tensor& input, const Tensor& scale,
                                             const Tensor& reciprocals) {
  const Tensor grad = dense(upstream), x = dense(input), weight = as_float(scale), rstd = dense(reciprocals);
  const int64_t width = x.size(-1), rows = rows_of(x);
  Tensor grad_x = torch::stable::empty_like(x), grad_weight = weight;
  by_type(x, "rms_norm_backward", [&](auto type) {
    using T = typename decltype(type)::type;
    const T *g = read<T>(grad), *from = read<T>(x);
    const float *w = read<float>(weight), *reciprocal = read<float>(rstd);
    T* to = write<T>(grad_x);
    grad_weight = sum_over_rows(x, rows, width, [&](int64_t begin, int64_t end, float* sums) {
      for (int64_t row = begin; row < end; ++row) {
        const T *in = from + row * width, *up = g + row * width;
        T* out = to + row * width;
        const float r = reciprocal[row];
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < width; ++i) {
          const float product = widen(up[i]) * widen(in[i]) * r;
          sums[i] += product;
          dot += product * w[i];
        }
        const float mean = dot / width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) out[i] = narrow<T>(r * (widen(up[i]) * w[i] - widen(in[i]) * r * mean));
      }
    });
  });
  return {grad_x, as_type(grad_weight, scale.scalar_type())};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace merak
