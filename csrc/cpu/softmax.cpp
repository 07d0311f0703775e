// Softmax of scaled scores behind a mask, as in Megatron-LM's fused kernels: a row whose keys are all hidden is zero.
#include "softmax.h"

#include <optional>

namespace merak {
namespace {

constexpr int64_t kLanes = 16;

// Where the row of a query starts in a mask whose extents are the scores' own or 1.
class Mask {
 public:
  Mask(const Tensor& mask, const Tensor& scores) : tensor_(mask) {
    STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool && mask.dim() == 4 && mask.size(3) == scores.size(3),
                    "merak::masked_softmax: a bool mask [1 or b, 1 or n, 1 or s, t] expected");
    if (mask.stride(3) != 1 && mask.size(3) > 1) tensor_ = torch::stable::contiguous(mask);
    for (int d = 0; d < 3; ++d) {
      STD_TORCH_CHECK(mask.size(d) == 1 || mask.size(d) == scores.size(d),
                      "merak::masked_softmax: the mask's extents are not those of the scores, nor 1");
      stride_[d] = tensor_.size(d) == 1 ? 0 : tensor_.stride(d);
    }
    data_ = static_cast<const uint8_t*>(tensor_.const_data_ptr());
  }

  const uint8_t* row(int64_t batch, int64_t head, int64_t query) const {
    return data_ + batch * stride_[0] + head * stride_[1] + query * stride_[2];
  }

 private:
  Tensor tensor_;
  int64_t stride_[3];
  const uint8_t* data_;
};

// out = softmax(scale * x) over the first `count` of `keys`, 0 for the others; `keep` may be null. row: room for `keys`,
// rounded up to kLanes. Loops go on to a multiple of kLanes: a scalar rest takes as long as all of a short row.
template <class T>
void softmax(const T* x, const uint8_t* keep, float scale, int64_t count, int64_t keys, float* row, T* out) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes, end = std::min(padded, keys);
  if (keep) {
#pragma omp simd
    for (int64_t i = 0; i < end; ++i) row[i] = keep[i] ? widen(x[i]) * scale : kHidden;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < end; ++i) row[i] = widen(x[i]) * scale;
  }
  std::fill(row + count, row + padded, kHidden);
  const float from = reference(largest(row, padded));
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < padded; ++i) {
    row[i] = decay(row[i] - from);
    sum += row[i];
  }
  const float share = sum == 0 ? 0.f : 1.f / sum;
#pragma omp simd
  for (int64_t i = 0; i < end; ++i) out[i] = narrow<T>(row[i] * share);
  std::fill(out + count, out + keys, T{});
}

// The keys that row `row` of all rows of [b, n, s, t] may see.
int64_t visible(int64_t row, int64_t queries, int64_t keys, bool causal) {
  return causal ? std::clamp<int64_t>(row % queries + keys - queries + 1, 0, keys) : keys;
}

Tensor masked_softmax(const Tensor& given, std::optional<Tensor> mask, double scale, bool causal) {
  STD_TORCH_CHECK(given.dim() == 4, "merak::masked_softmax: scores [b, n, s, t] expected");
  const Tensor scores = dense(given);
  const int64_t heads = scores.size(1), queries = scores.size(2), keys = scores.size(3);
  const std::optional<Mask> hidden = mask ? std::optional<Mask>(Mask(*mask, scores)) : std::nullopt;
  Tensor out = torch::stable::empty_like(scores);
  by_type(scores, "masked_softmax", [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = read<T>(scores);
    T* to = write<T>(out);
    over_rows(scores.numel() / std::max<int64_t>(1, keys), keys, [&](int64_t begin, int64_t end) {
      std::vector<float> room(keys + kLanes);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t count = visible(row, queries, keys, causal), head = row / queries;
        const uint8_t* keep = hidden ? hidden->row(head / heads, head % heads, row % queries) : nullptr;
        fetch(from + (row + 1) * keys, count);
        softmax(from + row * keys, keep, float(scale), count, keys, room.data(), to + row * keys);
      }
    });
  });
  return out;
}

// scale p (grad - sum of p grad): zero where p is, so it needs no mask.
Tensor masked_softmax_backward(const Tensor& upstream, const Tensor& probabilities, double scale, bool causal) {
  const Tensor grad = dense(upstream), part = dense(probabilities);
  const int64_t queries = part.size(2), keys = part.size(3);
  Tensor out = torch::stable::empty_like(part);
  by_type(part, "masked_softmax_backward", [&](auto type) {
    using T = typename decltype(type)::type;
    const T *g = read<T>(grad), *p = read<T>(part);
    T* to = write<T>(out);
    over_rows(part.numel() / std::max<int64_t>(1, keys), keys, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T *up = g + row * keys, *share = p + row * keys;
        T* into = to + row * keys;
        const int64_t count = visible(row, queries, keys, causal);
        fetch(up + keys, count);
        fetch(share + keys, count);
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < count; ++i) dot += widen(up[i]) * widen(share[i]);
        const float factor = float(scale);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) into[i] = narrow<T>(widen(share[i]) * (widen(up[i]) - dot) * factor);
        std::fill(into + count, into + keys, T{});
      }
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CPU, library) {
  library.impl("masked_softmax", TORCH_BOX(&masked_softmax));
  library.impl("masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
}

}  // namespace merak
