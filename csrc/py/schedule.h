// A pipeline schedule as arrays: what pipeline_parallel/ops.py holds as objects, and the rules of order.py and passes.py.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace merak::pipeline {

enum Kind : uint8_t { F, B, W, R, SEND_F, RECV_F, SEND_B, RECV_B };
constexpr int kKinds = 8;

inline bool computes(uint8_t kind) { return kind < SEND_F; }

struct Op {
  int32_t stage;
  int32_t microbatch;
  uint8_t kind;
};

struct Needs {
  int64_t ops[3];
  int count = 0;

  void add(int64_t op) { ops[count++] = op; }
};

// Who computes, sends and receives what, in which order. Ops are numbered by kind, stage and micro-batch.
class Table {
 public:
  int64_t stages = 0, microbatches = 0, ranks = 0;
  bool communicates = false;
  std::vector<int32_t> home;      // the rank of each stage
  std::vector<Op> ops;            // rank after rank, entry after entry
  std::vector<int64_t> entries;   // where the ops of each entry start, and the end
  std::vector<int64_t> programs;  // where the entries of each rank start, and the end

  int64_t numbers() const { return kKinds * stages * microbatches; }

  int64_t number(int kind, int64_t stage, int64_t microbatch) const {
    return (kind * stages + stage) * microbatches + microbatch;
  }

  int64_t number(const Op& op) const { return number(op.kind, op.stage, op.microbatch); }

  bool crosses(int64_t stage, int64_t neighbour) const { return home[stage] != home[neighbour]; }

  // What must be over before an op starts, in the order in which order.py names it.
  Needs needs(const Op& op) const {
    Needs found;
    const int64_t s = op.stage, k = op.microbatch;
    switch (op.kind) {
      case F:
        if (s > 0 && communicates && crosses(s, s - 1)) {
          found.add(number(RECV_F, s, k));
          found.add(number(SEND_F, s - 1, k));
        } else if (s > 0) {
          found.add(number(F, s - 1, k));
        }
        break;
      case B:
        found.add(number(F, s, k));
        if (s < stages - 1 && communicates && crosses(s, s + 1)) {
          found.add(number(RECV_B, s, k));
          found.add(number(SEND_B, s + 1, k));
        } else if (s < stages - 1) {
          found.add(number(B, s + 1, k));
        }
        break;
      case W:
      case SEND_B:
        found.add(number(B, s, k));
        break;
      case R:
      case SEND_F:
        found.add(number(F, s, k));
        break;
      default:
        break;
    }
    return found;
  }

  // Calls visit(rank, entry) for every entry, in the order of execution_order in order.py; false if the ranks wait for
  // each other, or for what never runs.
  template <class Visit>
  bool walk(const Visit& visit) const {
    std::vector<uint8_t> done(numbers());
    std::vector<int32_t> first_waiting(numbers(), -1), next_waiting(ranks, -1);
    std::vector<int64_t> position(programs.begin(), programs.end() - 1);
    std::deque<int32_t> ready;
    for (int64_t rank = 0; rank < ranks; ++rank) ready.push_back(int32_t(rank));
    int64_t left = int64_t(entries.size()) - 1;
    while (!ready.empty()) {
      const int32_t rank = ready.front();
      ready.pop_front();
      for (int64_t& entry = position[rank]; entry < programs[rank + 1]; ++entry, --left) {
        const int64_t missing = first_missing(entry, done);
        if (missing >= 0) {
          int32_t* last = &first_waiting[missing];
          while (*last >= 0) last = &next_waiting[*last];
          *last = rank;
          break;
        }
        visit(rank, entry);
        for (int64_t i = entries[entry]; i < entries[entry + 1]; ++i) {
          const int64_t op = number(ops[i]);
          done[op] = 1;
          for (int32_t waiter = first_waiting[op]; waiter >= 0;) {
            ready.push_back(waiter);
            const int32_t next = next_waiting[waiter];
            next_waiting[waiter] = -1;
            waiter = next;
          }
          first_waiting[op] = -1;
        }
      }
    }
    return left == 0;
  }

  // Whether check.py accepts the schedule.
  bool runs() const;

  // The schedule with its sends and receives, as add_communication in passes.py places them; of one that runs and has none.
  Table with_communication() const;

  // The most micro-batches that each stage holds at once, as peak_in_flight in check.py counts them.
  std::vector<int64_t> peak_in_flight() const;

 private:
  int64_t first_missing(int64_t entry, const std::vector<uint8_t>& done) const {
    for (int64_t i = entries[entry]; i < entries[entry + 1]; ++i) {
      const Needs found = needs(ops[i]);
      for (int each = 0; each < found.count; ++each)
        if (!done[found.ops[each]]) return found.ops[each];
    }
    return -1;
  }

  bool places(std::vector<int64_t>& place) const;
  bool sums_in_order(const std::vector<int64_t>& place) const;
  bool paired(const std::vector<int64_t>& place) const;
  bool channels_agree() const;
};

// The wires, one for each pair of ranks with a message from the one to the other, and which wire carries what.
struct Wires {
  explicit Wires(const Table& table);

  std::vector<std::pair<int32_t, int32_t>> ends;  // of each wire: source and destination
  std::vector<int32_t> forward, backward;         // of each boundary: the wire of activations, of gradients

  // The wire that a send or receive belongs to.
  int32_t of(const Op& op) const {
    const bool activation = op.kind == SEND_F || op.kind == RECV_F;
    const int64_t boundary = op.kind == SEND_F || op.kind == RECV_B ? op.stage : op.stage - 1;
    return activation ? forward[boundary] : backward[boundary];
  }
};

}  // namespace merak::pipeline
