#include "tensor.h"

namespace merak {
namespace {

// The rows of a tensor [..., width]: `inner` of them side by side, such as the heads of a token in a wider product, and
// `outer` elements from the first of these to the first of the next; those of a copy where they do not lie so.
struct Rows {
  Tensor tensor;
  int64_t inner = 1, outer;

  explicit Rows(const Tensor& from) : tensor(from), outer(from.size(-1)) {
    if (from.is_contiguous()) return;
    const int64_t width = from.size(-1);
    int64_t d = from.dim() - 2, behind = -1;  // what the dimension behind spans
    bool even = width < 2 || from.stride(-1) == 1;
    for (; d >= 0 && (from.size(d) == 1 || from.stride(d) == inner * width); --d) inner *= from.size(d);
    for (; d >= 0; --d) {
      if (from.size(d) == 1) continue;
      if (behind < 0)
        outer = from.stride(d);
      else
        even = even && from.stride(d) == behind;
      behind = from.stride(d) * from.size(d);
    }
    if (even) return;
    tensor = dense(from);
    inner = 1, outer = width;
  }
};

struct Normed {
  Tensor y, sum, mean, rstd;
};

Normed norm(const char* op, const Tensor& input, const std::optional<Tensor>& residual, const Tensor& scale,
            const std::optional<Tensor>& shift, double eps) {
  const On on(input);
  const Rows from(input);
  const Tensor x = from.tensor, weight = shift ? operand(scale, x, *shift) : operand(scale, x);
  const std::optional<Tensor> other = dense(residual),
                              bias = shift ? std::optional<Tensor>(operand(*shift, x, scale)) : std::nullopt;
  if (other) expect_same(x, *other, op);
  const bool centred = bias.has_value();
  Tensor y = torch::stable::new_empty(x, x.sizes()), sum = other ? torch::stable::new_empty(x, x.sizes()) : x;
  Tensor rstd = torch::stable::new_empty(x, leading(x), ScalarType::Float);
  Tensor mean = centred ? torch::stable::empty_like(rstd) : rstd;
  check(merak_norm(type_of(x), read(x), from.inner, from.outer, read(other), read(weight), read(bias), type_of(weight),
                   write(y), other ? write(sum) : nullptr, centred ? write<float>(mean) : nullptr, write<float>(rstd),
                   rows_of(x), x.size(-1), eps, on.stream),
        op);
  return {y, sum, mean, rstd};
}

struct Gradients {
  Tensor x, weight, bias;
};

Gradients norm_backward(const char* op, const Tensor& upstream, const std::optional<Tensor>& upstream_sum,
                        const Tensor& input, const Tensor& scale, const std::optional<Tensor>& means,
                        const Tensor& reciprocals) {
  const On on(input);
  const Rows from(input);
  const Tensor grad = dense(upstream), x = from.tensor, weight = operand(scale, x), rstd = dense(reciprocals);
  const std::optional<Tensor> grad_sum = dense(upstream_sum), mean = dense(means);
  expect_same(x, grad, op);
  if (grad_sum) expect_same(x, *grad_sum, op);
  const int64_t rows = rows_of(x), width = x.size(-1), sums = mean ? 2 : 1;
  Tensor parts = torch::stable::new_empty(x, {sums, merak_norm_parts(type_of(x), rows, width), width}, ScalarType::Float);
  Tensor grad_x = torch::stable::new_empty(x, x.sizes()), grad_weight = torch::stable::empty_like(weight);
  Tensor grad_bias = mean ? torch::stable::empty_like(weight) : grad_weight;
  check(merak_norm_backward(type_of(x), read(grad), read(grad_sum), read(x), from.inner, from.outer, read(weight),
                            type_of(weight), static_cast<const float*>(read(mean)),
                            static_cast<const float*>(read(rstd)), write(grad_x), write<float>(parts),
                            write(grad_weight), mean ? write(grad_bias) : nullptr, rows, width, on.stream),
        op);
  return {grad_x, as_type(grad_weight, scale.scalar_type()), as_type(grad_bias, scale.scalar_type())};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Normed found = norm("rms_norm", x, std::nullopt, weight, std::nullopt, eps);
  return {found.y, found.rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                             const Tensor& rstd) {
  const Gradients found = norm_backward("rms_norm_backward", grad, std::nullopt, x, weight, std::nullopt, rstd);
  return {found.x, found.weight};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Normed found = norm("layer_norm", x, std::nullopt, weight, bias, eps);
  return {found.y, found.mean, found.rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                       const Tensor& mean, const Tensor& rstd) {
  const Gradients found = norm_backward("layer_norm_backward", grad, std::nullopt, x, weight, mean, rstd);
  return {found.x, found.weight, found.bias};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                double eps) {
  const Normed found = norm("add_rms_norm", x, residual, weight, std::nullopt, eps);
  return {found.y, found.sum, found.rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum,
                                                 const Tensor& sum, const Tensor& weight, const Tensor& rstd) {
  const Gradients found = norm_backward("add_rms_norm_backward", grad, grad_sum, sum, weight, std::nullopt, rstd);
  return {found.x, found.weight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                          const Tensor& bias, double eps) {
  const Normed found = norm("add_layer_norm", x, residual, weight, bias, eps);
  return {found.y, found.sum, found.mean, found.rstd};
}

std::tuple<Tensor, Tensor, Tensor> add_layer_norm_backward(const Tensor& grad, const std::optional<Tensor>& grad_sum,
                                                           const Tensor& sum, const Tensor& weight, const Tensor& mean,
                                                           const Tensor& rstd) {
  const Gradients found = norm_backward("add_layer_norm_backward", grad, grad_sum, sum, weight, mean, rstd);
  return {found.x, found.weight, found.bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CUDA, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
  library.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  library.impl("add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
}

}  // namespace merak
