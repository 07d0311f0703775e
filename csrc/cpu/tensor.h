// How the CPU kernels see tensors: through torch's stable ABI, so that one binary serves every supported torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "vector.h"

namespace merak {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
struct Type {
  using type = T;
};

// Calls work(Type<T>) with the element type of a tensor; Python sends no other types here.
template <class Work>
void by_type(const Tensor& tensor, const char* op, const Work& work) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return work(Type<float>());
    case ScalarType::BFloat16:
      return work(Type<bf16>());
    case ScalarType::Half:
      return work(Type<fp16>());
    default:
      STD_TORCH_CHECK(false, "merak::", op, ": float32, bfloat16 or float16 expected");
  }
}

template <class T>
const T* read(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* write(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline Tensor dense(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

// A small tensor (weights of a norm, a bias) as dense float32.
inline Tensor as_float(const Tensor& tensor) {
  return dense(tensor.scalar_type() == ScalarType::Float ? tensor : torch::stable::to(tensor, ScalarType::Float));
}

inline Tensor as_type(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

// Sizes without the last one.
inline std::vector<int64_t> leading(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end() - 1};
}

inline int64_t rows_of(const Tensor& tensor) { return tensor.numel() / std::max<int64_t>(1, tensor.size(-1)); }

constexpr int64_t kGrain = 1 << 15;  // elements that are worth waking a thread for

// work(begin, end) over ranges of rows of `width` elements, on torch's own threads.
template <class Work>
void over_rows(int64_t rows, int64_t width, const Work& work) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), work);
}

constexpr int64_t kBlockRows = 64;

// Sums over rows, the same to the bit for any number of threads: work(begin, end, sums) adds the rows of one block to
// its own `width` sums, and blocks are added in order. Returns float32 [width].
template <class Work>
Tensor sum_over_rows(const Tensor& like, int64_t rows, int64_t width, const Work& work) {
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  Tensor total = torch::stable::new_zeros(like, {width}, ScalarType::Float);
  std::vector<float> parts(blocks * width);
  torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, kGrain / (kBlockRows * std::max<int64_t>(1, width))),
                              [&](int64_t first, int64_t last) {
                                for (int64_t block = first; block < last; ++block)
                                  work(block * kBlockRows, std::min(rows, (block + 1) * kBlockRows),
                                       parts.data() + block * width);
                              });
  float* sum = write<float>(total);
  for (int64_t block = 0; block < blocks; ++block) {
    const float* part = parts.data() + block * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) sum[i] += part[i];
  }
  return total;
}

}  // namespace merak
