#include "launch.h"

#include "kernels/mailbox.cuh"

extern "C" {

int merak_await_counter(const void* counter, int64_t value, double patience, void* stream) {
  return merak::launch(merak::await_counter, dim3(1), dim3(1), 0, stream, static_cast<const uint32_t*>(counter),
                       uint32_t(value), uint64_t(patience * 1e9));
}

int merak_raise_counter(void* counter, int64_t value, void* stream) {
  return merak::launch(merak::raise_counter, dim3(1), dim3(1), 0, stream, static_cast<uint32_t*>(counter),
                       uint32_t(value));
}

}  // extern "C"
