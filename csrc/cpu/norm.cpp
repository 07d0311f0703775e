// RMSNorm (Zhang and Sennrich, 2019): y = n w, n = x r, r = (mean(x^2) + eps)^-1/2. LayerNorm (Ba et al., 2016):
// y = n w + b, n = (x - m) r, r = (mean((x - m)^2) + eps)^-1/2. Statistics in float32. Each also of x + residual, which
// is rounded to the type of x before it is normed.
#include "tensor.h"

#include <cmath>

namespace merak {
namespace {

using Maybe = std::optional<Tensor>;

struct Statistics {
  float mean, rstd;
};

template <bool kCentred, class T>
Statistics measure(const T* x, int64_t width, float eps) {
  const float mean = kCentred ? sum_of(width, [=](int64_t i) { return widen(x[i]); }) / width : 0.f;
  const float squares = sum_of(width, [=](int64_t i) {
    const float distance = widen(x[i]) - mean;
    return distance * distance;
  });
  return {mean, 1.f / std::sqrt(squares / width + eps)};
}

template <bool kCentred, class T>
void normalise(const T* x, const float* weight, const float* bias, Statistics row, T* y, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const float scaled = (widen(x[i]) - row.mean) * row.rstd * weight[i];
    y[i] = narrow<T>(kCentred ? scaled + bias[i] : scaled);
  }
}

struct Normed {
  Tensor y, sum, mean, rstd;
};

template <bool kCentred>
Normed forward(const char* op, const Tensor& input, const Tensor* residual, const Tensor& scale, const Tensor* shift,
               double eps) {
  const Rows x(input, true);
  const Tensor weight = as_float(scale), bias = kCentred ? as_float(*shift) : weight;
  const int64_t rows = x.count, width = x.width;
  check_count(weight, width, op);
  check_count(bias, width, op);
  if (residual) check_alike(input, *residual, op);
  const Rows other(residual ? *residual : input);
  Normed made{empty_as(input), residual ? empty_as(input) : input,
              kCentred ? torch::stable::new_empty(input, leading(input), ScalarType::Float) : input,
              torch::stable::new_empty(input, leading(input), ScalarType::Float)};
  by_type(input, op, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *from = x.data<T>(), *added = other.data<T>();
    const float *w = read<float>(weight), *b = read<float>(bias);
    T *y = write<T>(made.y), *sum = residual ? write<T>(made.sum) : nullptr;
    float *mean = kCentred ? write<float>(made.mean) : nullptr, *rstd = write<float>(made.rstd);
    over_rows(rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = from + x.at(row);
        fetch(from + x.at(row + 1), width);
        if (sum) {
          const T* more = added + row * other.stride;
          T* total = sum + row * width;
#pragma omp simd
          for (int64_t i = 0; i < width; ++i) total[i] = narrow<T>(widen(in[i]) + widen(more[i]));
          in = total;
        }
        const Statistics found = measure<kCentred>(in, width, float(eps));
        if (mean) mean[row] = found.mean;
        rstd[row] = found.rstd;
        normalise<kCentred>(in, w, b, found, y + row * width, width);
      }
    });
  });
  return made;
}

// What the gradient of a row is made of: its upstream gradient u, its values, another gradient to add or null, and where
// to write.
template <class T>
struct Row {
  const T *u, *x, *more;
  Statistics found;
  T* to;
};

// With g = u w: the gradient of x is r (g - mean(g) - n mean(g n)), for RMSNorm without mean(g), and `more` besides;
// of_weight += u n, and of_bias += u. Two rows at a time share the traffic of w and of_weight, and neither waits for the
// sums of the other.
template <bool kCentred, class T>
void backward_rows(const Row<T>& a, const Row<T>& b, const float* weight, float* of_weight, float* of_bias,
                   int64_t width) {
  const T *u = a.u, *v = b.u, *x = a.x, *y = b.x;
  const Statistics s = a.found, t = b.found;
  float along_a = 0, along_b = 0, total_a = 0, total_b = 0;
#pragma omp simd reduction(+ : along_a, along_b, total_a, total_b)
  for (int64_t i = 0; i < width; ++i) {
    const float grad_a = widen(u[i]), grad_b = widen(v[i]), w = weight[i];
    const float product_a = grad_a * ((widen(x[i]) - s.mean) * s.rstd);
    const float product_b = grad_b * ((widen(y[i]) - t.mean) * t.rstd);
    of_weight[i] += product_a + product_b;
    along_a += product_a * w;
    along_b += product_b * w;
    if constexpr (kCentred) {
      of_bias[i] += grad_a + grad_b;
      total_a += grad_a * w;
      total_b += grad_b * w;
    }
  }
  along_a *= s.rstd / width, along_b *= t.rstd / width;
  total_a /= width, total_b /= width;
  const auto one = [=](int64_t i, float w) {
    return s.rstd * (widen(u[i]) * w - total_a - (widen(x[i]) - s.mean) * along_a);
  };
  const auto other = [=](int64_t i, float w) {
    return t.rstd * (widen(v[i]) * w - total_b - (widen(y[i]) - t.mean) * along_b);
  };
  T *to = a.to, *into = b.to;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    to[i] = narrow<T>(one(i, weight[i]));
    into[i] = narrow<T>(other(i, weight[i]));
  }
  // Rounded before the other gradient is added, in a loop of its own so that no fma joins both: the same bits as where
  // norm and addition are apart.
  if (const T *extra = a.more, *further = b.more; extra) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      to[i] = narrow<T>(widen(to[i]) + widen(extra[i]));
      into[i] = narrow<T>(widen(into[i]) + widen(further[i]));
    }
  }
}

