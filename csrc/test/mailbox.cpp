// Sends messages through the counters of kernels/mailbox.cuh between two threads of the host, to be watched by
// ThreadSanitizer: a ring of slots, copied in the copy engine's place. Prints what went wrong.
//
//     ./mailbox MESSAGES SEED
//
// Seed 0: every message is sent once the receiver waits for it. Seed 1: every message is taken once the sender waits
// for its slot. These two leave nothing to chance. Others: both dawdle at random.
#include "kernels/mailbox.cuh"

#include "test/host_signal.h"

#include <random>
#include <thread>

namespace {

using namespace merak;

constexpr int kSlots = 3, kSize = 64;
constexpr uint32_t kFirst = 0xfffffff0u;  // so that the counters wrap around
constexpr uint64_t kPatience = 20000000000u;

struct Mailbox {
  uint32_t put = kFirst, taken = kFirst;
  uint32_t slot[kSlots][kSize] = {};
};

enum Order { kSenderLast, kReceiverLast, kRandom };

struct Job {
  Mailbox box;
  int messages;
  unsigned seed;
  Order order;
  signal::Place sender, receiver;
};

void dawdle(std::mt19937& random) {
  for (unsigned turn = random() % 4; turn > 0; --turn) sched_yield();
}

// Returns once the other thread has waited at a message.
void let_wait(const signal::Place& other, int number) {
  while (other.waited.load(std::memory_order_relaxed) < number) sched_yield();
}

void send(Job& job) {
  std::mt19937 random(job.seed);
  signal::place = &job.sender;
  uint32_t message[kSize];
  for (int number = 0; number < job.messages; ++number) {
    job.sender.number = number;
    for (int i = 0; i < kSize; ++i) message[i] = number * kSize + i;
    if (job.order == kRandom) dawdle(random);
    await_counter(&job.box.taken, kFirst + number + 1 - kSlots, kPatience);
    if (job.order == kSenderLast) let_wait(job.receiver, number);
    for (int i = 0; i < kSize; ++i) job.box.slot[number % kSlots][i] = message[i];
    raise_counter(&job.box.put, kFirst + number + 1);
  }
}

int receive(Job& job) {
  std::mt19937 random(job.seed + 1);
  signal::place = &job.receiver;
  uint32_t message[kSize];
  for (int number = 0; number < job.messages; ++number) {
    job.receiver.number = number;
    if (job.order == kRandom) dawdle(random);
    const int blocked = number + kSlots;  // the message that finds no slot until this one is taken
    if (job.order == kReceiverLast && blocked < job.messages) let_wait(job.sender, blocked);
    await_counter(&job.box.put, kFirst + number + 1, kPatience);
    for (int i = 0; i < kSize; ++i) message[i] = job.box.slot[number % kSlots][i];
    raise_counter(&job.box.taken, kFirst + number + 1);
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
  Job job;
  job.messages = std::atoi(arguments[1]);
  job.seed = std::atoi(arguments[2]);
  job.order = Order(job.seed < kRandom ? job.seed : kRandom);
  std::thread sender([&] { send(job); });
  const int status = receive(job);
  if (status != 0) std::_Exit(status);  // the sender would wait
  sender.join();
  return 0;
}
