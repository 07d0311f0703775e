#include "launch.h"

#include "kernels/residual.cuh"

namespace {

using namespace merak;

residual::Dropout dropout_of(double p, const int64_t* seed) {
  const double bound = p * 4294967296.0;
  const uint64_t floor = uint64_t(bound);
  return {seed, floor + (double(floor) < bound), float(1 / (1 - p))};
}

// Where all columns are alike, rows are laid end to end.
template <class T>
Columns over(int64_t rows, int64_t width, bool alike, bool aligned) {
  if (alike) return {1, rows * width, aligned};
  return {rows, width, aligned && (rows == 1 || width % kPack<T> == 0)};
}

}  // namespace

extern "C" {

int merak_bias_dropout_add(int type, const void* x, const void* bias, int bias_type, const void* residual, double p,
                           const int64_t* seed, void* y, int64_t rows, int64_t width, void* stream) {
  if ((bias && bias_type != type && bias_type != MERAK_FLOAT) || !(p >= 0 && p <= 1)) return kInvalidValue;
  if (rows == 0 || width == 0) return 0;
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    residual::Add<T> a{};
    a.x = static_cast<const T*>(x);
    a.residual = static_cast<const T*>(residual);
    a.bias = {bias, bias_type == MERAK_FLOAT};
    a.dropout = dropout_of(p, seed);
    a.y = static_cast<T*>(y);
    a.over = over<T>(rows, width, !bias, aligned(x, bias, residual, y));
    const Shape shape = shape_of<T>(a.over.rows, a.over.width, false);
    return launch(residual::bias_dropout_add<T>, shape.grid, shape.block, 0, stream, a);
  });
}

int64_t merak_residual_parts(int type, int64_t rows, int64_t width) { return groups_of(type, rows, width); }

int merak_bias_dropout_add_backward(int type, const void* grad, double p, const int64_t* seed, void* grad_x,
                                    float* parts, void* grad_bias, int64_t rows, int64_t width, void* stream) {
  if (!(p >= 0 && p <= 1)) return kInvalidValue;
  if (width == 0 || (rows == 0 && !grad_bias)) return 0;
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    const bool summed = grad_bias != nullptr;
    if (rows > 0) {
      residual::Add<T> a{};
      a.x = static_cast<const T*>(grad);
      a.dropout = dropout_of(p, seed);
      a.y = static_cast<T*>(grad_x);
      a.parts = summed ? parts : nullptr;
      a.over = over<T>(rows, width, !summed, aligned(grad, grad_x, a.parts));
      const Shape shape = shape_of<T>(a.over.rows, a.over.width, summed);
      const int status = launch(residual::bias_dropout_add_backward<T>, shape.grid, shape.block, 0, stream, a);
      if (status) return status;
    }
    if (!summed) return 0;
    return launch_sum_columns<T>(parts, grad_bias, nullptr, groups_of(type, rows, width), width, stream);
  });
}

}  // extern "C"
