// The clock of a schedule: simulate in pipeline_parallel/simulate.py, its twin, with the same numbers added in the same
// order.
#include "exact.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "read.h"
#include "schedule.h"

namespace py = pybind11;

namespace merak {

using namespace pipeline;

namespace {

struct Costs {
  std::vector<double> forward, backward, weight, recompute, transfer, latency;
};

struct Event {
  int32_t rank;
  Op op;
  double start, end;
  int32_t part, parts;
};

struct Transfer {
  Op send;
  int32_t source, destination;
  double start, end;
};

// The messages of one rank to another: one at a time, in the order in which they become ready.
struct Wire {
  std::vector<int64_t> sent;  // indices of ops, in the order of sending
  size_t next = 0;            // the first of them that nobody has asked for
  std::vector<int64_t> read;  // those before it that are not delivered
  double free = 0.0;
  std::vector<Transfer> delivered;
};

class Clock {
 public:
  Clock(const Table& table, const Costs& costs, double overlap)
      : table_(table), costs_(costs), overlap_(overlap), wires_(table), state_(wires_.ends.size()), is_used_(wires_.ends.size()),
        over_(table.numbers()), arrived_(table.numbers()), posted_(table.numbers()), is_delivered_(table.numbers()),
        place_(table.numbers(), -1), clock_(table.ranks) {
    busy.resize(table.ranks);
    for (size_t i = 0; i < table.ops.size(); ++i) place_[table.number(table.ops[i])] = int64_t(i);
  }

  // False where the ranks wait for each other.
  bool run() {
    const bool through = table_.walk([&](int32_t rank, int64_t entry) {
      const Op& first = table_.ops[table_.entries[entry]];
      if (computes(first.kind)) {
        compute(rank, entry);
      } else {
        post(rank, first);
      }
    });
    makespan = *std::max_element(clock_.begin(), clock_.end());
    return through;
  }

  // Wire after wire, in the order of their first messages.
  std::vector<Transfer> transfers() const {
    std::vector<Transfer> all;
    for (const int32_t wire : used_) all.insert(all.end(), state_[wire].delivered.begin(), state_[wire].delivered.end());
    return all;
  }

  double makespan = 0.0;
  std::vector<double> busy;
  std::vector<Event> events;

 private:
  double seconds(const Op& op) const {
    const int64_t s = op.stage, k = op.microbatch;
    if (op.kind == F) return costs_.forward[s];
    if (op.kind == W) return costs_.weight[s];
    if (op.kind == R) return costs_.recompute[s];
    const double weight = place_[table_.number(W, s, k)] >= 0 ? costs_.weight[s] : 0.0;
    const double recompute = place_[table_.number(R, s, k)] >= 0 ? 0.0 : costs_.recompute[s];
    return costs_.backward[s] - weight + recompute;
  }

  void post(int32_t rank, const Op& op) {
    const int32_t wire = wires_.of(op);
    if (!std::exchange(is_used_[wire], 1)) used_.push_back(wire);
    const int64_t number = table_.number(op);
    over_[number] = clock_[rank];
    if (op.kind == SEND_F || op.kind == SEND_B) {
      state_[wire].sent.push_back(number);
    } else {
      posted_[counterpart(op)] = 1;
    }
  }

  int64_t counterpart(const Op& receive) const {
    return receive.kind == RECV_F ? table_.number(SEND_F, receive.stage - 1, receive.microbatch)
                                  : table_.number(SEND_B, receive.stage + 1, receive.microbatch);
  }

  double receive_posted(const Op& send) const {
    return send.kind == SEND_F ? over_[table_.number(RECV_F, send.stage + 1, send.microbatch)]
                               : over_[table_.number(RECV_B, send.stage - 1, send.microbatch)];
  }

  const Op& op(int64_t number) const { return table_.ops[place_[number]]; }

  void compute(int32_t rank, int64_t entry) {
    const int64_t begin = table_.entries[entry], end = table_.entries[entry + 1];
    double start = clock_[rank];
    for (int64_t i = begin; i < end; ++i) {
      const Needs needs = table_.needs(table_.ops[i]);
      for (int each = 0; each < needs.count; ++each) {
        const Op& need = op(needs.ops[each]);
        const bool message = need.kind == SEND_F || need.kind == SEND_B;
        start = std::max(start, message ? arrival(needs.ops[each]) : over_[needs.ops[each]]);
      }
    }
    double total = 0.0, longest = seconds(table_.ops[begin]);
    for (int64_t i = begin; i < end; ++i) {
      const double each = seconds(table_.ops[i]);
      total += each;
      longest = std::max(longest, each);
    }
    const double duration = total - overlap_ * (total - longest);
    clock_[rank] = start + duration;
    busy[rank] += duration;
    for (int64_t i = begin; i < end; ++i) {
      over_[table_.number(table_.ops[i])] = clock_[rank];
      events.push_back({rank, table_.ops[i], start, clock_[rank], int32_t(i - begin), int32_t(end - begin)});
    }
  }

  // When the message of a send, whose receive is posted, has arrived.
  double arrival(int64_t wanted) {
    if (is_delivered_[wanted]) return arrived_[wanted];
    Wire& wire = state_[wires_.of(op(wanted))];
    if (std::find(wire.read.begin(), wire.read.end(), wanted) == wire.read.end())
      do wire.read.push_back(wire.sent[wire.next]);
      while (wire.sent[wire.next++] != wanted);
    ready_.clear();
    for (const int64_t send : wire.read)
      if (posted_[send]) ready_.emplace_back(std::max(over_[send], receive_posted(op(send))), send);
    std::stable_sort(ready_.begin(), ready_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [time, send] : ready_) {
      deliver(wire, send, time);
      if (send == wanted) break;
    }
    const auto gone = [&](int64_t send) { return is_delivered_[send] != 0; };
    wire.read.erase(std::remove_if(wire.read.begin(), wire.read.end(), gone), wire.read.end());
    return arrived_[wanted];
  }

