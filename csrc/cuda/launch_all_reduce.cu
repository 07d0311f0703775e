#include "launch.h"

#include "kernels/all_reduce.cuh"

namespace {

using namespace merak;

template <class T, int WORLD>
int start(const Peers& peers, const void* from, void* to, int64_t count, bool two_shot, void* stream) {
  const auto kernel = two_shot ? all_reduce<T, WORLD, true> : all_reduce<T, WORLD, false>;
  return launch(kernel, dim3(kPeerBlocks), dim3(kPeerThreads), 0, stream, peers, static_cast<const T*>(from),
                static_cast<T*>(to), count, aligned(from, to));
}

}  // namespace

extern "C" {

int64_t merak_all_reduce_bytes(int64_t capacity) { return kPeerHeader + 2 * capacity; }

int merak_all_reduce(void* const* buffers, int rank, int world, int64_t capacity, const void* from, void* to,
                     int64_t count, int type, int two_shot, double patience, void* stream) {
  const int64_t bytes = count * (type == MERAK_FLOAT ? 4 : 2);
  if (rank < 0 || rank >= world || world > kPeers || capacity % 16 != 0 || bytes > capacity) return kInvalidValue;
  Peers peers{};
  for (int peer = 0; peer < world; ++peer) peers.base[peer] = static_cast<char*>(buffers[peer]);
  peers.rank = rank;
  peers.capacity = capacity;
  peers.patience = uint64_t(patience * 1e9);
  return by_type(type, [&](auto of) {
    using T = typename decltype(of)::type;
    switch (world) {
      case 2:
        return start<T, 2>(peers, from, to, count, two_shot != 0, stream);
      case 4:
        return start<T, 4>(peers, from, to, count, two_shot != 0, stream);
      case 8:
        return start<T, 8>(peers, from, to, count, two_shot != 0, stream);
      default:
        return int(kInvalidValue);
    }
  });
}

}  // extern "C"
