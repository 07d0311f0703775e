#include "tensor.h"

namespace merak {
namespace {

const int64_t* seed_of(const std::optional<Tensor>& seed) {
  STD_TORCH_CHECK(!seed || (seed->scalar_type() == ScalarType::Long && seed->numel() == 1),
                  "merak: seed int64 [1] expected");
  return static_cast<const int64_t*>(read(seed));
}

Tensor bias_dropout_add(const Tensor& input, const std::optional<Tensor>& added, const std::optional<Tensor>& kept,
                        double p, const std::optional<Tensor>& seed) {
  const On on(input);
  const Tensor x = dense(input);
  const std::optional<Tensor> residual = dense(kept),
                              bias = added ? std::optional<Tensor>(operand(*added, x)) : std::nullopt;
  if (residual) expect_same(x, *residual, "bias_dropout_add");
  Tensor y = torch::stable::empty_like(x);
  check(merak_bias_dropout_add(type_of(x), read(x), read(bias), type_of(bias ? *bias : x), read(residual), p,
                               seed_of(seed), write(y), rows_of(x), x.size(-1), on.stream),
        "bias_dropout_add");
  return y;
}

std::tuple<Tensor, Tensor> bias_dropout_add_backward(const Tensor& upstream, double p,
                                                     const std::optional<Tensor>& seed, bool bias) {
  const On on(upstream);
  const Tensor grad = dense(upstream);
  const int64_t rows = rows_of(grad), width = grad.size(-1);
  const int64_t groups = bias ? merak_residual_parts(type_of(grad), rows, width) : 0;
  Tensor grad_x = torch::stable::empty_like(grad);
  Tensor grad_bias = torch::stable::new_empty(grad, {bias ? width : 0});
  Tensor parts = torch::stable::new_empty(grad, {groups, width}, ScalarType::Float);
  check(merak_bias_dropout_add_backward(type_of(grad), read(grad), p, seed_of(seed), write(grad_x), write<float>(parts),
                                        bias ? write(grad_bias) : nullptr, rows, width, on.stream),
        "bias_dropout_add_backward");
  return {grad_x, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CUDA, library) {
  library.impl("bias_dropout_add", TORCH_BOX(&bias_dropout_add));
  library.impl("bias_dropout_add_backward", TORCH_BOX(&bias_dropout_add_backward));
}

}  // namespace merak