  void deliver(Wire& wire, int64_t number, double ready) {
    const Op& send = op(number);
    const int64_t boundary = send.kind == SEND_F ? send.stage : send.stage - 1;
    const double start = std::max(ready, wire.free);
    wire.free = start + costs_.transfer[boundary];
    arrived_[number] = wire.free + costs_.latency[boundary];
    is_delivered_[number] = 1;
    const auto [source, destination] = wires_.ends[wires_.of(send)];
    wire.delivered.push_back({send, source, destination, start, arrived_[number]});
  }

  const Table& table_;
  const Costs& costs_;
  const double overlap_;
  const Wires wires_;
  std::vector<Wire> state_;
  std::vector<uint8_t> is_used_;
  std::vector<int32_t> used_;
  std::vector<double> over_, arrived_;  // by number: when an op was over or a receive posted; when a message arrived
  std::vector<uint8_t> posted_, is_delivered_;
  std::vector<int64_t> place_;
  std::vector<double> clock_;
  std::vector<std::pair<double, int64_t>> ready_;
};

template <class Row, class Get>
py::list column(const std::vector<Row>& rows, const Get& get) {
  py::list values(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) values[i] = get(rows[i]);
  return values;
}

// A simulated step, as columns that Python makes objects of when it is asked for them.
struct Simulated {
  Table table;
  double makespan;
  std::vector<double> busy;
  std::vector<int64_t> peak_in_flight;
  std::vector<Event> found;
  std::vector<Transfer> messages;

  // rank, stage, kind, micro-batch, start, end, part, parts
  py::tuple events() const {
    return py::make_tuple(
        column(found, [](const Event& e) { return e.rank; }), column(found, [](const Event& e) { return e.op.stage; }),
        column(found, [](const Event& e) { return e.op.kind; }),
        column(found, [](const Event& e) { return e.op.microbatch; }),
        column(found, [](const Event& e) { return e.start; }), column(found, [](const Event& e) { return e.end; }),
        column(found, [](const Event& e) { return e.part; }), column(found, [](const Event& e) { return e.parts; }));
  }

  // stage, kind and micro-batch of the send, source, destination, start, end
  py::tuple transfers() const {
    return py::make_tuple(column(messages, [](const Transfer& t) { return t.send.stage; }),
                          column(messages, [](const Transfer& t) { return t.send.kind; }),
                          column(messages, [](const Transfer& t) { return t.send.microbatch; }),
                          column(messages, [](const Transfer& t) { return t.source; }),
                          column(messages, [](const Transfer& t) { return t.destination; }),
                          column(messages, [](const Transfer& t) { return t.start; }),
                          column(messages, [](const Transfer& t) { return t.end; }));
  }

  // Of each rank, its entries with communication: None for the next of those that there were, else (stage, kind,
  // micro-batch).
  py::list programs() const {
    py::list all;
    for (int64_t rank = 0; rank < table.ranks; ++rank) {
      py::list program;
      for (int64_t entry = table.programs[rank]; entry < table.programs[rank + 1]; ++entry) {
        const Op& op = table.ops[table.entries[entry]];
        if (computes(op.kind)) {
          program.append(py::none());
        } else {
          program.append(py::make_tuple(op.stage, op.kind, op.microbatch));
        }
      }
      all.append(std::move(program));
    }
    return all;
  }
};

// None for a schedule that does not run, or is not understood: Python says why.
std::unique_ptr<Simulated> simulate(const py::tuple& programs, const py::tuple& kinds, int64_t microbatches,
                                    const std::vector<int32_t>& home, const std::vector<std::vector<double>>& costs,
                                    double overlap) {
  std::optional<Table> table = read(programs, kinds, microbatches, home);
  if (!table) return nullptr;
  const size_t borders = home.empty() ? 0 : home.size() - 1;
  if (costs.size() != 6) throw py::value_error("six kinds of costs expected");
  for (size_t i = 0; i < costs.size(); ++i)
    if (costs[i].size() != (i < 4 ? home.size() : borders)) throw py::value_error("costs of every stage expected");
  for (const int32_t rank : home)
    if (rank < 0 || rank >= table->ranks) throw py::value_error("stages on the ranks that there are expected");
  py::gil_scoped_release release;
  if (!table->runs()) return nullptr;
  const Costs seconds{costs[0], costs[1], costs[2], costs[3], costs[4], costs[5]};
  auto done = std::make_unique<Simulated>();
  done->table = table->communicates ? std::move(*table) : table->with_communication();
  Clock clock(done->table, seconds, overlap);
  if (!clock.run()) return nullptr;
  done->makespan = clock.makespan;
  done->messages = clock.transfers();
  done->peak_in_flight = done->table.peak_in_flight();
  done->busy = std::move(clock.busy);
  done->found = std::move(clock.events);
  return done;
}

}  // namespace

void bind_simulate(py::module_& module) {
  py::class_<Simulated>(module, "Simulated")
      .def_readonly("makespan", &Simulated::makespan)
      .def_readonly("busy", &Simulated::busy)
      .def_readonly("peak_in_flight", &Simulated::peak_in_flight)
      .def("events", &Simulated::events)
      .def("transfers", &Simulated::transfers)
      .def("programs", &Simulated::programs);
  module.def("simulate", &simulate, py::arg("programs"), py::arg("kinds"), py::arg("microbatches"), py::arg("home"),
             py::arg("costs"), py::arg("overlap"));
}

}  // namespace merak
