// Sends messages through the counters of kernels/mailbox.cuh between two threads of the host, to be watched by
// ThreadSanitizer: a ring of slots, copied in the copy engine's place. Prints what went wrong.
//
//     ./mailbox MESSAGES SEED
#include "kernels/mailbox.cuh"

#include "test/host_signal.h"

#include <random>
#include <thread>

namespace {

constexpr int kSlots = 3, kSize = 64;
constexpr uint32_t kFirst = 0xfffffff0u;  // so that the counters wrap around
constexpr uint64_t kPatience = 20000000000u;

struct Mailbox {
  uint32_t put = kFirst, taken = kFirst;
  uint32_t slot[kSlots][kSize] = {};
};

void dawdle(std::mt19937& random) {
  for (unsigned turn = random() % 4; turn > 0; --turn) sched_yield();
}

void send(Mailbox& box, int messages, unsigned seed) {
  std::mt19937 random(seed);
  uint32_t message[kSize];
  for (int number = 0; number < messages; ++number) {
    for (int i = 0; i < kSize; ++i) message[i] = number * kSize + i;
    dawdle(random);
    merak::await_counter(&box.taken, kFirst + number + 1 - kSlots, kPatience);
    for (int i = 0; i < kSize; ++i) box.slot[number % kSlots][i] = message[i];
    merak::raise_counter(&box.put, kFirst + number + 1);
  }
}

int receive(Mailbox& box, int messages, unsigned seed) {
  std::mt19937 random(seed + 1);
  uint32_t message[kSize];
  for (int number = 0; number < messages; ++number) {
    dawdle(random);
    merak::await_counter(&box.put, kFirst + number + 1, kPatience);
    for (int i = 0; i < kSize; ++i) message[i] = box.slot[number % kSlots][i];
    merak::raise_counter(&box.taken, kFirst + number + 1);
    for (int i = 0; i < kSize; ++i) {
      if (message[i] == uint32_t(number * kSize + i)) continue;
      std::printf("message %d, element %d: %u\n", number, i, message[i]);
      return 1;
    }
  }
  return 0;
}

}  // namespace

int main(int, char** arguments) {
  const int messages = std::atoi(arguments[1]);
  const unsigned seed = std::atoi(arguments[2]);
  Mailbox box;
  std::thread sender([&] { send(box, messages, seed); });
  const int status = receive(box, messages, seed);
  if (status != 0) std::_Exit(status);  // the sender would wait
  sender.join();
  return 0;
}
