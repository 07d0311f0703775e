// What kernels need of the machine, under nvcc and under the SIMT shim (simt.h) alike: a launch, shared memory whose
// size is known at the launch only, and sums over the threads of a warp or of a row.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#else
#include "simt.h"
#endif

namespace merak {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// launch(kernel, grid, block, shared_bytes, stream, arguments...) -> status, a cudaError_t; multiprocessors() of the
// current device; dynamic_shared<T>(), the launch's shared_bytes, aligned to 16.
#ifdef __CUDACC__

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
           Arguments... arguments) {
  if (shared_bytes > (48u << 10)) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (status != cudaSuccess) return status;
  }
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return cudaGetLastError();
}

inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count > 0 ? count : 1;
}

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ uint4 merak_dynamic_shared[];
  return reinterpret_cast<T*>(merak_dynamic_shared);
}

#else

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void*, Arguments... arguments) {
  return simt::launch(grid, block, shared_bytes, [&] { kernel(arguments...); });
}

inline int multiprocessors() { return 3; }  // few, so that blocks take several rows

template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(simt::machine.shared.get());
}

#endif

constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int bits = kWarp / 2; bits > 0; bits /= 2) value += __shfl_xor_sync(kAllLanes, value, bits);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int bits = kWarp / 2; bits > 0; bits /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, bits));
  return value;
}

// A row belongs to the threads of one threadIdx.y; blockDim.x is a multiple of 32. Sums K values over each row of the
// block, in an order that depends on blockDim.x alone, and gives every thread its row's sums. All threads of the block
// call it; scratch is shared, float [32 * K], and free again on return.
template <int K>
__device__ __forceinline__ void row_sum(float (&value)[K], float* scratch) {
#pragma unroll
  for (int k = 0; k < K; ++k) value[k] = warp_sum(value[k]);
  const int warps = blockDim.x / kWarp, first = threadIdx.y * warps, lane = threadIdx.x % kWarp;
  if (warps == 1) return;
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) scratch[(first + threadIdx.x / kWarp) * K + k] = value[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) value[k] = warp_sum(lane < warps ? scratch[(first + lane) * K + k] : 0.f);
  __syncthreads();
}

// Work for the element type of a launcher's `type`: work(Type<float>()), work(Type<bf16>()) or work(Type<fp16>()).
using bf16 = __nv_bfloat16;
using fp16 = __half;

template <class T>
struct Type {
  using type = T;
};

template <class Work>
int by_type(int type, const Work& work) {
  switch (type) {
    case 0:
      return work(Type<float>());
    case 1:
      return work(Type<bf16>());
    case 2:
      return work(Type<fp16>());
    default:
      return kInvalidValue;
  }
}

constexpr int64_t ceil_div(int64_t count, int64_t by) { return (count + by - 1) / by; }

}  // namespace merak

// The reason behind a launcher's status (csrc/cuda/launch.h).
extern "C" __attribute__((used)) inline const char* merak_error_string(int status) {
#ifdef __CUDACC__
  return cudaGetErrorString(static_cast<cudaError_t>(status));
#else
  return status == 0 ? "no error" : simt::machine.error.empty() ? "invalid argument" : simt::machine.error.c_str();
#endif
}
