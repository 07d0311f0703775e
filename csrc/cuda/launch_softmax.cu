#include "launch.h"

#include "kernels/softmax.cuh"

namespace {

using namespace merak;

constexpr int kWarpKeys = 32 * kWarp;  // a row that a warp keeps in registers
constexpr int kBlock = 256, kBlockKeys = 32 * kBlock;
constexpr int kLongBlock = 512;
constexpr size_t kScratch = 64 * sizeof(float);

dim3 block_of(const Scores& scores) { return scores.keys <= kWarpKeys ? dim3(kWarp, 4) : dim3(kBlock, 1); }

dim3 grid_of(const Scores& scores) { return dim3(ceil_div(scores.rows, block_of(scores).y)); }

// Whether 8 values for each thread hold a row, else 32 do.
bool few(const Scores& scores) { return scores.keys <= int(8 * block_of(scores).x); }

template <class T>
int forward(const T* from, T* to, const Scores& scores, void* stream) {
  if (scores.keys > kBlockKeys)
    return launch(masked_softmax_long<T>, dim3(scores.rows), dim3(kLongBlock), kScratch, stream, from, to, scores);
  const auto kernel = few(scores) ? masked_softmax<T, 8 / kPack<T>> : masked_softmax<T, 32 / kPack<T>>;
  return launch(kernel, grid_of(scores), block_of(scores), kScratch, stream, from, to, scores);
}

template <class T>
int backward(const T* grad, const T* probabilities, T* to, const Scores& scores, void* stream) {
  if (scores.keys > kBlockKeys)
    return launch(masked_softmax_backward_long<T>, dim3(scores.rows), dim3(kLongBlock), kScratch, stream, grad,
                  probabilities, to, scores);
  const auto kernel =
      few(scores) ? masked_softmax_backward<T, 8 / kPack<T>> : masked_softmax_backward<T, 32 / kPack<T>>;
  return launch(kernel, grid_of(scores), block_of(scores), kScratch, stream, grad, probabilities, to, scores);
}

// Whether packs of N keys never cross the end of a row, nor, in the mask, a multiple of N bytes.
bool whole_packs(const Scores& scores, int N) {
  const auto address = reinterpret_cast<uintptr_t>(scores.mask);
  bool whole = scores.keys % N == 0 && address % N == 0;
  for (const int64_t stride : {scores.mask_batch, scores.mask_head, scores.mask_query}) whole &= stride % N == 0;
  return whole;
}

bool countable(int64_t rows, int64_t keys) { return rows <= INT32_MAX && keys <= INT32_MAX / 2; }

}  // namespace

extern "C" {

int merak_masked_softmax(int type, const void* scores, const bool* mask, const int64_t* mask_strides, void* to,
                         int64_t batch, int64_t heads, int64_t queries, int64_t keys, double scale, int causal,
                         void* stream) {
  const int64_t rows = batch * heads * queries;
  if (!countable(rows, keys)) return kInvalidValue;
  if (rows == 0 || keys == 0) return 0;
  Scores shape{int(rows), int(heads), int(queries), int(keys), float(scale), causal != 0, false, mask, 0, 0, 0};
  if (mask != nullptr) {
    shape.mask_batch = mask_strides[0];
    shape.mask_head = mask_strides[1];
    shape.mask_query = mask_strides[2];
  }
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    shape.vector = aligned(scores, to) && whole_packs(shape, kPack<T>);
    return forward(static_cast<const T*>(scores), static_cast<T*>(to), shape, stream);
  });
}

int merak_masked_softmax_backward(int type, const void* grad, const void* probabilities, void* to, int64_t matrices,
                                  int64_t queries, int64_t keys, double scale, int causal, void* stream) {
  const int64_t rows = matrices * queries;
  if (!countable(rows, keys)) return kInvalidValue;
  if (rows == 0 || keys == 0) return 0;
  Scores shape{int(rows), 1, int(queries), int(keys), float(scale), causal != 0, false, nullptr, 0, 0, 0};
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    shape.vector = aligned(grad, probabilities, to) && whole_packs(shape, kPack<T>);
    return backward(static_cast<const T*>(grad), static_cast<const T*>(probabilities), static_cast<T*>(to), shape,
                    stream);
  });
}

}  // extern "C"
