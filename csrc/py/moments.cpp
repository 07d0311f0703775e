// What a rank holds while each of its entries runs: moments in planner/saved.py, its twin.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "read.h"
#include "schedule.h"

namespace py = pybind11;

namespace merak {

using namespace pipeline;

namespace {

// What was done with a micro-batch, in the order of the names.
enum State : int { kBackward, kBackwardHeld, kForward, kHeld, kKept, kLate, kLateHeld, kTaped, kStates, kNothing = -1 };
constexpr const char* kNames[kStates] = {"backward", "backward_held", "forward",   "held",
                                         "kept",     "late",          "late_held", "taped"};

// (stage, state) with how many micro-batches are in it, ascending; none of them 0.
using Moment = std::vector<std::pair<std::pair<int32_t, int>, int64_t>>;

struct Change {
  int32_t stage;
  int before, during, after;
};

// The ops of a rank, and which of its micro-batches have an R or a W.
class Walk {
 public:
  explicit Walk(const Table& table) : table_(table) {
    for (const Op& op : table.ops) {
      if (op.kind == R) early_.insert({op.stage, op.microbatch});
      if (op.kind == W) split_.insert({op.stage, op.microbatch});
    }
  }

  // The moments of its entries, each once, in the order of their first appearance.
  std::vector<Moment> moments() {
    std::vector<Moment> found;
    std::set<Moment> known;
    for (int64_t entry = 0; entry + 1 < int64_t(table_.entries.size()); ++entry) {
      std::vector<Change> changes;
      for (int64_t i = table_.entries[entry]; i < table_.entries[entry + 1]; ++i)
        if (computes(table_.ops[i].kind)) changes.push_back(change(table_.ops[i]));
      if (changes.empty()) continue;
      for (const Change& each : changes) {
        move(each.stage, each.before, -1);
        move(each.stage, each.during, 1);
      }
      Moment now = moment();
      if (known.insert(now).second) found.push_back(std::move(now));
      for (const Change& each : changes) {
        move(each.stage, each.during, -1);
        move(each.stage, each.after, 1);
      }
    }
    return found;
  }

 private:
  Change change(const Op& op) const {
    const bool recomputed = early_.count({op.stage, op.microbatch}), waits = split_.count({op.stage, op.microbatch});
    if (op.kind == F) return {op.stage, kNothing, kForward, kKept};
    if (op.kind == R) return {op.stage, kKept, kTaped, kTaped};
    if (op.kind == W) return {op.stage, kHeld, kHeld, kNothing};
    const int during = recomputed ? (waits ? kLateHeld : kLate) : (waits ? kBackwardHeld : kBackward);
    return {op.stage, recomputed ? kTaped : kKept, during, waits ? kHeld : kNothing};
  }

  void move(int32_t stage, int state, int64_t count) {
    if (state != kNothing) now_[stage][state] += count;
  }

  Moment moment() const {
    Moment found;
    for (const auto& [stage, counts] : now_)
      for (int state = 0; state < kStates; ++state)
        if (counts[state]) found.push_back({{stage, state}, counts[state]});
    return found;
  }

  const Table& table_;
  std::set<std::pair<int32_t, int32_t>> early_, split_;
  std::map<int32_t, std::array<int64_t, kStates>> now_;
};

// Without the moments at which a rank holds no more of anything than at another.
std::vector<Moment> largest(const std::vector<Moment>& found) {
  std::map<std::vector<std::pair<int32_t, int>>, size_t> groups;
  std::vector<std::vector<const Moment*>> alike;
  for (const Moment& moment : found) {
    std::vector<std::pair<int32_t, int>> states;
    for (const auto& [state, count] : moment) states.push_back(state);
    const auto [place, is_new] = groups.try_emplace(std::move(states), alike.size());
    if (is_new) alike.emplace_back();
    alike[place->second].push_back(&moment);
  }
  std::vector<Moment> kept;
  for (const auto& group : alike)
    for (const Moment* mine : group) {
      const auto covers = [&](const Moment* other) {
        if (other == mine) return false;
        for (size_t i = 0; i < mine->size(); ++i)
          if ((*mine)[i].second > (*other)[i].second) return false;
        return true;
      };
      if (std::none_of(group.begin(), group.end(), covers)) kept.push_back(*mine);
    }
  return kept;
}

// None for what is no program.
std::optional<py::tuple> moments(const py::tuple& program, const py::tuple& kinds) {
  Table table;
  if (!Reader(kinds).program(program, table)) return std::nullopt;
  Reader::finish(table);
  std::vector<Moment> found;
  {
    py::gil_scoped_release release;
    found = largest(Walk(table).moments());
  }
  std::vector<py::str> names(std::begin(kNames), std::end(kNames));
  py::tuple all(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    py::tuple moment(found[i].size());
    for (size_t each = 0; each < found[i].size(); ++each) {
      const auto& [state, count] = found[i][each];
      moment[each] = py::make_tuple(py::make_tuple(state.first, names[state.second]), count);
    }
    all[i] = std::move(moment);
  }
  return all;
}

}  // namespace

void bind_moments(py::module_& module) {
  module.def("moments", &moments, py::arg("program"), py::arg("kinds"));
}

}  // namespace merak
