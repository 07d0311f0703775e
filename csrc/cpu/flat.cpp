// One pass over flat buffers: AdamW (Loshchilov and Hutter, 2019), norms, sums and casts.
#ifndef __clang__
#pragma GCC optimize("fp-contract=off")  // products and sums are fused where it is written, as in torch's AdamW
#endif
#include "tensor.h"

#include <cmath>
#include <optional>

namespace merak {
namespace {

// ---- elementwise over two tensors ---------------------------------------------------------------------------------

// into[i] = combine(into[i], x[i]), float32 inside.
template <class Combine>
void combine(Tensor into, const Tensor& given, const char* op, const Combine& rule) {
  STD_TORCH_CHECK(into.numel() == given.numel(), "merak::", op, ": tensors of one size expected");
  const Tensor x = dense(given), whole = dense(into);
  by_type(whole, op, [&](auto type) {
    using Into = typename decltype(type)::type;
    Into* to = write<Into>(whole);
    by_type(x, op, [&](auto other) {
      using X = typename decltype(other)::type;
      const X* from = read<X>(x);
      over_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) to[i] = narrow<Into>(rule(widen(to[i]), widen(from[i])));
      });
    });
  });
  if (whole.mutable_data_ptr() != into.mutable_data_ptr()) torch::stable::copy_(into, whole);
}

void accumulate_(Tensor into, const Tensor& x, double scale) {
  const float factor = float(scale);
  combine(into, x, "accumulate_", [factor](float sum, float value) { return sum + value * factor; });
}

void cast_(Tensor into, const Tensor& x, double scale) {
  const float factor = float(scale);
  combine(into, x, "cast_", [factor](float, float value) { return value * factor; });
}

// Threads share the columns, so that rows are added in order.
void add_rows_(Tensor into, const Tensor& index, const Tensor& given) {
  const Tensor places = dense(index), rows = dense(given), table = dense(into);
  STD_TORCH_CHECK(table.dim() == 2 && rows.dim() == 2 && table.size(1) == rows.size(1) &&
                      places.scalar_type() == ScalarType::Long && places.numel() == rows.size(0),
                  "merak::add_rows_: a table [v, h], index int64 [t] and rows [t, h] expected");
  const int64_t count = rows.size(0), width = rows.size(1), extent = table.size(0);
  const int64_t* place = read<int64_t>(places);
  for (int64_t row = 0; row < count; ++row)
    STD_TORCH_CHECK(place[row] >= 0 && place[row] < extent, "merak::add_rows_: index ", place[row], " is out of range");
  by_type(table, "add_rows_", [&](auto type) {
    using Into = typename decltype(type)::type;
    Into* to = write<Into>(table);
    by_type(rows, "add_rows_", [&](auto other) {
      using X = typename decltype(other)::type;
      const X* from = read<X>(rows);
      over_rows(width, count, [&](int64_t begin, int64_t end) {
        for (int64_t row = 0; row < count; ++row) {
          Into* sum = to + place[row] * width;
          const X* x = from + row * width;
#pragma omp simd
          for (int64_t i = begin; i < end; ++i) sum[i] = narrow<Into>(widen(sum[i]) + widen(x[i]));
        }
      });
    });
  });
  if (table.mutable_data_ptr() != into.mutable_data_ptr()) torch::stable::copy_(into, table);
}

