// Softmax cross entropy of rows of logits. Maximum and sum in one pass: Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018.
#include "softmax.h"

#include <cmath>

namespace merak {
namespace {

constexpr int64_t kBlock = 4096;  // classes that stay in the innermost cache between their maximum and their sum

const int64_t* classes_of(const Tensor& target, const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && target.scalar_type() == ScalarType::Long && target.numel() == logits.size(0),
                  "merak: logits [t, v] and target int64 [t] expected");
  return read<int64_t>(target);
}

struct Sums {
  float most = kHidden, sum = 0;
};

template <class T>
Sums sums_of(const T* x, int64_t classes) {
  Sums row;
  for (int64_t begin = 0; begin < classes; begin += kBlock) {
    const int64_t count = std::min(kBlock, classes - begin);
    const float most = std::max(row.most, largest(x + begin, count)), from = reference(most);
    row.sum = row.sum * decay(row.most - from) + sum_of_exponentials(x + begin, count, from);
    row.most = most;
  }
  return row;
}

// Sum and number of the classes that exist; float64, since classes may be many and of one sign.
template <class T>
void add_up(const T* x, int64_t classes, float* sum, float* number) {
  double total = 0;
  int64_t found = 0;
  for (int64_t begin = 0; begin < classes; begin += kBlock) {
    float part = 0;
    int32_t here = 0;
#pragma omp simd reduction(+ : part, here)
    for (int64_t i = begin; i < std::min(begin + kBlock, classes); ++i) {
      const float value = widen(x[i]);
      part += value == kHidden ? 0.f : value;
      here += value == kHidden ? 0 : 1;
    }
    total += part;
    found += here;
  }
  *sum = float(total);
  *number = float(found);
}

Tensor cross_entropy_stats(const Tensor& given, const Tensor& target, int64_t start, int64_t classes, bool smoothing) {
  const Tensor logits = dense(given), wanted = dense(target);
  const int64_t rows = logits.size(0), width = logits.size(1), columns = smoothing ? 5 : 3;
  const int64_t* chosen = classes_of(wanted, logits);
  Tensor stats = torch::stable::new_empty(logits, {rows, columns}, ScalarType::Float);
  by_type(logits, "cross_entropy_stats", [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = read<T>(logits);
    float* to = write<float>(stats);
    over_rows(rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = from + row * width;
        float* found = to + row * columns;
        const Sums sums = sums_of(x, classes);
        const int64_t place = chosen[row] - start;
        found[0] = sums.most;
        found[1] = sums.sum;
        found[2] = place >= 0 && place < classes ? widen(x[place]) : kHidden;
        if (smoothing) add_up(x, classes, found + 3, found + 4);
      }
    });
  });
  return stats;
}

// What a row's gradient is made of: e^(x - from) times `share`, `spread` for every class that exists, and `extra` at
// the target.
struct Row {
  float from, share, extra, spread;

  float at(float x) const { return decay(x - from) * share + (x == kHidden ? 0.f : spread); }
};

// into may be x. A row without a gradient is zero whatever its logits are.
template <class T>
void gradient(const T* x, T* into, const Row& row, int64_t place, int64_t classes, int64_t width) {
  if (row.share == 0 && row.extra == 0 && row.spread == 0) {
    std::fill(into, into + width, T{});
    return;
  }
  const bool here = place >= 0 && place < classes;
  const float chosen = here ? row.at(widen(x[place])) + row.extra : 0.f;
  if (row.spread == 0) {
#pragma omp simd
    for (int64_t i = 0; i < classes; ++i) into[i] = narrow<T>(decay(widen(x[i]) - row.from) * row.share);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < classes; ++i) into[i] = narrow<T>(row.at(widen(x[i])));
  }
  std::fill(into + classes, into + width, T{});
  if (here) into[place] = narrow<T>(chosen);
}

