// Cross entropy of rows of logits, of one tensor or of a shard of the classes.
#include "tensor.h"

namespace merak {
namespace {

// Rows may be apart, classes not.
Tensor rows_dense(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2, "merak: logits [t, v] expected");
  return logits.stride(1) == 1 || logits.size(1) == 1 ? logits : dense(logits);
}

Tensor classes_of(const Tensor& target, const Tensor& logits) {
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long && target.numel() == logits.size(0),
                  "merak: target int64 [t] expected for logits [t, v]");
  return dense(target);
}

const int64_t* numbers(const Tensor& target) { return static_cast<const int64_t*>(read(target)); }

Tensor cross_entropy_stats(const Tensor& given, const Tensor& given_target, int64_t start, int64_t classes,
                           bool smoothing) {
  const On on(given);
  const Tensor logits = rows_dense(given), target = classes_of(given_target, logits);
  const int64_t rows = logits.size(0), terms = smoothing ? 5 : 3;
  Tensor stats = torch::stable::new_empty(logits, {rows, terms}, ScalarType::Float);
  check(merak_cross_entropy_stats(type_of(logits), read(logits), numbers(target), write<float>(stats), rows,
                                  logits.stride(0), start, std::max<int64_t>(0, classes), smoothing, on.stream),
        "cross_entropy_stats");
  return stats;
}

void gradients(const Tensor& logits, const Tensor& to, const Tensor& given_target, const Tensor& given_stats,
               const Tensor& upstream, int64_t start, int64_t classes) {
  const Tensor target = classes_of(given_target, logits), stats = dense(as_type(given_stats, ScalarType::Float));
  const Tensor grad = dense(as_type(upstream, ScalarType::Float));
  expect_same(stats, grad, "cross_entropy_grad");
  check(merak_cross_entropy_grad(type_of(logits), read(logits), write(to), numbers(target),
                                 static_cast<const float*>(read(stats)), static_cast<const float*>(read(grad)),
                                 int(stats.size(1)), logits.size(0), logits.size(1), logits.stride(0), to.stride(0),
                                 start, std::max<int64_t>(0, classes), On(logits).stream),
        "cross_entropy_grad");
}

Tensor cross_entropy_grad(const Tensor& given, const Tensor& target, const Tensor& stats, const Tensor& grad,
                          int64_t start, int64_t classes) {
  const On on(given);
  const Tensor logits = rows_dense(given);
  Tensor out = torch::stable::new_empty(logits, {logits.size(0), logits.size(1)});
  gradients(logits, out, target, stats, grad, start, classes);
  return out;
}

void cross_entropy_grad_(Tensor logits, const Tensor& target, const Tensor& stats, const Tensor& grad, int64_t start,
                         int64_t classes) {
  const On on(logits);
  const Tensor whole = rows_dense(logits);
  gradients(whole, whole, target, stats, grad, start, classes);
  if (read(whole) != read(logits)) torch::stable::copy_(logits, whole);
}

std::tuple<Tensor, Tensor> exponentiate_(Tensor logits, const Tensor& given_target, int64_t classes) {
  const On on(logits);
  const Tensor whole = rows_dense(logits), target = classes_of(given_target, whole);
  const int64_t rows = whole.size(0);
  Tensor loss = torch::stable::new_empty(whole, {rows}, ScalarType::Float);
  Tensor total = torch::stable::empty_like(loss);
  check(merak_exponentiate(type_of(whole), write(whole), numbers(target), write<float>(loss), write<float>(total), rows,
                           whole.size(1), whole.stride(0), classes, on.stream),
        "exponentiate_");
  if (read(whole) != read(logits)) torch::stable::copy_(logits, whole);
  return {loss, total};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CUDA, library) {
  library.impl("cross_entropy_stats", TORCH_BOX(&cross_entropy_stats));
  library.impl("cross_entropy_grad", TORCH_BOX(&cross_entropy_grad));
  library.impl("cross_entropy_grad_", TORCH_BOX(&cross_entropy_grad_));
  library.impl("exponentiate_", TORCH_BOX(&exponentiate_));
}

}  // namespace merak
