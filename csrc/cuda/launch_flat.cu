#include "launch.h"

#include "kernels/flat.cuh"

#include <cmath>

namespace {

using namespace merak;

constexpr int kThreads = 256, kRowThreads = 128;
constexpr size_t kScratch = 32 * sizeof(double);

int64_t square_blocks(int type, int64_t count) {
  const int64_t elements = type == MERAK_FLOAT ? kPack<float> : kPack<bf16>;
  const int64_t blocks = ceil_div(count, kThreads * elements);
  return blocks < 1 ? 1 : blocks < kSumBlocks ? blocks : kSumBlocks;
}

template <bool ADD>
int scale_by_type(int into_type, void* into, int from_type, const void* from, int64_t count, double scale,
                  void* stream) {
  if (count == 0) return 0;
  return by_type(into_type, [&](auto to) {
    return by_type(from_type, [&](auto source) {
      using Into = typename decltype(to)::type;
      using From = typename decltype(source)::type;
      return launch(scale_into<Into, From, ADD>, dim3(ceil_div(count, kThreads * kScalePack)), dim3(kThreads), 0,
                    stream, static_cast<Into*>(into), static_cast<const From*>(from), count, float(scale),
                    aligned(into, from));
    });
  });
}

// As by_type, of moments.
template <class Work>
int by_moments(int type, const Work& work) {
  if (type == MERAK_FLOAT) return work(Type<float>());
  return type == MERAK_BFLOAT16 ? work(Type<bf16>()) : int(kInvalidValue);
}

}  // namespace

extern "C" {

int merak_adamw(float* master, int exp_avg_type, void* exp_avg, int exp_avg_sq_type, void* exp_avg_sq, int grad_type,
                const void* grad, int copy_type, void* copy, int64_t count, double rate, double beta1, double beta2,
                double eps, double weight_decay, int64_t step, double scale, void* stream) {
  if (count == 0) return 0;
  const double left1 = 1 - std::pow(beta1, double(step)), left2 = 1 - std::pow(beta2, double(step));
  AdamW how;
  how.rest1 = float(1 - beta1);
  how.beta2 = float(beta2);
  how.rest2 = float(1 - beta2);
  how.decay = float(1 - rate * weight_decay);
  how.step = float(rate / left1);
  how.correction = float(1 / std::sqrt(left2));
  how.eps = float(eps);
  how.scale = float(scale);
  const bool vector = aligned(master, exp_avg, exp_avg_sq) && aligned(grad, copy);
  return by_moments(exp_avg_type, [&](auto of_first) {
    return by_moments(exp_avg_sq_type, [&](auto of_second) {
      return by_type(grad_type, [&](auto of_grad) {
        return by_type(copy_type, [&](auto of_copy) {
          using M = typename decltype(of_first)::type;
          using S = typename decltype(of_second)::type;
          using G = typename decltype(of_grad)::type;
          using C = typename decltype(of_copy)::type;
          return launch(adamw<M, S, G, C>, dim3(ceil_div(count, kThreads * kAdamPack)), dim3(kThreads), 0, stream,
                        master, static_cast<M*>(exp_avg), static_cast<S*>(exp_avg_sq), static_cast<const G*>(grad),
                        static_cast<C*>(copy), count, how, vector);
        });
      });
    });
  });
}

int64_t merak_sum_of_squares_parts(int type, int64_t count) { return square_blocks(type, count); }

int merak_sum_of_squares(int type, const void* from, int64_t count, double* parts, double* to, void* stream) {
  const int64_t blocks = square_blocks(type, count);
  const int status = by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    return launch(square_parts<T>, dim3(blocks), dim3(kThreads), kScratch, stream, static_cast<const T*>(from), count,
                  parts, aligned(from));
  });
  if (status != 0) return status;
  return launch(sum_parts, dim3(1), dim3(kThreads), kScratch, stream, parts, int(blocks), to);
}

int merak_accumulate(int into_type, void* into, int from_type, const void* from, int64_t count, double scale,
                     void* stream) {
  return scale_by_type<true>(into_type, into, from_type, from, count, scale, stream);
}

int merak_cast(int into_type, void* into, int from_type, const void* from, int64_t count, double scale, void* stream) {
  return scale_by_type<false>(into_type, into, from_type, from, count, scale, stream);
}

int merak_add_rows(int into_type, void* into, const int64_t* index, const int64_t* order, int from_type,
                   const void* from, int64_t count, int64_t table_rows, int64_t width, void* stream) {
  if (count > INT32_MAX) return kInvalidValue;
  if (count == 0 || width == 0) return 0;
  const bool vector = aligned(into, from) && width % kRowPack == 0;
  return by_type(into_type, [&](auto to) {
    return by_type(from_type, [&](auto source) {
      using Into = typename decltype(to)::type;
      using From = typename decltype(source)::type;
      return launch(add_rows<Into, From>, dim3(count, ceil_div(width, kRowThreads * kRowPack)), dim3(kRowThreads), 0,
                    stream, static_cast<Into*>(into), index, order, static_cast<const From*>(from), int(count),
                    table_rows, width, vector);
    });
  });
}

int merak_sums_of_rows(int type, const void* from, const int64_t* places, int64_t k, void* to, int64_t tokens,
                       int64_t count, int64_t width, void* stream) {
  if (tokens > INT32_MAX || k < 1 || k > INT32_MAX) return kInvalidValue;
  if (tokens == 0 || width == 0) return 0;
  const bool vector = aligned(from, to) && width % kRowPack == 0;
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    return launch(sums_of_rows<T>, dim3(tokens, ceil_div(width, kRowThreads * kRowPack)), dim3(kRowThreads), 0, stream,
                  static_cast<const T*>(from), places, static_cast<T*>(to), int(k), count, width, vector);
  });
}

}  // extern "C"
