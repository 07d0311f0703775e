#include "tensor.h"

namespace merak {
namespace {

constexpr size_t kDims = 6;

// The leading dimensions of x as the launcher wants them: no more than it takes to reach every row of x and of the
// angles, which broadcast.
struct Layout {
  std::vector<int64_t> sizes, x_strides, angle_strides;

  Layout(const Tensor& x, const Tensor& angles) {
    const int64_t missing = x.dim() - angles.dim();
    for (int64_t d = 0; d < x.dim() - 1; ++d) {
      const int64_t size = x.size(d), own = d < missing ? 1 : angles.size(d - missing);
      STD_TORCH_CHECK(own == 1 || own == size, "merak::rotary: cos and sin that broadcast to x expected");
      if (size == 1) continue;
      const int64_t x_stride = x.stride(d), angle_stride = own == 1 ? 0 : angles.stride(d - missing);
      if (!sizes.empty() && x_strides.back() == x_stride * size && angle_strides.back() == angle_stride * size) {
        sizes.back() *= size;
        x_strides.back() = x_stride;
        angle_strides.back() = angle_stride;
      } else {
        sizes.push_back(size);
        x_strides.push_back(x_stride);
        angle_strides.push_back(angle_stride);
      }
    }
  }
};

bool side_by_side(const Tensor& tensor) { return tensor.size(-1) < 2 || tensor.stride(-1) == 1; }

Tensor rotary(const Tensor& input, const Tensor& given_cos, const Tensor& given_sin, bool interleaved, bool inverse) {
  const On on(input);
  Tensor x = side_by_side(input) ? input : dense(input);
  const Tensor cos = operand(given_cos, x, given_sin), sin = operand(given_sin, x, given_cos);
  STD_TORCH_CHECK(cos.dim() <= x.dim() && cos.dim() == sin.dim() && cos.numel() == sin.numel() &&
                      2 * cos.size(-1) <= x.size(-1),
                  "merak::rotary: cos and sin [..., r / 2] for x [..., d], r <= d, expected");
  Layout layout(x, cos);
  if (layout.sizes.size() > kDims) layout = Layout(x = dense(x), cos);
  Tensor y = torch::stable::new_empty(x, x.sizes());
  check(merak_rotary(type_of(x), read(x), read(cos), read(sin), type_of(cos), write(y), int(layout.sizes.size()),
                     layout.sizes.data(), layout.x_strides.data(), layout.angle_strides.data(), x.size(-1),
                     2 * cos.size(-1), interleaved, inverse, on.stream),
        "rotary");
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(merak, CUDA, library) { library.impl("rotary", TORCH_BOX(&rotary)); }

}  // namespace merak
