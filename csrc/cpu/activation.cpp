// Activations of the feed-forward block, alone behind a bias, and as gates (Shazeer, 2020). Arithmetic in float32.
#include "tensor.h"

namespace merak {
namespace {

struct Point {
  float value, slope;
};

struct Silu {  // x s(x), s the logistic function; beyond 87 the curve is its asymptotes
  static Point at(float x) {
    const float y = clamp(x, -87.f, 87.f);
    const Logistic s = logistic(y);
    return {std::max(x, y) * s.value, s.value + y * s.value * s.rest};
  }
};

struct Gelu {  // x times the part of the normal distribution below x
  static Point at(float x) {
    const Normal part = normal(x);
    return {x * part.below, part.below + x * part.density};
  }
};

struct GeluTanh {  // the same by (1 + tanh z) / 2 = s(2 z), z a cubic; beyond 9.9 the curve is its asymptotes
  static Point at(float x) {
    const float root = 1.59576912f, cubic = 0.044715f, y = clamp(x, -9.9f, 9.9f), square = y * y;
    const Logistic s = logistic(root * y * (1.f + cubic * square));
    return {std::max(x, y) * s.value, s.value + y * s.value * s.rest * (root * (1.f + 3.f * cubic * square))};
  }
};

// Calls work(Activation()) for a name.
template <class Work>
void by_name(const std::string& name, const Work& work) {
  if (name == "silu") return work(Silu());
  if (name == "gelu") return work(Gelu());
  if (name == "gelu_tanh") return work(GeluTanh());
  STD_TORCH_CHECK(false, "merak: activation silu, gelu or gelu_tanh expected, not ", name);
}

template <class Work>
void by_type_and_name(const Tensor& tensor, const char* op, const std::string& name, const Work& work) {
  by_type(tensor, op, [&](auto type) { by_name(name, [&](auto activation) { work(type, activation); }); });
}

template <class A, class T>
void gate_row(const T* gate, const T* up, T* to, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) to[i] = narrow<T>(A::at(widen(gate[i])).value * widen(up[i]));
}

template <class A, class T>
void gate_backward_row(const T* grad, const T* gate, const T* up, T* to_gate, T* to_up, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    const Point point = A::at(widen(gate[i]));
    const float g = widen(grad[i]);
    to_gate[i] = narrow<T>(g * widen(up[i]) * point.slope);
    to_up[i] = narrow<T>(g * point.value);
  }
}

Tensor gated(const Tensor& gates, const Tensor& ups, std::string name) {
  check_alike(gates, ups, "gated");
  const Rows gate(gates), up(ups);
  Tensor made = empty_as(gates);
  by_type_and_name(gates, "gated", name, [&](auto type, auto activation) {
    using T = typename decltype(type)::type;
    const T *a = gate.data<T>(), *b = up.data<T>();
    T* to = write<T>(made);
    over_rows(gate.count, gate.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        gate_row<decltype(activation)>(a + row * gate.stride, b + row * up.stride, to + row * gate.width, gate.width);
    });
  });
  return made;
}

std::tuple<Tensor, Tensor> gated_backward(const Tensor& upstream, const Tensor& gates, const Tensor& ups,
                                          std::string name) {
  check_alike(upstream, gates, "gated_backward");
  check_alike(ups, gates, "gated_backward");
  const Rows grad(upstream), gate(gates), up(ups);
  const int64_t width = gate.width;
  Tensor grad_gate = empty_as(gates), grad_up = empty_as(gates);
  by_type_and_name(gates, "gated_backward", name, [&](auto type, auto activation) {
    using T = typename decltype(type)::type;
    const T *g = grad.data<T>(), *a = gate.data<T>(), *b = up.data<T>();
    T *to_gate = write<T>(grad_gate), *to_up = write<T>(grad_up);
    over_rows(gate.count, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        gate_backward_row<decltype(activation)>(g + row * grad.stride, a + row * gate.stride, b + row * up.stride,
                                                to_gate + row * width, to_up + row * width, width);
    });
  });
  return {grad_gate, grad_up};
}

