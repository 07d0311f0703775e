#include "launch.h"

#include "kernels/cross_entropy.cuh"

namespace {

using namespace merak;

constexpr int kThreads = 256;
constexpr size_t kScratch = 64 * sizeof(float);

bool countable(int64_t rows, int64_t columns) { return rows <= INT32_MAX && columns <= INT32_MAX / 2; }

}  // namespace

extern "C" {

int merak_cross_entropy_stats(int type, const void* logits, const int64_t* target, float* stats, int64_t rows,
                              int64_t stride, int64_t start, int64_t classes, int smoothing, void* stream) {
  if (!countable(rows, classes)) return kInvalidValue;
  if (rows == 0) return 0;
  const Shard shard{stride, start, int(classes), int(classes)};
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    const auto kernel = smoothing ? cross_entropy_stats<T, true> : cross_entropy_stats<T, false>;
    return launch(kernel, dim3(rows), dim3(kThreads), kScratch, stream, static_cast<const T*>(logits), target, stats,
                  shard);
  });
}

int merak_cross_entropy_grad(int type, const void* logits, void* to, const int64_t* target, const float* stats,
                             const float* grad, int terms, int64_t rows, int64_t columns, int64_t stride,
                             int64_t to_stride, int64_t start, int64_t classes, void* stream) {
  if (!countable(rows, columns) || (terms != 3 && terms != 5)) return kInvalidValue;
  if (rows == 0 || columns == 0) return 0;
  const Shard shard{stride, start, int(classes), int(columns)};
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    return launch(cross_entropy_grad<T>, dim3(rows), dim3(kThreads), 0, stream, static_cast<const T*>(logits),
                  static_cast<T*>(to), to_stride, target, stats, grad, terms, shard);
  });
}

int merak_exponentiate(int type, void* logits, const int64_t* target, float* loss, float* total, int64_t rows,
                       int64_t columns, int64_t stride, int64_t classes, void* stream) {
  if (!countable(rows, columns)) return kInvalidValue;
  if (rows == 0 || columns == 0) return 0;
  const Shard shard{stride, 0, int(classes), int(columns)};
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    return launch(exponentiate<T>, dim3(rows), dim3(kThreads), kScratch, stream, static_cast<T*>(logits), target,
                  loss, total, shard);
  });
}

}  // extern "C"