struct Gradients {
  Tensor x, weight, bias;
};

template <bool kCentred>
Gradients backward(const char* op, const Tensor& upstream, const Maybe& further, const Tensor& input,
                   const Tensor& scale, const Tensor* means, const Tensor& reciprocals) {
  check_alike(upstream, input, op);
  if (further) check_alike(*further, input, op);
  const Rows grad(upstream), x(input, true), more(further ? *further : upstream);
  const Tensor weight = as_float(scale), rstd = as_float(reciprocals), mean = kCentred ? as_float(*means) : rstd;
  const int64_t rows = x.count, width = x.width;
  check_count(weight, width, op);
  check_count(rstd, rows, op);
  check_count(mean, rows, op);
  Tensor grad_x = empty_as(input);
  std::vector<float> sums;
  by_type(input, op, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *from = x.data<T>(), *up = grad.data<T>(), *extra = further ? more.data<T>() : nullptr;
    const float *w = read<float>(weight), *m = read<float>(mean), *r = read<float>(rstd);
    T* to = write<T>(grad_x);
    const std::vector<T> zeros(width);
    const auto at = [&](int64_t row) {
      return Row<T>{up + row * grad.stride, from + x.at(row), extra ? extra + row * more.stride : nullptr,
                    {kCentred ? m[row] : 0.f, r[row]}, to + row * width};
    };
    sums = sum_over_rows(rows, kCentred ? 2 * width : width, [&](int64_t begin, int64_t end, float* sum) {
      for (int64_t row = begin; row + 1 < end; row += 2) {
        for (const int64_t next : {row + 2, row + 3}) {
          fetch(up + next * grad.stride, width);
          fetch(from + x.at(next), width);
        }
        backward_rows<kCentred>(at(row), at(row + 1), w, sum, sum + width, width);
      }
      if ((end - begin) % 2) {
        std::vector<T> nowhere(width);
        const Row<T> none{zeros.data(), zeros.data(), zeros.data(), {0.f, 0.f}, nowhere.data()};
        backward_rows<kCentred>(at(end - 1), none, w, sum, sum + width, width);
      }
    });
  });
  Tensor grad_weight = as_vector(input, scale.scalar_type(), sums.data(), width);
  return {grad_x, grad_weight,
          kCentred ? as_vector(input, scale.scalar_type(), sums.data() + width, width) : grad_weight};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Normed made = forward<false>("rms_norm", x, nullptr, weight, nullptr, eps);
  return {made.y, made.rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                             const Tensor& rstd) {
  Gradients found = backward<false>("rms_norm_backward", grad, {}, x, weight, nullptr, rstd);
  return {found.x, found.weight};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                double eps) {
  Normed made = forward<false>("add_rms_norm", x, &residual, weight, nullptr, eps);
  return {made.y, made.sum, made.rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const Maybe& grad_sum, const Tensor& sum,
                                                 const Tensor& weight, const Tensor& rstd) {
  Gradients found = backward<false>("add_rms_norm_backward", grad, grad_sum, sum, weight, nullptr, rstd);
  return {found.x, found.weight};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  Normed made = forward<true>("layer_norm", x, nullptr, weight, &bias, eps);
  return {made.y, made.mean, made.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                       const Tensor& mean, const Tensor& rstd) {
  Gradients found = backward<true>("layer_norm_backward", grad, {}, x, weight, &mean, rstd);
  return {found.x, found.weight, found.bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                          const Tensor& weight, const Tensor& bias, double eps) {
  Normed made = forward<true>("add_layer_norm", x, &residual, weight, &bias, eps);
  return {made.y, made.sum, made.mean, made.rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_backward(const Tensor& grad, const Maybe& grad_sum,
                                                           const Tensor& sum, const Tensor& weight, const Tensor& mean,
                                                           const Tensor& rstd) {
  Gradients found = backward<true>("add_layer_norm_backward", grad, grad_sum, sum, weight, &mean, rstd);
  return {found.x, found.weight, found.bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  library.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  library.impl("add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
}

}  // namespace merak
