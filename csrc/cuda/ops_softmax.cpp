// Softmax over keys behind a mask.
#include "tensor.h"

namespace merak {
namespace {

Tensor masked_softmax(const Tensor& given, const std::optional<Tensor>& given_mask, double scale, bool causal) {
  STD_TORCH_CHECK(given.dim() == 4, "merak::masked_softmax: scores [b, n, s, t] expected");
  const On on(given);
  const Tensor scores = dense(given);
  std::optional<Tensor> mask = given_mask;
  int64_t strides[3] = {0, 0, 0};
  if (mask) {
    STD_TORCH_CHECK(mask->scalar_type() == ScalarType::Bool && mask->dim() == 4 && mask->size(3) == scores.size(3),
                    "merak::masked_softmax: a bool mask [1 or b, 1 or n, 1 or s, t] expected");
    if (mask->stride(3) != 1 && mask->size(3) > 1) mask = dense(mask);
    for (int d = 0; d < 3; ++d) {
      STD_TORCH_CHECK(mask->size(d) == 1 || mask->size(d) == scores.size(d),
                      "merak::masked_softmax: the mask's extents are not those of the scores, nor 1");
      strides[d] = mask->size(d) == 1 ? 0 : mask->stride(d);
    }
  }
  Tensor out = torch::stable::empty_like(scores);
  check(merak_masked_softmax(type_of(scores), read(scores), static_cast<const bool*>(read(mask)), strides, write(out),
                             scores.size(0), scores.size(1), scores.size(2), scores.size(3), scale, causal, on.stream),
        "masked_softmax");
  return out;
}

Tensor masked_softmax_backward(const Tensor& upstream, const Tensor& given, double scale, bool causal) {
  STD_TORCH_CHECK(given.dim() == 4, "merak::masked_softmax_backward: probabilities [b, n, s, t] expected");
  const On on(given);
  const Tensor probabilities = dense(given), grad = dense(as_type(upstream, given.scalar_type()));
  expect_same(grad, probabilities, "masked_softmax_backward");
  Tensor out = torch::stable::empty_like(probabilities);
  check(merak_masked_softmax_backward(type_of(probabilities), read(grad), read(probabilities), write(out),
                                      probabilities.size(0) * probabilities.size(1), probabilities.size(2),
                                      probabilities.size(3), scale, causal, on.stream),
        "masked_softmax_backward");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CUDA, library) {
  library.impl("masked_softmax", TORCH_BOX(&masked_softmax));
  library.impl("masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
}

}  // namespace merak
