// What orders messages that the copy engine carries between ranks: counters of what was put into a mailbox and of what
// was taken out, each raised on one device and awaited on another. Between the two kernels a stream has its copy.
//
//     sender     await taken | copy into the peer's slot | raise put
//     receiver   await put   | copy out of the own slot  | raise taken
#pragma once

#include "merak/signal.h"

namespace merak {

__global__ void await_counter(const uint32_t* counter, uint32_t value, uint64_t patience) {
  signal::await(counter, value, patience);
}

__global__ void raise_counter(uint32_t* counter, uint32_t value) { signal::release(counter, value); }

}  // namespace merak