Tensor gated_merged(const Tensor& gate_up, std::string name) {
  const Rows both(gate_up);
  STD_TORCH_CHECK(both.width % 2 == 0, "merak::gated_merged: an even last dimension expected");
  std::vector<int64_t> shape = leading(gate_up);
  const int64_t width = both.width / 2;
  shape.push_back(width);
  Tensor made = torch::stable::new_empty(gate_up, shape);
  by_type_and_name(gate_up, "gated_merged", name, [&](auto type, auto activation) {
    using T = typename decltype(type)::type;
    const T* from = both.data<T>();
    T* to = write<T>(made);
    over_rows(both.count, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = from + row * both.stride;
        fetch(gate + both.stride, 2 * width);
        gate_row<decltype(activation)>(gate, gate + width, to + row * width, width);
      }
    });
  });
  return made;
}

Tensor gated_merged_backward(const Tensor& upstream, const Tensor& gate_up, std::string name) {
  const Rows grad(upstream), both(gate_up);
  const int64_t width = both.width / 2;
  STD_TORCH_CHECK(upstream.scalar_type() == gate_up.scalar_type() && grad.width == width && both.width == 2 * width,
                  "merak::gated_merged_backward: grad [..., f] and gate_up [..., 2f] of one element type expected");
  check_count(upstream, both.count * width, "gated_merged_backward");
  Tensor made = empty_as(gate_up);
  by_type_and_name(gate_up, "gated_merged_backward", name, [&](auto type, auto activation) {
    using T = typename decltype(type)::type;
    const T *g = grad.data<T>(), *from = both.data<T>();
    T* to = write<T>(made);
    over_rows(both.count, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = from + row * both.stride;
        fetch(gate + both.stride, 2 * width);
        fetch(g + (row + 1) * grad.stride, width);
        T* out = to + row * 2 * width;
        gate_backward_row<decltype(activation)>(g + row * grad.stride, gate, gate + width, out, out + width, width);
      }
    });
  });
  return made;
}

// A bias as float32, zeros where there is none.
std::vector<float> bias_or_zeros(const std::optional<Tensor>& bias, int64_t width, const char* op) {
  if (!bias) return std::vector<float>(width);
  check_count(*bias, width, op);
  const Tensor wide = as_float(*bias);
  return {read<float>(wide), read<float>(wide) + width};
}

Tensor bias_gelu(const Tensor& input, std::optional<Tensor> bias, std::string name) {
  const Rows x(input);
  const std::vector<float> added = bias_or_zeros(bias, x.width, "bias_gelu");
  Tensor made = empty_as(input);
  by_type_and_name(input, "bias_gelu", name, [&](auto type, auto activation) {
    using T = typename decltype(type)::type;
    const T* from = x.data<T>();
    const float* b = added.data();
    T* to = write<T>(made);
    over_rows(x.count, x.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = from + row * x.stride;
        T* out = to + row * x.width;
#pragma omp simd
        for (int64_t i = 0; i < x.width; ++i) out[i] = narrow<T>(decltype(activation)::at(widen(in[i]) + b[i]).value);
      }
    });
  });
  return made;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& upstream, const Tensor& input, std::optional<Tensor> bias,
                                              std::string name) {
  check_alike(upstream, input, "bias_gelu_backward");
  const Rows grad(upstream), x(input);
  const int64_t width = x.width;
  const std::vector<float> added = bias_or_zeros(bias, width, "bias_gelu_backward");
  Tensor grad_x = empty_as(input);
  std::vector<float> total;
  by_type_and_name(input, "bias_gelu_backward", name, [&](auto type, auto activation) {
    using T = typename decltype(type)::type;
    const T *g = grad.data<T>(), *from = x.data<T>();
    const float* b = added.data();
    T* to = write<T>(grad_x);
    total = sum_over_rows(x.count, width, [&](int64_t begin, int64_t end, float* sums) {
      for (int64_t row = begin; row < end; ++row) {
        const T *up = g + row * grad.stride, *in = from + row * x.stride;
        T* out = to + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
          const float value = widen(up[i]) * decltype(activation)::at(widen(in[i]) + b[i]).slope;
          out[i] = narrow<T>(value);
          sums[i] += value;
        }
      }
    });
  });
  if (!bias) return {grad_x, torch::stable::new_empty(input, std::vector<int64_t>{0})};
  return {grad_x, as_vector(input, bias->scalar_type(), total.data(), width)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CPU, library) {
  library.impl("gated", TORCH_BOX(&gated));
  library.impl("gated_backward", TORCH_BOX(&gated_backward));
  library.impl("gated_merged", TORCH_BOX(&gated_merged));
  library.impl("gated_merged_backward", TORCH_BOX(&gated_merged_backward));
  library.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  library.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace merak