// Rows of a token are added in order, a tile of columns at a time.
Tensor sums_of_rows(const Tensor& given, const Tensor& index, int64_t k) {
  const Tensor rows = dense(given), places = dense(index);
  STD_TORCH_CHECK(rows.dim() == 2 && places.dim() == 1 && places.scalar_type() == ScalarType::Long && k > 0 &&
                      places.numel() % k == 0,
                  "merak::sums_of_rows: rows [n, h] and places int64 [t k] expected");
  const int64_t width = rows.size(1), extent = rows.size(0), count = places.numel() / k;
  const int64_t* place = read<int64_t>(places);
  for (int64_t row = 0; row < count * k; ++row)
    STD_TORCH_CHECK(place[row] >= 0 && place[row] < extent, "merak::sums_of_rows: place ", place[row],
                    " is out of range");
  Tensor made = torch::stable::new_empty(rows, std::vector<int64_t>{count, width});
  by_type(rows, "sums_of_rows", [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = read<T>(rows);
    T* to = write<T>(made);
    over_rows(count, width * k, [&](int64_t begin, int64_t end) {
      constexpr int64_t kTile = 256;
      float sums[kTile];
      for (int64_t token = begin; token < end; ++token)
        for (int64_t start = 0; start < width; start += kTile) {
          const int64_t size = std::min(kTile, width - start);
          for (int64_t j = 0; j < k; ++j) {
            const T* x = from + place[token * k + j] * width + start;
            if (j == 0) {
#pragma omp simd
              for (int64_t i = 0; i < size; ++i) sums[i] = widen(x[i]);
            } else {
#pragma omp simd
              for (int64_t i = 0; i < size; ++i) sums[i] += widen(x[i]);
            }
          }
          T* sum = to + token * width + start;
#pragma omp simd
          for (int64_t i = 0; i < size; ++i) sum[i] = narrow<T>(sums[i]);
        }
    });
  });
  return made;
}

// ---- norm ----------------------------------------------------------------------------------------------------------

constexpr int64_t kSummed = 1 << 16;  // elements of a block; blocks are added in order

template <class T>
double squares(const T* x, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const double value = widen(x[i]);
    sum += value * value;
  }
  return sum;
}

Tensor sum_of_squares(const Tensor& given) {
  const Tensor x = dense(given);
  const int64_t size = x.numel(), blocks = (size + kSummed - 1) / kSummed;
  std::vector<double> parts(blocks);
  by_type(x, "sum_of_squares", [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = read<T>(x);
    over_rows(blocks, kSummed, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block)
        parts[block] = squares(from + block * kSummed, std::min(kSummed, size - block * kSummed));
    });
  });
  Tensor total = torch::stable::new_zeros(x, {}, ScalarType::Double);
  for (const double part : parts) *write<double>(total) += part;
  return total;
}

// ---- AdamW ---------------------------------------------------------------------------------------------------------

constexpr int64_t kTile = 64;  // elements updated by one unrolled loop: the same instructions for each, wherever it lies

struct Update {
  float kept, weight, beta2, rest2, root2, eps, step, scale;
  bool from_moment;  // of two ways to write the mean of moment and gradient, the one that rounds less
};

void update(float* __restrict master, float* __restrict first, float* __restrict second, const float* __restrict grad,
            const Update& u) {
#pragma omp simd
  for (int64_t i = 0; i < kTile; ++i) {
    const float g = grad[i];
    const float moment = __builtin_fmaf(u.weight, g - first[i], u.from_moment ? first[i] : g);
    const float square = __builtin_fmaf(u.rest2 * g, g, second[i] * u.beta2);
    master[i] = master[i] * u.kept + u.step * moment / (std::sqrt(square) / u.root2 + u.eps);
    first[i] = moment;
    second[i] = square;
  }
}

// A tile of moments in float32: where it lies, or if it is stored in another type, in `room`.
inline float* opened(float* moments, float*) { return moments; }

template <class T>
float* opened(const T* moments, float* room) {
#pragma omp simd
  for (int64_t i = 0; i < kTile; ++i) room[i] = widen(moments[i]);
  return room;
}

inline void closed(float*, const float*) {}

template <class T>
void closed(T* moments, const float* room) {
#pragma omp simd
  for (int64_t i = 0; i < kTile; ++i) moments[i] = narrow<T>(room[i]);
}

template <class M, class S, class G, class C>
void update_tile(float* master, M* first, S* second, const G* grad, C* copy, const Update& u) {
  float scaled[kTile], moments[kTile], squares[kTile];
#pragma omp simd
  for (int64_t i = 0; i < kTile; ++i) scaled[i] = widen(grad[i]) * u.scale;
  update(master, opened(first, moments), opened(second, squares), scaled, u);
  closed(first, moments);
  closed(second, squares);
  if (!copy) return;
#pragma omp simd
  for (int64_t i = 0; i < kTile; ++i) copy[i] = narrow<C>(master[i]);
}

