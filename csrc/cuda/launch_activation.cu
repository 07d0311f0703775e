#include "launch.h"

#include "kernels/activation.cuh"

namespace {

using namespace merak;

template <int value>
struct Kind {
  static constexpr int kind = value;
};

template <class Work>
int by_kind(int kind, const Work& work) {
  switch (kind) {
    case MERAK_SILU:
      return work(Kind<activation::kSilu>());
    case MERAK_GELU:
      return work(Kind<activation::kGelu>());
    case MERAK_GELU_TANH:
      return work(Kind<activation::kGeluTanh>());
    default:
      return kInvalidValue;
  }
}

// Rows that lie end to end are one: then only its end is not a whole pack.
Columns over(int64_t rows, int64_t width, bool joined) {
  return joined ? Columns{1, rows * width, false} : Columns{rows, width, false};
}

template <class T, class... Strides>
bool vector(const Columns& over, bool aligned, Strides... strides) {
  return aligned && (over.rows == 1 || (over.width % kPack<T> == 0 && ((strides % kPack<T> == 0) && ...)));
}

}  // namespace

extern "C" {

int merak_gated(int type, int activation, const void* gate, const void* up, void* y, int64_t rows, int64_t width,
                int64_t gate_stride, int64_t up_stride, void* stream) {
  if (rows == 0 || width == 0) return 0;
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    activation::Gated<T> a{};
    a.gate = static_cast<const T*>(gate);
    a.up = static_cast<const T*>(up);
    a.y = static_cast<T*>(y);
    a.gate_stride = gate_stride;
    a.up_stride = up_stride;
    a.over = over(rows, width, gate_stride == width && up_stride == width);
    a.over.vector = vector<T>(a.over, aligned(gate, up, y), gate_stride, up_stride);
    return by_kind(activation, [&](auto chosen) {
      const Shape shape = shape_of<T>(a.over.rows, a.over.width, false);
      return launch(activation::gated<T, decltype(chosen)::kind>, shape.grid, shape.block, 0, stream, a);
    });
  });
}

int merak_gated_backward(int type, int activation, const void* grad, const void* gate, const void* up, void* grad_gate,
                         void* grad_up, int64_t rows, int64_t width, int64_t gate_stride, int64_t up_stride,
                         int64_t grad_gate_stride, int64_t grad_up_stride, void* stream) {
  if (rows == 0 || width == 0) return 0;
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    activation::Gated<T> a{};
    a.grad = static_cast<const T*>(grad);
    a.gate = static_cast<const T*>(gate);
    a.up = static_cast<const T*>(up);
    a.grad_gate = static_cast<T*>(grad_gate);
    a.grad_up = static_cast<T*>(grad_up);
    a.gate_stride = gate_stride;
    a.up_stride = up_stride;
    a.grad_gate_stride = grad_gate_stride;
    a.grad_up_stride = grad_up_stride;
    const bool joined = gate_stride == width && up_stride == width && grad_gate_stride == width && grad_up_stride == width;
    a.over = over(rows, width, joined);
    a.over.vector = vector<T>(a.over, aligned(grad, gate, up, grad_gate, grad_up), gate_stride, up_stride,
                              grad_gate_stride, grad_up_stride);
    return by_kind(activation, [&](auto chosen) {
      const Shape shape = shape_of<T>(a.over.rows, a.over.width, false);
      return launch(activation::gated_backward<T, decltype(chosen)::kind>, shape.grid, shape.block, 0, stream, a);
    });
  });
}

int merak_bias_activation(int type, int activation, const void* x, const void* bias, int bias_type, void* y,
                          int64_t rows, int64_t width, void* stream) {
  if (bias && bias_type != type && bias_type != MERAK_FLOAT) return kInvalidValue;
  if (rows == 0 || width == 0) return 0;
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    activation::Biased<T> a{};
    a.x = static_cast<const T*>(x);
    a.bias = {bias, bias_type == MERAK_FLOAT};
    a.y = static_cast<T*>(y);
    a.over = over(rows, width, !bias);
    a.over.vector = vector<T>(a.over, aligned(x, bias, y));
    return by_kind(activation, [&](auto chosen) {
      const Shape shape = shape_of<T>(a.over.rows, a.over.width, false);
      return launch(activation::biased<T, decltype(chosen)::kind>, shape.grid, shape.block, 0, stream, a);
    });
  });
}

int64_t merak_bias_parts(int type, int64_t rows, int64_t width) { return groups_of(type, rows, width); }

int merak_bias_activation_backward(int type, int activation, const void* grad, const void* x, const void* bias,
                                   int bias_type, void* grad_x, float* parts, void* grad_bias, int64_t rows,
                                   int64_t width, void* stream) {
  if (bias && bias_type != type && bias_type != MERAK_FLOAT) return kInvalidValue;
  if (width == 0 || (rows == 0 && !bias)) return 0;
  const int status = rows == 0 ? 0 : by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    activation::Biased<T> a{};
    a.grad = static_cast<const T*>(grad);
    a.x = static_cast<const T*>(x);
    a.bias = {bias, bias_type == MERAK_FLOAT};
    a.y = static_cast<T*>(grad_x);
    a.parts = bias ? parts : nullptr;
    a.over = over(rows, width, !bias);
    a.over.vector = vector<T>(a.over, aligned(grad, x, bias, grad_x, a.parts));
    return by_kind(activation, [&](auto chosen) {
      const Shape shape = shape_of<T>(a.over.rows, a.over.width, bias != nullptr);
      return launch(activation::biased_backward<T, decltype(chosen)::kind>, shape.grid, shape.block, 0, stream, a);
    });
  });
  if (status || !bias) return status;
  return by_type(bias_type, [&](auto of) {
    using B = typename decltype(of)::type;
    return launch_sum_columns<B>(parts, grad_bias, nullptr, groups_of(type, rows, width), width, stream);
  });
}

}  // extern "C"
