#include "tensor.h"

namespace merak {
namespace {

int kind_of(const std::string& activation) {
  if (activation == "silu") return MERAK_SILU;
  if (activation == "gelu") return MERAK_GELU;
  STD_TORCH_CHECK(activation == "gelu_tanh", "merak: activation silu, gelu or gelu_tanh expected, not ", activation);
  return MERAK_GELU_TANH;
}

// A matrix of rows with one distance between them, features side by side.
struct Rows {
  Tensor tensor;
  int64_t stride;

  const char* at(int64_t column) const {
    const int64_t bytes = tensor.scalar_type() == ScalarType::Float ? 4 : 2;
    return static_cast<const char*>(read(tensor)) + column * bytes;
  }
};

// The distance from row to row, 0 where there is none for all of them.
int64_t stride_of(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1, width = tensor.size(last);
  if (width > 1 && tensor.stride(last) != 1) return 0;
  int64_t stride = width, next = 0;
  bool first = true;
  for (int64_t d = last - 1; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    if (first) stride = tensor.stride(d);
    if (stride < width || (!first && tensor.stride(d) != next)) return 0;
    next = tensor.stride(d) * tensor.size(d);
    first = false;
  }
  return stride;
}

Rows rows(const Tensor& tensor) {
  const int64_t stride = stride_of(tensor);
  return stride > 0 ? Rows{tensor, stride} : Rows{dense(tensor), tensor.size(-1)};
}

// The sizes of a tensor, but for the last one.
std::vector<int64_t> with_last(const Tensor& tensor, int64_t width) {
  std::vector<int64_t> sizes = leading(tensor);
  sizes.push_back(width);
  return sizes;
}

Tensor gated(const Tensor& gate, const Tensor& up, std::string activation) {
  const On on(gate);
  expect_same(gate, up, "gated");
  const Rows a = rows(gate), b = rows(up);
  Tensor y = torch::stable::new_empty(gate, gate.sizes());
  check(merak_gated(type_of(y), kind_of(activation), a.at(0), b.at(0), write(y), rows_of(y), y.size(-1), a.stride,
                    b.stride, on.stream),
        "gated");
  return y;
}

std::tuple<Tensor, Tensor> gated_backward(const Tensor& upstream, const Tensor& gate, const Tensor& up,
                                          std::string activation) {
  const On on(gate);
  const Tensor grad = dense(upstream);
  expect_same(gate, up, "gated_backward");
  expect_same(gate, grad, "gated_backward");
  const Rows a = rows(gate), b = rows(up);
  const int64_t width = grad.size(-1);
  Tensor grad_gate = torch::stable::empty_like(grad), grad_up = torch::stable::empty_like(grad);
  check(merak_gated_backward(type_of(grad), kind_of(activation), read(grad), a.at(0), b.at(0), write(grad_gate),
                             write(grad_up), rows_of(grad), width, a.stride, b.stride, width, width, on.stream),
        "gated_backward");
  return {grad_gate, grad_up};
}

Tensor gated_merged(const Tensor& gate_up, std::string activation) {
  const On on(gate_up);
  const int64_t width = gate_up.size(-1) / 2;
  const Rows both = rows(gate_up);
  Tensor y = torch::stable::new_empty(gate_up, with_last(gate_up, width));
  check(merak_gated(type_of(y), kind_of(activation), both.at(0), both.at(width), write(y), rows_of(y), width,
                    both.stride, both.stride, on.stream),
        "gated_merged");
  return y;
}

Tensor gated_merged_backward(const Tensor& upstream, const Tensor& gate_up, std::string activation) {
  const On on(gate_up);
  const Tensor grad = dense(upstream);
  const int64_t width = grad.size(-1);
  const Rows both = rows(gate_up);
  STD_TORCH_CHECK(gate_up.numel() == 2 * grad.numel() && gate_up.scalar_type() == grad.scalar_type(),
                  "merak::gated_merged_backward: grad [..., f] and gate_up [..., 2f] of one type expected");
  const Rows into{torch::stable::new_empty(gate_up, gate_up.sizes()), 2 * width};
  check(merak_gated_backward(type_of(grad), kind_of(activation), read(grad), both.at(0), both.at(width),
                             const_cast<char*>(into.at(0)), const_cast<char*>(into.at(width)), rows_of(grad), width,
                             both.stride, both.stride, into.stride, into.stride, on.stream),
        "gated_merged_backward");
  return into.tensor;
}

Tensor bias_gelu(const Tensor& input, const std::optional<Tensor>& added, std::string activation) {
  const On on(input);
  const Tensor x = dense(input);
  const std::optional<Tensor> bias = added ? std::optional<Tensor>(operand(*added, x)) : std::nullopt;
  Tensor y = torch::stable::empty_like(x);
  check(merak_bias_activation(type_of(x), kind_of(activation), read(x), read(bias), type_of(bias ? *bias : x), write(y),
                              rows_of(x), x.size(-1), on.stream),
        "bias_gelu");
  return y;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& upstream, const Tensor& input,
                                              const std::optional<Tensor>& added, std::string activation) {
  const On on(input);
  const Tensor grad = dense(upstream), x = dense(input);
  expect_same(x, grad, "bias_gelu_backward");
  const std::optional<Tensor> bias = added ? std::optional<Tensor>(operand(*added, x)) : std::nullopt;
  const int64_t rows = rows_of(x), width = x.size(-1), groups = bias ? merak_bias_parts(type_of(x), rows, width) : 0;
  Tensor grad_x = torch::stable::empty_like(x);
  Tensor grad_bias = bias ? torch::stable::empty_like(*bias) : torch::stable::new_empty(x, {0});
  Tensor parts = torch::stable::new_empty(x, {groups, width}, ScalarType::Float);
  check(merak_bias_activation_backward(type_of(x), kind_of(activation), read(grad), read(x), read(bias),
                                       type_of(bias ? *bias : x), write(grad_x), write<float>(parts), write(grad_bias),
                                       rows, width, on.stream),
        "bias_gelu_backward");
  return {grad_x, added ? as_type(grad_bias, added->scalar_type()) : grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CUDA, library) {
  library.impl("gated", TORCH_BOX(&gated));
  library.impl("gated_backward", TORCH_BOX(&gated_backward));
  library.impl("gated_merged", TORCH_BOX(&gated_merged));
  library.impl("gated_merged_backward", TORCH_BOX(&gated_merged_backward));
  library.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  library.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace merak
