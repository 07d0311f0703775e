#include "launch.h"

#include "kernels/rotary.cuh"

using namespace merak;

extern "C" int merak_rotary(int type, const void* x, const void* cos, const void* sin, int angle_type, void* y, int dims,
                            const int64_t* sizes, const int64_t* x_strides, const int64_t* angle_strides,
                            const int64_t* y_strides, int64_t features, int64_t rotated, int interleaved, int inverse, void* stream) {
  if (angle_type != type && angle_type != MERAK_FLOAT) return kInvalidValue;
  if (dims < 0 || dims > rotary::kDims || rotated % 2 != 0 || rotated > features || features > (1 << 30))
    return kInvalidValue;
  int64_t rows = 1;
  for (int d = 0; d < dims; ++d) rows *= sizes[d];
  if (rows >> 32) return kInvalidValue;
  if (rows == 0 || features == 0) return 0;
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    constexpr int N = kPack<T>;
    const bool wide = angle_type == MERAK_FLOAT;
    rotary::Rotary<T> a{static_cast<const T*>(x), {cos, wide}, {sin, wide}, static_cast<T*>(y)};
    a.rows = uint32_t(rows);
    a.dims = dims;
    a.features = int(features);
    a.half = int(rotated / 2);
    a.inverse = inverse != 0;
    a.vector = aligned(x, cos, sin, y) && a.half % N == 0 && a.features % N == 0;
    for (int d = 0; d < dims; ++d) {
      a.sizes[d] = uint32_t(sizes[d]);
      a.x_strides[d] = x_strides[d];
      a.angle_strides[d] = angle_strides[d];
      a.y_strides[d] = y_strides[d];
      a.vector = a.vector && x_strides[d] % N == 0 && angle_strides[d] % N == 0 && y_strides[d] % N == 0;
    }
    unsigned across = 1;
    while (across * N < (interleaved ? 2 : 1) * a.half && across < 256) across *= 2;
    const dim3 block(across, 256 / across);
    const int64_t blocks = ceil_div(rows, block.y), most = 0x7fffffff;
    const dim3 grid(unsigned(blocks < most ? blocks : most));
    return interleaved ? launch(rotary::rotate<T, true>, grid, block, 0, stream, a)
                       : launch(rotary::rotate<T, false>, grid, block, 0, stream, a);
  });
}
