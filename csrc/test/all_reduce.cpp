// Runs the all-reduce of kernels/all_reduce.cuh on threads of the host, to be watched by ThreadSanitizer: a thread per
// block of every rank, blocks of one thread, ranks that start each call at different times. Prints what went wrong.
//
//     ./all_reduce CALLS SEED          compiled with -DRANKS=2, 4 or 8
#include "kernels/all_reduce.cuh"

#include "test/host_signal.h"

#include <random>
#include <thread>

namespace {

using namespace merak;

constexpr int kBlocks = 2;
constexpr int64_t kCapacity = 1 << 10;

struct Team {
  int block;
  int thread() const { return 0; }
  int threads() const { return 1; }
  int number() const { return block; }
  int count() const { return kBlocks; }
  void sync() const {}
};

// What every rank does in a call: all agree, as the ranks of a job do.
struct Call {
  int64_t count;
  bool two_shot;
  int offset;  // of the message from an address that packs could use
};

std::vector<Call> plan(int calls, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Call> found;
  for (int call = 0; call < calls; ++call)
    found.push_back({int64_t(random() % (kCapacity / sizeof(float) + 1)), random() % 2 == 0, int(random() % 2)});
  return found;
}

float value(int rank, int call, int64_t i) { return float((rank + 1) * (call % 7 + 1)) + float(i % 5); }

int run_rank(const Peers& peers, const std::vector<Call>& calls, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> message(kCapacity / sizeof(float) + 4);
  for (int number = 0; number < int(calls.size()); ++number) {
    const Call& call = calls[number];
    float* data = message.data() + call.offset;
    for (int64_t i = 0; i < call.count; ++i) data[i] = value(peers.rank, number, i);
    for (unsigned turn = random() % 4; turn > 0; --turn) sched_yield();
    std::vector<std::thread> blocks;
    for (int block = 0; block < kBlocks; ++block)
      blocks.emplace_back([&, block] {
        const bool vector = aligned(data);
        if (call.two_shot) {
          two_shot<float, RANKS>(Team{block}, peers, data, data, call.count, vector);
        } else {
          one_shot<float, RANKS>(Team{block}, peers, data, data, call.count, vector);
        }
      });
    for (std::thread& block : blocks) block.join();
    for (int64_t i = 0; i < call.count; ++i) {
      float sum = 0;
      for (int rank = 0; rank < RANKS; ++rank) sum += value(rank, number, i);
      if (data[i] == sum) continue;
      std::printf("rank %d, call %d, element %ld: %g, not %g\n", peers.rank, number, long(i), data[i], sum);
      return 1;
    }
  }
  return 0;
}

}  // namespace

int main(int, char** arguments) {
  const unsigned seed = std::atoi(arguments[2]);
  const std::vector<Call> calls = plan(std::atoi(arguments[1]), seed);
  Peers peers{};
  peers.capacity = kCapacity;
  peers.patience = 20000000000u;
  for (int rank = 0; rank < RANKS; ++rank) {
    const size_t bytes = kPeerHeader + 2 * kCapacity;
    peers.base[rank] = static_cast<char*>(std::aligned_alloc(16, bytes));
    std::memset(peers.base[rank], 0, bytes);
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < RANKS; ++rank)
    ranks.emplace_back([&, rank] {
      Peers own = peers;
      own.rank = rank;
      if (run_rank(own, calls, seed + rank) != 0) std::_Exit(1);  // its peers would wait for it
    });
  for (std::thread& rank : ranks) rank.join();
  return 0;
}
