// Collectives of the ranks of one host through shared memory, in two phases: launch, and wait.
//
// Every rank has a ring of slots. A message travels in blocks of at most a slot; blocks are numbered through all
// operations in the order of their launch, which is the same on all ranks, and block t lies in slot t mod slots. A rank
// counts in shared memory the blocks it has published (its data is in its slot), reduced (its part of the result is in
// its slot) and finished (it reads no slot of them any more). Block t may be published once all ranks have finished
// block t - slots. Each count has one writer, so nothing is locked.
//
// launch: numbers the blocks and publishes those that have room. wait: takes the oldest operations up to the one asked
// for, in order, publishing what follows as room appears.
//   all-gather, broadcast, reduce-scatter: read what the others published.
//   all-reduce: two ranks, or a message of one block: everyone reduces all of it. Else everyone reduces a part of each
//   block, and then reads the other parts.
// Reductions go through the ranks in order, so that all ranks, and all runs, have equal bits.
//
// Why this ends. Ranks launch the same operations in the same order, and finish them in that order whatever the order
// of their waits. Look at the first block that some rank cannot finish though all ranks are in a wait for its operation
// or for a later one. All ranks have finished the blocks before it, so its slots are free and all ranks can publish it,
// and then reduce their part, and then finish it: a contradiction. So a wait may be as late as one likes after its
// launch, and behaves at its place like a collective that blocks. The same goes for a launch beyond `slots` operations
// in flight, which first finishes the oldest. What fits into free slots at its launch, and is not reduced in parts,
// needs no more than the launch of the other ranks.
//
// No wait is for ever: it ends when the group is broken by any of its ranks, when a rank that it needs has ended, and
// after a time. Each of these breaks the group for all.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "reduce.h"
#include "segment.h"
#include "waiting.h"

namespace merak {

struct Shape {
  int ranks, slots;
  size_t slot_bytes;
  size_t bytes() const;  // of the segment
};

// A rank's place in its group, and the group as messages name it.
struct Seat {
  int place;
  std::vector<int> ranks;  // of the job, by place
  std::string group;
  bool crowded;  // there are more ranks than cores
};

// How long a wait may take; `interrupted` is called now and then meanwhile and may throw.
struct Limit {
  double seconds;
  std::function<void()> interrupted;
};

class Communicator {
 public:
  // The first rank makes the segment, the others join it once it is there; `token` tells that it is the same one.
  // Errors are std::system_error, or std::runtime_error where the segment is another one.
  static Communicator* create(const std::string& name, uint64_t token, const Shape& shape, const Seat& seat);
  static Communicator* join(const std::string& name, uint64_t token, const Shape& shape, const Seat& seat);
  // Call once all ranks have joined: from here on it is noticed when one of them ends.
  void watch();

  // Each launches and returns the operation's number, from 1 on. Memory must stay, and inputs must not change, until it
  // is done. `bytes`: of what one rank gives, or gets from one rank. All but the result of `broadcast` may be in place.
  uint64_t all_reduce(const char* in, char* out, size_t bytes, Element element, Reduction reduction,
                      const Limit& limit);
  uint64_t reduce_scatter(std::vector<const char*> in, char* out, size_t bytes, Element element, Reduction reduction,
                          const Limit& limit);
  uint64_t all_gather(const char* in, std::vector<char*> out, size_t bytes, const Limit& limit);
  uint64_t broadcast(char* data, size_t bytes, int root, const Limit& limit);

  // Finishes the operations up to `number`. Throws std::runtime_error when the group is broken.
  void wait(uint64_t number, const Limit& limit);
  // Does what can be done without waiting; whether operation `number` is done. Throws as `wait` does.
  bool test(uint64_t number, const Limit& limit);
  uint64_t done() const { return done_.load(std::memory_order_acquire); }

  // Breaks the group: every wait of every rank ends with `reason`.
  void abort(const std::string& reason);
  // Leaves the group; operations that are not done are dropped.
  void close();

 private:
  enum class Kind : uint8_t { all_reduce, reduce_scatter, all_gather, broadcast };

  // What ranks must agree on. Written before a block is published, compared before it is read.
  struct Signature {
    uint64_t what, bytes;
  };

  struct Operation {
    Kind kind;
    Element element;
    Reduction reduction;
    int root;
    std::vector<const char*> in;  // one, or one for each rank
    std::vector<char*> out;       // one, or one from each rank
    size_t bytes, block;          // of one input or output; of what a slot takes of each
    bool in_parts;                // an all-reduce that is reduced in parts
    uint64_t begin, end, next;    // its blocks [begin, end); the first that is not finished
    bool reduced;                 // this rank's part of `next` is
    double launched;
    Signature signature() const;
    std::string text() const;
  };

  struct Counts;
  struct Header;

  Communicator(Segment segment, const Shape& shape, const Seat& seat);

  Header& header() const;
  Counts& counts(int place) const;
  Signature& signature(int place, uint64_t block) const;
  char* slot(int place, uint64_t block) const;

  uint64_t launch(Operation operation, const Limit& limit);
  void finish(uint64_t number, const Limit& limit);
  bool step();
  bool publish_all();
  bool has_room(uint64_t block);
  void publish(const Operation& operation, uint64_t block);
  bool take(Operation& operation);
  void compare(const Operation& operation);
  void reduce_part(const Operation& operation, size_t offset, size_t bytes);
  void read(const Operation& operation, size_t offset, size_t bytes);

  bool lags(int place) const;
  void examine(double since, const Limit& limit);
  void require_sound() const;
  [[noreturn]] void fail(const std::string& reason);
  std::string name(int place) const;

  const Shape shape_;
  const Seat seat_;
  std::mutex mutex_;
  std::optional<Segment> segment_;
  std::vector<bool> watched_;
  std::deque<Operation> queue_;  // launched, not done
  uint64_t launched_ = 0, published_ = 0, finished_ = 0, room_ = 0, numbered_ = 0;
  std::atomic<uint64_t> done_{0};  // operations
};

}  // namespace merak
