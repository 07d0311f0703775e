// The inner loops of pipeline_parallel/search: the clock of problem.py and what it allows, their twins, with the same
// numbers added and compared in the same order.
#include "exact.h"

#include "pipeline.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace merak {
namespace search {
namespace {

// How far each stage has come on the clock, in forwards and in backwards: when its wire is free, and when they were over.
struct Progress {
  double free[2] = {};
  std::vector<double> over[2];
};

// How far each rank has.
struct Walk {
  std::vector<double> seconds;  // of each op
  size_t at = 0;
  double posted = 0.0;  // when it was free for its last F or B
};

}  // namespace

// The end of every op, a zero first; none where the programs wait for each other.
std::vector<std::vector<double>> Pipeline::ends(const std::vector<Program>& programs) const {
  const int32_t count = ranks();
  if (int32_t(programs.size()) != count) throw py::value_error("a program for every rank expected");
  std::vector<Progress> states(stages());
  std::vector<Walk> walks(count);
  std::vector<std::vector<double>> found(count, std::vector<double>(1, 0.0));
  size_t left = 0;
  for (int32_t rank = 0; rank < count; ++rank) {
    const std::vector<int32_t>& mine = stages_of[rank];
    const int32_t width = int32_t(mine.size()), codes = 4 * microbatches * width;
    std::vector<bool> separate(codes);
    for (const int32_t code : programs[rank]) {
      if (code < 0 || code >= codes) throw py::value_error("codes of the micro-batches expected");
      separate[code] = true;
    }
    for (const int32_t code : programs[rank]) {
      const int32_t s = mine[(code >> 2) % width], first = code & ~3;
      const double own[] = {forward[s], recompute[s], 0.0, weight[s]};
      const double without = separate[first + kWeight] ? weight[s] : 0.0;
      const double with = separate[first + kRecompute] ? 0.0 : recompute[s];
      walks[rank].seconds.push_back((code & 3) == kBackward ? backward[s] - without + with : own[code & 3]);
    }
    left += programs[rank].size();
    found[rank].reserve(programs[rank].size() + 1);
  }
  std::vector<int32_t> order;
  for (int32_t rank = 0; rank < count; ++rank) order.push_back(rank);
  for (int32_t rank = count - 2; rank > 0; --rank) order.push_back(rank);
  while (left) {
    const size_t before = left;
    for (const int32_t rank : order) {
      Walk& walk = walks[rank];
      std::vector<double>& end = found[rank];
      const std::vector<int32_t>& mine = stages_of[rank];
      const int32_t width = int32_t(mine.size());
      double now = end.back();
      for (; walk.at < programs[rank].size(); ++walk.at, --left) {
        const int32_t code = programs[rank][walk.at], kind = code & 3, item = code >> 2, s = mine[item % width];
        const size_t k = size_t(item / width);
        if (kind == kForward || kind == kBackward) {
          const int way = kind == kForward ? 0 : 1;
          const int32_t source = way ? s + 1 : s - 1;
          if (source >= 0 && source < stages()) {
            const std::vector<double>& arrived = states[source].over[way];
            if (k >= arrived.size()) break;
            double start = arrived[k];
            if (home[source] != rank) {
              const int32_t border = std::min(s, source);
              double& free = states[s].free[way];
              free = std::max(std::max(start, walk.posted), free) + transfer[border];
              start = free + latency[border];
            }
            if (start > now) now = start;
          }
          walk.posted = end.back();
          now += walk.seconds[walk.at];
          states[s].over[way].push_back(now);
        } else {
          now += walk.seconds[walk.at];
        }
        end.push_back(now);
      }
    }
    if (left == before) return {};
  }
  return found;
}

// Whether R and the sums of weight gradients are in order, and the rank stays within its cap: allows in problem.py.
bool Pipeline::allows(int32_t rank, const Program& program) const {
  if (rank < 0 || rank >= ranks()) throw py::value_error("a rank of the pipeline expected");
  const std::vector<int32_t>& mine = stages_of[rank];
  const int32_t width = int32_t(mine.size());
  std::vector<bool> split(microbatches * width), recomputed(microbatches * width);
  for (const int32_t code : program) {
    if (code < 0 || code >= 4 * microbatches * width) throw py::value_error("codes of the micro-batches expected");
    if ((code & 3) == kWeight) split[code >> 2] = true;
  }
  std::vector<int32_t> last_recomputed(width, -1), last_sum(width, -1);
  for (const int32_t code : program) {
    const int32_t kind = code & 3, item = code >> 2, place = item % width;
    const bool sums = kind == kWeight || (kind == kBackward && !split[item]);
    if (kind == kRecompute && std::exchange(last_recomputed[place], item) >= item) return false;
    if (sums && std::exchange(last_sum[place], item) >= item) return false;
  }
  const double most = cap[rank];
  double all = 0.0;
  for (const int32_t s : mine) all += kept[s] + taped[s] + weight_held[s];
  if (most >= all * microbatches) return true;
  double held = 0.0;
  for (const int32_t code : program) {
    const int32_t kind = code & 3, item = code >> 2, s = mine[item % width];
    if (kind == kForward) {
      held += kept[s];
    } else if (kind == kRecompute) {
      held += taped[s];
      recomputed[item] = true;
    } else if (kind == kBackward) {
      if (held + (recomputed[item] ? 0.0 : taped[s]) > most) return false;
      held -= kept[s] + (recomputed[item] ? taped[s] : 0.0);
      held += split[item] ? weight_held[s] : 0.0;
    } else {
      held -= weight_held[s];
    }
    if (held > most) return false;
  }
  return true;
}

namespace {

Pipeline pipeline(int32_t microbatches, const std::vector<std::vector<double>>& costs,
                  const std::vector<std::vector<double>>& limits, std::vector<bool> early, std::vector<bool> split,
                  std::vector<int32_t> home) {
  if (costs.size() != 6 || limits.size() != 4) throw py::value_error("six kinds of costs and four of limits expected");
  const size_t stages = early.size(), ranks = limits[0].size();
  bool fits = stages > 0 && split.size() == stages && home.size() == stages && microbatches > 0;
  fits = fits && microbatches <= INT32_MAX / 4 / int64_t(stages);
  for (size_t i = 0; fits && i < 6; ++i) fits = costs[i].size() == (i < 4 ? stages : stages - 1);
  for (size_t i = 1; fits && i < 4; ++i) fits = limits[i].size() == stages;
  std::vector<std::vector<int32_t>> stages_of(ranks);
  for (size_t stage = 0; fits && stage < stages; ++stage) {
    fits = home[stage] >= 0 && size_t(home[stage]) < ranks;
    if (fits) stages_of[home[stage]].push_back(int32_t(stage));
  }
  for (const auto& mine : stages_of) fits = fits && !mine.empty();
  if (!fits) throw py::value_error("a value for every stage, border or rank expected");
  return {microbatches,     costs[0],         costs[1],        costs[2],  costs[3],  costs[4],  costs[5],
          limits[0],        limits[1],        limits[2],       limits[3], std::move(early), std::move(split),
          std::move(home), std::move(stages_of)};
}

}  // namespace
}  // namespace search

using search::Pipeline;

void bind_search(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Pipeline>(module, "Pipeline")
      .def(py::init(&search::pipeline), py::arg("microbatches"), py::arg("costs"), py::arg("limits"), py::arg("early"),
           py::arg("split"), py::arg("home"))
      .def("ends", &Pipeline::ends, py::arg("programs"), release)
      .def("allows", &Pipeline::allows, py::arg("rank"), py::arg("program"), release)
      .def("makespan", &Pipeline::makespan, py::arg("programs"), release)
      .def(
          "list",
          [](const Pipeline& self, std::vector<int32_t> warmup, double patience, bool forward_first, int32_t early,
             std::vector<bool> split, bool weights_last, std::pair<bool, bool> late) {
            return self.list({std::move(warmup), patience, forward_first, early, std::move(split), weights_last, late});
          },
          py::arg("warmup"), py::arg("patience"), py::arg("forward_first"), py::arg("early"), py::arg("split"),
          py::arg("weights_last"), py::arg("late"), release);
}

}  // namespace merak