// A last tile that is not full is updated in a full one.
template <class M, class S, class G, class C>
void update_rest(float* master, M* first, S* second, const G* grad, C* copy, int64_t count, const Update& u) {
  float values[kTile] = {};
  M moments[kTile] = {};
  S squares[kTile] = {};
  G grads[kTile] = {};
  C copies[kTile];
  std::copy_n(master, count, values);
  std::copy_n(first, count, moments);
  std::copy_n(second, count, squares);
  std::copy_n(grad, count, grads);
  update_tile(values, moments, squares, grads, copies, u);
  std::copy_n(values, count, master);
  std::copy_n(moments, count, first);
  std::copy_n(squares, count, second);
  if (copy) std::copy_n(copies, count, copy);
}

template <class M, class S, class G, class C>
void update_all(float* master, M* first, S* second, const G* grad, C* copy, int64_t size, const Update& u) {
  over_rows((size + kTile - 1) / kTile, kTile, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t at = tile * kTile, count = std::min(kTile, size - at);
      C* into = copy ? copy + at : nullptr;
      if (count < kTile)
        update_rest(master + at, first + at, second + at, grad + at, into, count, u);
      else
        update_tile(master + at, first + at, second + at, grad + at, into, u);
    }
  });
}

// Calls work(Type<T>) with the element type of moments, which are stored in float32 or bfloat16.
template <class Work>
void by_moments(const Tensor& moments, const Work& work) {
  if (moments.scalar_type() == ScalarType::BFloat16) return work(Type<bf16>());
  STD_TORCH_CHECK(moments.scalar_type() == ScalarType::Float, "merak::adamw_: moments of float32 or bfloat16 expected");
  work(Type<float>());
}

void adamw_(Tensor master, Tensor exp_avg, Tensor exp_avg_sq, const Tensor& given, std::optional<Tensor> copy,
            double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step, double scale) {
  const Tensor grad = dense(given);
  const int64_t size = master.numel();
  STD_TORCH_CHECK(master.scalar_type() == ScalarType::Float, "merak::adamw_: a float32 master expected");
  for (const Tensor& state : {master, exp_avg, exp_avg_sq})
    STD_TORCH_CHECK(state.is_contiguous() && state.numel() == size, "merak::adamw_: dense tensors of one size expected");
  STD_TORCH_CHECK(grad.numel() == size && (!copy || (copy->numel() == size && copy->is_contiguous())),
                  "merak::adamw_: a gradient and a dense copy of the master's size expected");
  const double rest1 = 1 - beta1, root2 = std::sqrt(1 - std::pow(beta2, double(step)));
  Update u;
  u.from_moment = rest1 < 0.5;
  u.weight = float(u.from_moment ? rest1 : -beta1);
  u.beta2 = float(beta2);
  u.rest2 = float(1 - beta2);
  u.root2 = float(root2);
  u.eps = float(eps);
  u.kept = float(1 - lr * weight_decay);
  u.step = float(-lr / (1 - std::pow(beta1, double(step))));
  u.scale = float(scale);
  const auto run = [&](auto* copies) {
    by_type(grad, "adamw_", [&](auto type) {
      using G = typename decltype(type)::type;
      by_moments(exp_avg, [&](auto of_first) {
        using M = typename decltype(of_first)::type;
        by_moments(exp_avg_sq, [&](auto of_second) {
          using S = typename decltype(of_second)::type;
          update_all(write<float>(master), write<M>(exp_avg), write<S>(exp_avg_sq), read<G>(grad), copies, size, u);
        });
      });
    });
  };
  if (!copy) return run(static_cast<float*>(nullptr));
  by_type(*copy, "adamw_", [&](auto type) { run(write<typename decltype(type)::type>(*copy)); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CPU, library) {
  library.impl("adamw_", TORCH_BOX(&adamw_));
  library.impl("sum_of_squares", TORCH_BOX(&sum_of_squares));
  library.impl("accumulate_", TORCH_BOX(&accumulate_));
  library.impl("cast_", TORCH_BOX(&cast_));
  library.impl("add_rows_", TORCH_BOX(&add_rows_));
  library.impl("sums_of_rows", TORCH_BOX(&sums_of_rows));
}

}  // namespace merak
