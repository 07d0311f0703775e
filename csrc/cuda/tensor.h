// How the bindings of the CUDA kernels see tensors: through torch's stable ABI, so that one binary serves every
// supported torch. No CUDA header: kernels are behind the C interface of launch.h.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "launch.h"

namespace merak {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The launchers' name of a tensor's element type; Python sends no other types here.
inline int type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return MERAK_FLOAT;
    case ScalarType::BFloat16:
      return MERAK_BFLOAT16;
    case ScalarType::Half:
      return MERAK_HALF;
    default:
      STD_TORCH_CHECK(false, "merak: float32, bfloat16 or float16 expected");
  }
}

inline const void* read(const Tensor& tensor) { return tensor.const_data_ptr(); }

inline const void* read(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

template <class T = void>
T* write(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline Tensor dense(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

inline std::optional<Tensor> dense(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(dense(*tensor)) : std::nullopt;
}

inline Tensor as_type(const Tensor& tensor, ScalarType type) {
  return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

// A small operand, dense and of the type that all of `others` share if kernels for x read that, else of float32.
template <class... Tensors>
Tensor operand(const Tensor& tensor, const Tensor& x, const Tensors&... others) {
  const ScalarType type = tensor.scalar_type();
  const bool known = type == x.scalar_type() && ((others.scalar_type() == type) && ...);
  return dense(as_type(tensor, known ? type : ScalarType::Float));
}

// Sizes without the last one.
inline std::vector<int64_t> leading(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end() - 1};
}

inline int64_t rows_of(const Tensor& tensor) { return tensor.numel() / std::max<int64_t>(1, tensor.size(-1)); }

inline void expect_same(const Tensor& a, const Tensor& b, const char* op) {
  const bool same = a.scalar_type() == b.scalar_type() && a.numel() == b.numel();
  STD_TORCH_CHECK(same, "merak::", op, ": tensors of one type and size expected");
}

// The device of a tensor, current while this lives, and its stream.
class __attribute__((visibility("hidden"))) On {
 public:
  explicit On(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  }

  void* stream = nullptr;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

inline void check(int status, const char* op) {
  STD_TORCH_CHECK(status == 0, "merak::", op, ": ", merak_error_string(status));
}

}  // namespace merak
