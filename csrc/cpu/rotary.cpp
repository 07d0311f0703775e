// Rotary position embedding (Su et al., 2021): the first r features of each head, in pairs, turned by position.
#include "tensor.h"

#include <cstring>

namespace merak {
namespace {

// Of a table that broadcasts to `sizes`, whose last dimension is the head's: the strides of the dimensions before it.
std::vector<int64_t> broadcast_strides(const Tensor& table, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  const int64_t dims = int64_t(sizes.size()), missing = dims - table.dim();
  STD_TORCH_CHECK(missing >= 0, "merak::rotary: cos and sin have more dimensions than x");
  std::vector<int64_t> strides(dims - 1);
  for (int64_t d = missing; d < dims - 1; ++d) {
    const int64_t size = table.size(d - missing);
    STD_TORCH_CHECK(size == 1 || size == sizes[d], "merak::rotary: cos and sin do not broadcast to x");
    strides[d] = size == 1 ? 0 : table.stride(d - missing);
  }
  return strides;
}

// float32 with dense features; the other dimensions as they are.
Tensor as_table(const Tensor& table) {
  const Tensor wide = as_type(table, ScalarType::Float);
  return wide.size(-1) > 1 && wide.stride(-1) != 1 ? torch::stable::contiguous(wide) : wide;
}

template <bool kInterleaved, class T>
void turn(const T* x, const float* cos, const float* sin, float sign, T* to, int64_t half, int64_t width) {
  const int64_t step = kInterleaved ? 2 : 1, apart = kInterleaved ? 1 : half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = widen(x[i * step]), b = widen(x[i * step + apart]), c = cos[i], s = sign * sin[i];
    to[i * step] = narrow<T>(a * c - b * s);
    to[i * step + apart] = narrow<T>(b * c + a * s);
  }
  if (to != x && 2 * half < width) std::memcpy(to + 2 * half, x + 2 * half, (width - 2 * half) * sizeof(T));
}

// Where row `index` of leading dimensions `sizes` begins.
int64_t offset(int64_t index, const int64_t* sizes, const std::vector<int64_t>& strides, int64_t dims) {
  int64_t found = 0;
  for (int64_t d = dims - 1; d >= 0; --d) {
    found += index % sizes[d] * strides[d];
    index /= sizes[d];
  }
  return found;
}

bool side_by_side(const Tensor& tensor) { return tensor.size(-1) < 2 || tensor.stride(-1) == 1; }

// Rows of x, turned, into those of `made`, which is x itself or apart from it.
void turn_rows(const Tensor& made, const Tensor& input, const Tensor& cosines, const Tensor& sines, bool interleaved,
               bool inverse) {
  const int64_t width = input.size(-1), half = cosines.size(-1), before = input.dim() - 1;
  STD_TORCH_CHECK(2 * half <= width && sines.size(-1) == half, "merak::rotary: tables too wide, or of two widths");
  const Tensor x = side_by_side(input) ? input : torch::stable::contiguous(input);
  const Tensor cos = as_table(cosines), sin = as_table(sines);
  const auto sizes = x.sizes(), own = x.strides(), theirs = made.strides();
  const std::vector<int64_t> of_x(own.begin(), own.end() - 1), of_made(theirs.begin(), theirs.end() - 1);
  const std::vector<int64_t> of_cos = broadcast_strides(cos, sizes), of_sin = broadcast_strides(sin, sizes);
  // Rows of the innermost leading dimension are evenly spaced in all four.
  const int64_t inner = before > 0 ? sizes[before - 1] : 1, outer = inner ? rows_of(x) / inner : 0;
  const int64_t dx = before > 0 ? of_x.back() : 0, dm = before > 0 ? of_made.back() : 0;
  const int64_t dc = before > 0 ? of_cos.back() : 0, ds = before > 0 ? of_sin.back() : 0;
  const float sign = inverse ? -1.f : 1.f;
  by_type(x, "rotary", [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = read<T>(x);
    const float *c = read<float>(cos), *s = read<float>(sin);
    T* to = write<T>(made);
    over_rows(outer, inner * width, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const T* in = from + offset(block, sizes.data(), of_x, before - 1);
        const float* in_cos = c + offset(block, sizes.data(), of_cos, before - 1);
        const float* in_sin = s + offset(block, sizes.data(), of_sin, before - 1);
        T* out = to + offset(block, sizes.data(), of_made, before - 1);
        for (int64_t row = 0; row < inner; ++row) {
          if (interleaved)
            turn<true>(in + row * dx, in_cos + row * dc, in_sin + row * ds, sign, out + row * dm, half, width);
          else
            turn<false>(in + row * dx, in_cos + row * dc, in_sin + row * ds, sign, out + row * dm, half, width);
        }
      }
    });
  });
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  Tensor made = empty_as(x);
  turn_rows(made, x, cos, sin, interleaved, inverse);
  return made;
}

void rotary_(Tensor into, const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  check_alike(into, x, "rotary_");
  STD_TORCH_CHECK(side_by_side(into), "merak::rotary_: features side by side expected");
  turn_rows(into, x, cos, sin, interleaved, inverse);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CPU, library) {
  library.impl("rotary", TORCH_BOX(&rotary));
  library.impl("rotary_", TORCH_BOX(&rotary_));
}

}  // namespace merak
