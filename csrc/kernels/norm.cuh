// RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016; `centred`), each with an addition before it if asked.
//
// A row belongs to the threads of one threadIdx.y. Rows of up to kKeptWidth are read once and kept in registers; longer
// ones (not `kept`) are read again for each pass.
#pragma once

#include "merak/pack.h"

namespace merak::norm {

constexpr int kThreads = 512;
constexpr int kKept = 16;  // elements that a thread keeps
constexpr int64_t kKeptWidth = int64_t(kKept) * kThreads;

// work(i, column) for each pack of this thread, the i-th of those that it keeps.
template <class T, bool kept, class Work>
__device__ __forceinline__ void share(int width, const Work& work) {
  constexpr int N = kPack<T>;
  if constexpr (kept) {
#pragma unroll
    for (int i = 0; i < kKept / N; ++i) {
      const int column = (i * int(blockDim.x) + int(threadIdx.x)) * N;
      if (column < width) work(i, column);
    }
  } else {
    for (int column = int(threadIdx.x) * N; column < width; column += int(blockDim.x) * N) work(0, column);
  }
}

// One row of a tensor, as the thread that owns these packs of it sees it.
template <class T, bool kept>
struct Row {
  static constexpr int N = kPack<T>;
  const T* from;
  int width;
  bool vector;
  Pack<T, N> packs[kept ? kKept / N : 1];

  __device__ __forceinline__ Row(const T* from, int width, bool vector) : from(from), width(width), vector(vector) {
    if constexpr (kept)
      share<T, kept>(width, [&](int i, int c) { packs[i] = load<T, N>(from + c, this->width - c, this->vector); });
  }

  __device__ __forceinline__ Pack<T, N> at(int i, int column) const {
    if constexpr (kept)
      return packs[i];
    else
      return load<T, N>(from + column, width - column, vector);
  }

  // Adds another row, and writes what this one becomes.
  __device__ __forceinline__ void add(const Row& other, T* sum) {
    share<T, kept>(width, [&](int i, int c) {
      const Pack<T, N> a = at(i, c), b = other.at(i, c);
      Pack<T, N> both;
#pragma unroll
      for (int j = 0; j < N; ++j) both.at[j] = narrow<T>(widen(a.at[j]) + widen(b.at[j]));
      store(sum + c, both, width - c, vector);
      if constexpr (kept) packs[i] = both;
    });
    from = sum;
  }
};

// Where rows begin: `inner` of them side by side, `outer` elements from the first of these to the first of the next.
struct Places {
  int64_t inner, outer;

  __device__ __forceinline__ int64_t of(int64_t row, int width) const {
    return inner == 1 ? row * outer : row / inner * outer + row % inner * width;
  }
};

template <class T>
struct Forward {
  const T* x;
  Places places;  // of x
  const T* residual;
  Values weight, bias;
  T *y, *sum;
  float *mean, *rstd;
  int64_t rows;
  int width;
  float eps;
  bool vector;
};

template <class T, bool kept, bool centred>
__global__ void __launch_bounds__(kThreads) forward(const Forward<T> a) {
  constexpr int N = kPack<T>;
  __shared__ float scratch[kWarp];
  const int64_t index = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, start = index * a.width;
  const int width = index < a.rows ? a.width : 0;  // past the last row there is nothing to do but to meet at barriers

  Row<T, kept> row(a.x + a.places.of(index, a.width), width, a.vector);
  if (a.residual) row.add(Row<T, kept>(a.residual + start, width, a.vector), a.sum + start);

  float mean = 0;
  if constexpr (centred) {
    float total[1] = {0};
    share<T, kept>(width, [&](int i, int c) {
      const Pack<T, N> x = row.at(i, c);
#pragma unroll
      for (int j = 0; j < N; ++j) total[0] += widen(x.at[j]);
    });
    row_sum(total, scratch);
    mean = total[0] / a.width;
  }
  float squares[1] = {0};
  share<T, kept>(width, [&](int i, int c) {
    const Pack<T, N> x = row.at(i, c);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float off = centred && c + j >= width ? 0.f : widen(x.at[j]) - mean;
      squares[0] += off * off;
    }
  });
  row_sum(squares, scratch);
  const float rstd = rsqrtf(squares[0] / a.width + a.eps);
  if (width > 0 && threadIdx.x == 0) {
    a.rstd[index] = rstd;
    if constexpr (centred) a.mean[index] = mean;
  }

  share<T, kept>(width, [&](int i, int c) {
    const Pack<T, N> x = row.at(i, c);
    float weight[N], bias[N];
    read<T>(a.weight, c, width - c, a.vector, weight);
    if constexpr (centred) read<T>(a.bias, c, width - c, a.vector, bias);
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; ++j)
      y.at[j] = narrow<T>((widen(x.at[j]) - mean) * rstd * weight[j] + (centred ? bias[j] : 0.f));
    store(a.y + start + c, y, width - c, a.vector);
  });
}