void gradients(const Tensor& logits, const Tensor& into, const Tensor& target, const Tensor& given, const Tensor& up,
               int64_t start, int64_t classes) {
  const Tensor wanted = dense(target), stats = as_float(given), grad = as_float(up);
  const int64_t rows = logits.size(0), width = logits.size(1), columns = stats.size(1);
  const int64_t* chosen = classes_of(wanted, logits);
  by_type(logits, "cross_entropy_grad", [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = read<T>(logits);
    const float *found = read<float>(stats), *of = read<float>(grad);
    T* to = write<T>(into);
    over_rows(rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* g = of + row * columns;
        const Row one = {reference(found[row * columns]), g[1], g[2], columns > 3 ? g[3] : 0.f};
        gradient(from + row * width, to + row * width, one, chosen[row] - start, classes, width);
      }
    });
  });
}

Tensor cross_entropy_grad(const Tensor& given, const Tensor& target, const Tensor& stats, const Tensor& grad,
                          int64_t start, int64_t classes) {
  const Tensor logits = dense(given);
  Tensor out = torch::stable::empty_like(logits);
  gradients(logits, out, target, stats, grad, start, classes);
  return out;
}

void cross_entropy_grad_(Tensor logits, const Tensor& target, const Tensor& stats, const Tensor& grad, int64_t start,
                         int64_t classes) {
  const Tensor whole = dense(logits);
  gradients(whole, whole, target, stats, grad, start, classes);
  if (whole.mutable_data_ptr() != logits.mutable_data_ptr()) torch::stable::copy_(logits, whole);
}

// x -> e^(x - maximum), less the row's sum at the target; the sum is of what was not yet rounded. Returns the loss,
// which is infinite where the target is padding, and the sum.
template <class T>
std::pair<float, float> exponentiate(T* x, int64_t place, int64_t classes, int64_t width) {
  const float most = largest(x, classes), from = reference(most);
  const float at_target = place < classes ? widen(x[place]) : kHidden, chosen = decay(at_target - from);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < classes; ++i) {
    const float value = decay(widen(x[i]) - from);
    sum += value;
    x[i] = narrow<T>(value);
  }
  std::fill(x + classes, x + width, T{});
  x[place] = narrow<T>(chosen - sum);
  return {std::log(sum) - (at_target - most), sum};
}

std::tuple<Tensor, Tensor> exponentiate_(Tensor logits, const Tensor& target, int64_t classes) {
  const Tensor whole = dense(logits), wanted = dense(target);
  const int64_t rows = whole.size(0), width = whole.size(1);
  const int64_t* chosen = classes_of(wanted, whole);
  for (int64_t row = 0; row < rows; ++row)
    STD_TORCH_CHECK(chosen[row] >= 0 && chosen[row] < width, "merak::exponentiate_: target ", chosen[row],
                    " is out of range");
  Tensor loss = torch::stable::new_empty(whole, {rows}, ScalarType::Float);
  Tensor total = torch::stable::new_empty(whole, {rows}, ScalarType::Float);
  by_type(whole, "exponentiate_", [&](auto type) {
    using T = typename decltype(type)::type;
    T* x = write<T>(whole);
    float *losses = write<float>(loss), *totals = write<float>(total);
    over_rows(rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        std::tie(losses[row], totals[row]) = exponentiate(x + row * width, chosen[row], classes, width);
    });
  });
  if (whole.mutable_data_ptr() != logits.mutable_data_ptr()) torch::stable::copy_(logits, whole);
  return {loss, total};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CPU, library) {
  library.impl("exponentiate_", TORCH_BOX(&exponentiate_));
  library.impl("cross_entropy_stats", TORCH_BOX(&cross_entropy_stats));
  library.impl("cross_entropy_grad", TORCH_BOX(&cross_entropy_grad));
  library.impl("cross_entropy_grad_", TORCH_BOX(&cross_entropy_grad_));
}

}  // namespace merak
