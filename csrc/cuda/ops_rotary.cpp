#include "tensor.h"

namespace merak {
namespace {

constexpr size_t kDims = 6;

// The leading dimensions of x as the launcher wants them: no more than it takes to reach every row of x, of y, and of the
// angles, which broadcast.
struct Layout {
  std::vector<int64_t> sizes, x_strides, angle_strides, y_strides;

  Layout(const Tensor& x, const Tensor& angles, const Tensor& y) {
    const int64_t missing = x.dim() - angles.dim();
    for (int64_t d = 0; d < x.dim() - 1; ++d) {
      const int64_t size = x.size(d), own = d < missing ? 1 : angles.size(d - missing);
      STD_TORCH_CHECK(own == 1 || own == size, "merak::rotary: cos and sin that broadcast to x expected");
      if (size == 1) continue;
      const int64_t x_stride = x.stride(d), y_stride = y.stride(d);
      const int64_t angle_stride = own == 1 ? 0 : angles.stride(d - missing);
      if (!sizes.empty() && x_strides.back() == x_stride * size && angle_strides.back() == angle_stride * size &&
          y_strides.back() == y_stride * size) {
        sizes.back() *= size;
        x_strides.back() = x_stride;
        angle_strides.back() = angle_stride;
        y_strides.back() = y_stride;
      } else {
        sizes.push_back(size);
        x_strides.push_back(x_stride);
        angle_strides.push_back(angle_stride);
        y_strides.push_back(y_stride);
      }
    }
  }
};

bool side_by_side(const Tensor& tensor) { return tensor.size(-1) < 2 || tensor.stride(-1) == 1; }

void turn(const Tensor& y, const Tensor& input, const Tensor& given_cos, const Tensor& given_sin, bool interleaved,
          bool inverse) {
  const On on(input);
  Tensor x = side_by_side(input) ? input : dense(input);
  const Tensor cos = operand(given_cos, x, given_sin), sin = operand(given_sin, x, given_cos);
  STD_TORCH_CHECK(cos.dim() <= x.dim() && cos.dim() == sin.dim() && cos.numel() == sin.numel() &&
                      2 * cos.size(-1) <= x.size(-1),
                  "merak::rotary: cos and sin [..., r / 2] for x [..., d], r <= d, expected");
  Layout layout(x, cos, y);
  if (layout.sizes.size() > kDims) layout = Layout(x = dense(x), cos, y);
  check(merak_rotary(type_of(x), read(x), read(cos), read(sin), type_of(cos), write(y), int(layout.sizes.size()),
                     layout.sizes.data(), layout.x_strides.data(), layout.angle_strides.data(), layout.y_strides.data(),
                     x.size(-1), 2 * cos.size(-1), interleaved, inverse, on.stream),
        "rotary");
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  Tensor y = torch::stable::new_empty(x, x.sizes());
  turn(y, x, cos, sin, interleaved, inverse);
  return y;
}

void rotary_(Tensor into, const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  expect_same(into, x, "rotary_");
  STD_TORCH_CHECK(into.dim() == x.dim() && side_by_side(into), "merak::rotary_: features side by side expected");
  turn(into, x, cos, sin, interleaved, inverse);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CUDA, library) {
  library.impl("rotary", TORCH_BOX(&rotary));
  library.impl("rotary_", TORCH_BOX(&rotary_));
}

}  // namespace merak