template <class T>
struct Backward {
  const T *grad, *grad_sum, *x;
  Places places;  // of x
  Values weight;
  const float *mean, *rstd;
  T* grad_x;
  float* parts;
  int64_t rows;
  int width;
  bool vector;
};

// Each group of threads takes every so many-th row and sums its rows' gradients of weight (and bias): in registers if
// kept, else in its own rows of parts, float [1 + centred, groups, width].
template <class T, bool kept, bool centred>
struct Gradients {
  static constexpr int N = kPack<T>, kSums = centred ? 2 : 1;
  float* parts[kSums];
  float sums[kSums][kept ? kKept / N : 1][N] = {};
  bool vector;

  __device__ __forceinline__ Gradients(const Backward<T>& a, int64_t group, int64_t groups) : vector(a.vector) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) parts[k] = a.parts + (k * groups + group) * a.width;
    if constexpr (!kept)
      share<T, kept>(a.width, [&](int, int c) {
        for (int k = 0; k < kSums; ++k) store(parts[k] + c, Pack<float, N>{}, a.width - c, vector);
      });
  }

  __device__ __forceinline__ void add(int k, int i, int column, int width, const float (&values)[N]) {
    Pack<float, N> sum;
    if constexpr (!kept) sum = load<float, N>(parts[k] + column, width - column, vector);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (kept)
        sums[k][i][j] += values[j];
      else
        sum.at[j] += values[j];
    }
    if constexpr (!kept) store(parts[k] + column, sum, width - column, vector);
  }

  __device__ __forceinline__ void finish(int width) {
    if constexpr (kept)
      share<T, kept>(width, [&](int i, int c) {
#pragma unroll
        for (int k = 0; k < kSums; ++k) {
          Pack<float, N> sum;
#pragma unroll
          for (int j = 0; j < N; ++j) sum.at[j] = sums[k][i][j];
          store(parts[k] + c, sum, width - c, vector);
        }
      });
  }
};

// With n = (x - mean) r and g = grad w: grad_x = r (g - mean(g) - n mean(g n)), where RMSNorm has neither mean; for the
// weight grad n, and for the bias grad, summed over rows.
template <class T, bool kept, bool centred>
__global__ void __launch_bounds__(kThreads) backward(const Backward<T> a) {
  constexpr int N = kPack<T>, kSums = centred ? 2 : 1;
  __shared__ float scratch[kSums * kWarp];
  const int64_t groups = int64_t(gridDim.x) * blockDim.y, block = int64_t(blockIdx.x) * blockDim.y;
  Gradients<T, kept, centred> gradients(a, block + threadIdx.y, groups);
  for (int64_t first = block; first < a.rows; first += groups) {  // the same for the block, which has barriers inside
    const int64_t index = first + threadIdx.y, start = index * a.width;
    const int width = index < a.rows ? a.width : 0;
    const Row<T, kept> grad(a.grad + start, width, a.vector), x(a.x + a.places.of(index, a.width), width, a.vector);
    const float rstd = width > 0 ? a.rstd[index] : 0.f, mean = centred && width > 0 ? a.mean[index] : 0.f;
    float sums[kSums] = {};
    share<T, kept>(width, [&](int i, int c) {
      const Pack<T, N> g = grad.at(i, c), from = x.at(i, c);
      float weight[N], up[N], product[N];
      read<T>(a.weight, c, width - c, a.vector, weight);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        up[j] = widen(g.at[j]);
        product[j] = up[j] * ((widen(from.at[j]) - mean) * rstd);
        sums[0] += product[j] * weight[j];
        if constexpr (centred) sums[1] += up[j] * weight[j];
      }
      gradients.add(0, i, c, width, product);
      if constexpr (centred) gradients.add(1, i, c, width, up);
    });
    row_sum(sums, scratch);
    const float dot = sums[0] / a.width, shift = centred ? sums[kSums - 1] / a.width : 0.f;
    share<T, kept>(width, [&](int i, int c) {
      const Pack<T, N> g = grad.at(i, c), from = x.at(i, c);
      float weight[N];
      read<T>(a.weight, c, width - c, a.vector, weight);
      Pack<T, N> more, to;
      if (a.grad_sum) more = load<T, N, Hint::kOnce>(a.grad_sum + start + c, width - c, a.vector);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float normed = (widen(from.at[j]) - mean) * rstd;
        const float found = rstd * (widen(g.at[j]) * weight[j] - shift - normed * dot);
        to.at[j] = narrow<T>(found);
        // rounded before the other gradient is added, as where both come from kernels of their own
        if (a.grad_sum) to.at[j] = narrow<T>(__fadd_rn(widen(to.at[j]), widen(more.at[j])));
      }
      store(a.grad_x + start + c, to, width - c, a.vector);
    });
  }
  gradients.finish(a.width);
}

}  // namespace merak::norm
