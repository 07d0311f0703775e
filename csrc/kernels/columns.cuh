// Pointwise kernels over [rows, width], and sums over rows.
//
// A thread of a pointwise kernel owns kPack columns and takes every so many-th row. Sums take two steps, and their order
// depends on the sizes and the GPU alone: each group of threads (one y of one block) leaves a row of partial sums, and
// sum_columns adds those up.
#pragma once

#include "merak/pack.h"

namespace merak {

struct Columns {
  int64_t rows, width;
  bool vector;  // addresses of whole packs are aligned

  template <class T>
  __device__ __forceinline__ int64_t first() const {
    return (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kPack<T>;
  }
  __device__ __forceinline__ int64_t group() const { return blockIdx.y * blockDim.y + threadIdx.y; }
  __device__ __forceinline__ int64_t groups() const { return gridDim.y * blockDim.y; }
};

struct Shape {
  dim3 grid, block;
};

// How to launch a pointwise kernel: with a group for every row where there can be, else as many as fill the GPU.
template <class T>
Shape shape_of(int64_t rows, int64_t width, bool summed) {
  const int64_t packs = ceil_div(width, kPack<T>);
  unsigned across = 1;
  while (across < packs && across < 256) across *= 2;
  const int64_t blocks = ceil_div(packs, across), down = 256 / across, most = summed ? 8 * multiprocessors() / blocks : 65535;
  const int64_t needed = ceil_div(rows, down);
  return {dim3(blocks, needed < most ? needed : most > 0 ? most : 1), dim3(across, down)};
}

// Groups of a kernel that sums.
inline int64_t groups_of(int type, int64_t rows, int64_t width) {
  int64_t groups = 0;
  if (rows > 0 && width > 0)
    by_type(type, [&](auto of) {
      const Shape shape = shape_of<typename decltype(of)::type>(rows, width, true);
      groups = int64_t(shape.grid.y) * shape.block.y;
      return 0;
    });
  return groups;
}

// parts float [gridDim.y, count, width] -> out [width], and for blockIdx.y = 1 other [width]: a block of 32 x 32 threads
// per 32 columns.
template <class T>
__global__ void __launch_bounds__(1024)
    sum_columns(const float* __restrict__ parts, T* out, T* other, int64_t count, int64_t width) {
  __shared__ float sums[kWarp][kWarp + 1];
  const int64_t column = int64_t(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0;
  if (column < width) {
    const float* part = parts + blockIdx.y * count * width + column;
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < count; row += kWarp) sum += part[row * width];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
  const int64_t summed = int64_t(blockIdx.x) * kWarp + threadIdx.y;
  if (threadIdx.x == 0 && summed < width) (blockIdx.y ? other : out)[summed] = narrow<T>(sum);
}

template <class T>
int launch_sum_columns(const float* parts, void* out, void* other, int64_t count, int64_t width, void* stream) {
  return launch(sum_columns<T>, dim3(ceil_div(width, kWarp), other ? 2 : 1), dim3(kWarp, kWarp), 0, stream, parts,
                static_cast<T*>(out), static_cast<T*>(other), count, width);
}

}  // namespace merak
