#include "launch.h"

#include "kernels/columns.cuh"
#include "kernels/norm.cuh"

namespace {

using namespace merak;

constexpr int64_t kWidest = int64_t(1) << 30;

// Threads for a row, and rows of a block.
dim3 block_of(int64_t width) {
  const int64_t warps = ceil_div(width, norm::kKept * kWarp), most = norm::kThreads / kWarp;
  const unsigned threads = kWarp * unsigned(warps < most ? warps : most);
  return dim3(threads, threads < 128 ? 128 / threads : 1);
}

// Blocks that a backward spreads its rows over: about 1024 threads for each multiprocessor.
int64_t blocks_of(int64_t rows, dim3 block) {
  const int64_t most = int64_t(multiprocessors()) * (1024 / (block.x * block.y)), needed = ceil_div(rows, block.y);
  return needed < most ? needed : most;
}

template <class T>
bool vector(int64_t width, int64_t outer, bool aligned) {
  return aligned && width % kPack<T> == 0 && outer % kPack<T> == 0;
}

template <class T, bool centred>
int launch_forward(const norm::Forward<T>& a, void* stream) {
  const dim3 block = block_of(a.width), grid(ceil_div(a.rows, block.y));
  return a.width <= norm::kKeptWidth ? launch(norm::forward<T, true, centred>, grid, block, 0, stream, a)
                                     : launch(norm::forward<T, false, centred>, grid, block, 0, stream, a);
}

template <class T, bool centred>
int launch_backward(const norm::Backward<T>& a, void* stream) {
  const dim3 block = block_of(a.width), grid(blocks_of(a.rows, block));
  return a.width <= norm::kKeptWidth ? launch(norm::backward<T, true, centred>, grid, block, 0, stream, a)
                                     : launch(norm::backward<T, false, centred>, grid, block, 0, stream, a);
}

}  // namespace

extern "C" {

int merak_norm(int type, const void* x, int64_t inner, int64_t outer, const void* residual, const void* weight,
               const void* bias, int weight_type, void* y, void* sum, float* mean, float* rstd, int64_t rows,
               int64_t width, double eps, void* stream) {
  if (width > kWidest || (weight_type != type && weight_type != MERAK_FLOAT)) return kInvalidValue;
  if (rows == 0 || width == 0) return 0;
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    const bool wide = weight_type == MERAK_FLOAT;
    const norm::Forward<T> a{static_cast<const T*>(x),
                             {inner, outer},
                             static_cast<const T*>(residual),
                             {weight, wide},
                             {bias, wide},
                             static_cast<T*>(y),
                             static_cast<T*>(sum),
                             mean,
                             rstd,
                             rows,
                             int(width),
                             float(eps),
                             vector<T>(width, outer, aligned(x, residual, weight, bias, y, sum))};
    return mean ? launch_forward<T, true>(a, stream) : launch_forward<T, false>(a, stream);
  });
}

int64_t merak_norm_parts(int, int64_t rows, int64_t width) {
  const dim3 block = block_of(width > 0 ? width : 1);
  return blocks_of(rows, block) * block.y;
}

int merak_norm_backward(int type, const void* grad, const void* grad_sum, const void* x, int64_t inner, int64_t outer,
                        const void* weight, int weight_type, const float* mean, const float* rstd, void* grad_x,
                        float* parts, void* grad_weight, void* grad_bias, int64_t rows, int64_t width, void* stream) {
  if (width > kWidest || (weight_type != type && weight_type != MERAK_FLOAT)) return kInvalidValue;
  if (width == 0) return 0;
  int status = rows == 0 ? 0 : by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    const norm::Backward<T> a{static_cast<const T*>(grad),
                              static_cast<const T*>(grad_sum),
                              static_cast<const T*>(x),
                              {inner, outer},
                              {weight, weight_type == MERAK_FLOAT},
                              mean,
                              rstd,
                              static_cast<T*>(grad_x),
                              parts,
                              rows,
                              int(width),
                              vector<T>(width, outer, aligned(grad, grad_sum, x, weight, grad_x, parts))};
    return mean ? launch_backward<T, true>(a, stream) : launch_backward<T, false>(a, stream);
  });
  if (status) return status;
  const int64_t count = rows == 0 ? 0 : merak_norm_parts(type, rows, width);
  return by_type(weight_type, [&](auto of) {
    using W = typename decltype(of)::type;
    return launch_sum_columns<W>(parts, grad_weight, grad_bias, count, width, stream);
  });
}

}  // extern "C"
