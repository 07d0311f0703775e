// One pass over flat buffers: AdamW, norms, sums and casts; rows added to a table.
#include "tensor.h"

namespace merak {
namespace {

void adamw_(Tensor master, Tensor exp_avg, Tensor exp_avg_sq, const Tensor& given, std::optional<Tensor> copy,
            double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step, double scale) {
  const On on(master);
  const Tensor grad = dense(given);
  const int64_t count = master.numel();
  STD_TORCH_CHECK(master.scalar_type() == ScalarType::Float, "merak::adamw_: a float32 master expected");
  for (const Tensor& state : {master, exp_avg, exp_avg_sq})
    STD_TORCH_CHECK(state.is_contiguous() && state.numel() == count,
                    "merak::adamw_: dense tensors of one size expected");
  STD_TORCH_CHECK(grad.numel() == count && (!copy || (copy->numel() == count && copy->is_contiguous())),
                  "merak::adamw_: a gradient and a dense copy of the master's size expected");
  check(merak_adamw(write<float>(master), type_of(exp_avg), write(exp_avg), type_of(exp_avg_sq), write(exp_avg_sq),
                    type_of(grad), read(grad), copy ? type_of(*copy) : MERAK_FLOAT, copy ? write(*copy) : nullptr,
                    count, lr, beta1, beta2, eps, weight_decay, step, scale, on.stream),
        "adamw_");
}

Tensor sum_of_squares(const Tensor& given) {
  const On on(given);
  const Tensor x = dense(given);
  const int64_t blocks = merak_sum_of_squares_parts(type_of(x), x.numel());
  Tensor parts = torch::stable::new_empty(x, {blocks}, ScalarType::Double);
  Tensor total = torch::stable::new_empty(x, {}, ScalarType::Double);
  check(merak_sum_of_squares(type_of(x), read(x), x.numel(), write<double>(parts), write<double>(total), on.stream),
        "sum_of_squares");
  return total;
}

using Launcher = int(int, void*, int, const void*, int64_t, double, void*);

void scale_into(Tensor into, const Tensor& given, double scale, Launcher* launch, const char* op) {
  STD_TORCH_CHECK(into.numel() == given.numel(), "merak::", op, ": tensors of one size expected");
  const On on(into);
  const Tensor x = dense(given), whole = dense(into);
  check(launch(type_of(whole), write(whole), type_of(x), read(x), x.numel(), scale, on.stream), op);
  if (read(whole) != read(into)) torch::stable::copy_(into, whole);
}

void accumulate_(Tensor into, const Tensor& x, double scale) {
  scale_into(into, x, scale, &merak_accumulate, "accumulate_");
}

void cast_(Tensor into, const Tensor& x, double scale) { scale_into(into, x, scale, &merak_cast, "cast_"); }

// Ascending values, and where each was: torch.sort(index, stable=True).
std::tuple<Tensor, Tensor> sorted(const Tensor& index) {
  namespace value = torch::stable::detail;
  StableIValue stack[] = {value::from(index), value::from(std::optional<bool>(true)), value::from(int64_t(0)),
                          value::from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack, TORCH_ABI_VERSION));
  return {value::to<Tensor>(stack[0]), value::to<Tensor>(stack[1])};
}

void add_rows_(Tensor into, const Tensor& index, const Tensor& given) {
  const On on(into);
  const Tensor rows = dense(given), table = dense(into);
  STD_TORCH_CHECK(table.dim() == 2 && rows.dim() == 2 && table.size(1) == rows.size(1) &&
                      index.scalar_type() == ScalarType::Long && index.dim() == 1 && index.numel() == rows.size(0),
                  "merak::add_rows_: a table [v, h], index int64 [t] and rows [t, h] expected");
  const auto [places, order] = sorted(index);
  check(merak_add_rows(type_of(table), write(table), static_cast<const int64_t*>(read(places)),
                       static_cast<const int64_t*>(read(order)), type_of(rows), read(rows), rows.size(0),
                       table.size(0), table.size(1), on.stream),
        "add_rows_");
  if (read(table) != read(into)) torch::stable::copy_(into, table);
}

Tensor sums_of_rows(const Tensor& given, const Tensor& index, int64_t k) {
  const On on(given);
  const Tensor rows = dense(given), places = dense(index);
  STD_TORCH_CHECK(rows.dim() == 2 && places.dim() == 1 && places.scalar_type() == ScalarType::Long && k > 0 &&
                      places.numel() % k == 0,
                  "merak::sums_of_rows: rows [n, h] and places int64 [t k] expected");
  const int64_t tokens = places.numel() / k, width = rows.size(1);
  const Tensor sums = torch::stable::new_empty(rows, std::vector<int64_t>{tokens, width});
  check(merak_sums_of_rows(type_of(rows), read(rows), static_cast<const int64_t*>(read(places)), k, write(sums), tokens,
                           rows.size(0), width, on.stream),
        "sums_of_rows");
  return sums;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CUDA, library) {
  library.impl("adamw_", TORCH_BOX(&adamw_));
  library.impl("sum_of_squares", TORCH_BOX(&sum_of_squares));
  library.impl("accumulate_", TORCH_BOX(&accumulate_));
  library.impl("cast_", TORCH_BOX(&cast_));
  library.impl("add_rows_", TORCH_BOX(&add_rows_));
  library.impl("sums_of_rows", TORCH_BOX(&sums_of_rows));
}

}  // namespace merak
