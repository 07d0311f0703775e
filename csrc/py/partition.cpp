// Cutting a chain into stages: the dynamic programming of planner/partition.py, its twin, with the same numbers added and
// compared in the same order.
#include "exact.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace merak {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();  // no score: nothing reaches this far

// A cost that a stage bears once if it has one of some units: how many of these are before each unit.
using Shared = std::pair<double, std::vector<int64_t>>;

struct Chain {
  std::vector<double> prefix;  // the cost of all units before each, and of all
  std::vector<Shared> shared;

  int64_t units() const { return int64_t(prefix.size()) - 1; }

  double weigh(int64_t start, int64_t end) const {
    double more = 0.0;
    for (const auto& [cost, before] : shared)
      if (before[end] > before[start]) more += cost;
    return prefix[end] - prefix[start] + more;
  }
};

double largest(double before, double cost) { return std::max(before, cost); }

double squares(double before, double cost) { return before + cost * cost; }

// The least score of all cuts whose stages each cost at most `limit`, and its bounds; none where there is no cut. More(stage,
// start, end) is what a stage costs beside its units.
template <class Score, class More>
std::pair<double, std::vector<int64_t>> best_cuts(const Chain& chain, int64_t stages, double limit, const Score& score,
                                                  const More& more) {
  const int64_t units = chain.units();
  std::vector<double> best(units + 1, kNone), reached(units + 1);
  std::vector<std::vector<int32_t>> choices;
  best[0] = 0.0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    std::fill(reached.begin(), reached.end(), kNone);
    std::vector<int32_t> choice(units + 1);
    for (int64_t end = stage + 1; end <= units - (stages - stage - 1); ++end)
      for (int64_t start = end - 1; start >= stage; --start) {
        double cost = chain.weigh(start, end);
        if (cost > limit) break;
        if (std::isnan(best[start])) continue;
        cost += more(stage, start, end);
        if (std::isinf(cost)) break;
        if (cost > limit) continue;
        const double total = score(best[start], cost);
        if (std::isnan(reached[end]) || total < reached[end]) {
          reached[end] = total;
          choice[end] = int32_t(start);
        }
      }
    best.swap(reached);
    choices.push_back(std::move(choice));
  }
  std::vector<int64_t> bounds;
  if (std::isnan(best[units])) return {std::numeric_limits<double>::infinity(), bounds};
  bounds.push_back(units);
  for (int64_t stage = stages - 1; stage >= 0; --stage) bounds.push_back(choices[stage][bounds.back()]);
  std::reverse(bounds.begin(), bounds.end());
  return {best[units], bounds};
}

template <class More>
std::pair<double, std::vector<int64_t>> cuts(const Chain& chain, int64_t stages, double limit, bool square,
                                             const More& more) {
  return square ? best_cuts(chain, stages, limit, squares, more) : best_cuts(chain, stages, limit, largest, more);
}

std::pair<double, std::vector<int64_t>> find_cuts(std::vector<double> prefix, std::vector<Shared> shared, int64_t stages,
                                                  double limit, bool square, const std::optional<py::function>& more) {
  if (prefix.empty() || prefix.size() > size_t(INT32_MAX) || stages < 1 || stages >= int64_t(prefix.size()))
    throw py::value_error("1 to as many stages as units expected");
  for (const auto& [cost, before] : shared)
    if (before.size() != prefix.size()) throw py::value_error("a count before every unit expected");
  const Chain chain{std::move(prefix), std::move(shared)};
  if (more) {
    return cuts(chain, stages, limit, square, [&](int64_t stage, int64_t start, int64_t end) {
      return (*more)(stage, start, end).cast<double>();
    });
  }
  py::gil_scoped_release release;
  return cuts(chain, stages, limit, square, [](int64_t, int64_t, int64_t) { return 0.0; });
}

}  // namespace

void bind_partition(py::module_& module) {
  module.def("best_cuts", &find_cuts, py::arg("prefix"), py::arg("shared"), py::arg("stages"), py::arg("limit"),
             py::arg("square"), py::arg("more"));
}

}  // namespace merak
