// How the CPU kernels see tensors: through torch's stable ABI, so that one binary serves every supported torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
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

// Dense, with the sizes and the type of `like`.
inline Tensor empty_as(const Tensor& like) { return torch::stable::new_empty(like, like.sizes()); }

inline void check_alike(const Tensor& a, const Tensor& b, const char* op) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "merak::", op, ": tensors of one element type expected");
  const auto x = a.sizes(), y = b.sizes();
  STD_TORCH_CHECK(x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin()), "merak::", op,
                  ": tensors of one shape expected");
}

inline void check_count(const Tensor& tensor, int64_t count, const char* op) {
  STD_TORCH_CHECK(tensor.numel() == count, "merak::", op, ": ", count, " elements expected, not ", tensor.numel());
}

// The rows of a tensor [..., width], `stride` elements apart; or, where the reader may have them so, `inner` rows side by
// side, such as the heads of a token in a wider product, and the first of these `stride` elements apart. Those of a copy
// where they do not lie so.
struct Rows {
  Tensor tensor;
  int64_t count, width, stride, inner = 1;

  explicit Rows(const Tensor& from, bool side_by_side = false)
      : tensor(from), count(rows_of(from)), width(from.size(-1)), stride(width) {
    if (from.is_contiguous()) return;
    bool even = width <= 1 || from.stride(-1) == 1;
    int64_t next = -1, repeats = 1;  // the stride of the dimension behind, and its size
    int64_t d = from.dim() - 2;
    for (; side_by_side && d >= 0 && (from.size(d) == 1 || from.stride(d) == inner * width); --d) inner *= from.size(d);
    for (; d >= 0; --d) {
      if (from.size(d) == 1) continue;
      if (next < 0)
        stride = from.stride(d);
      else
        even = even && from.stride(d) == next * repeats;
      next = from.stride(d), repeats = from.size(d);
    }
    if (even) return;
    tensor = torch::stable::contiguous(from);
    stride = width, inner = 1;
  }

  int64_t at(int64_t row) const { return inner == 1 ? row * stride : row / inner * stride + row % inner * width; }

  template <class T>
  const T* data() const {
    return read<T>(tensor);
  }
};

// Asks for a row before its turn comes: what the hardware does by itself ends at every page. Memory that is not there is
// no fault.
template <class T>
inline void fetch(const T* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
}

constexpr int64_t kGrain = 1 << 15;  // elements that are worth waking a thread for

// work(begin, end) over ranges of rows of `width` elements, on torch's own threads.
template <class Work>
void over_rows(int64_t rows, int64_t width, const Work& work) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), work);
}

// `width` sums over rows, the same to the bit for any number of threads: work(begin, end, sums) adds the rows of one
// block to sums of its own, and blocks, which depend on the number of rows only, are added in order.
template <class Work>
std::vector<float> sum_over_rows(int64_t rows, int64_t width, const Work& work) {
  constexpr int64_t kRows = 64, kBlocks = 128;
  const int64_t size = std::max(kRows, (rows + kBlocks - 1) / kBlocks), blocks = (rows + size - 1) / size;
  std::vector<float> sums(std::max<int64_t>(1, blocks) * width);
  torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, kGrain / (size * std::max<int64_t>(1, width))),
                              [&](int64_t first, int64_t last) {
                                for (int64_t block = first; block < last; ++block)
                                  work(block * size, std::min(rows, (block + 1) * size), sums.data() + block * width);
                              });
  for (int64_t block = 1; block < blocks; ++block) {
    const float* more = sums.data() + block * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) sums[i] += more[i];
  }
  sums.resize(width);
  return sums;
}

// float32 values as a vector [count] of an element type, on the device of `like`.
inline Tensor as_vector(const Tensor& like, ScalarType type, const float* values, int64_t count) {
  Tensor made = torch::stable::new_empty(like, std::vector<int64_t>{count}, type);
  by_type(made, "as_vector", [&](auto element) {
    using T = typename decltype(element)::type;
    T* to = write<T>(made);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = narrow<T>(values[i]);
  });
  return made;
}

}  // namespace merak
