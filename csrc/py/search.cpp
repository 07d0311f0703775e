// The inner loops of pipeline_parallel/search: the clock of problem.py and the list scheduling of listing.py, their twins,
// with the same numbers added and compared in the same order.
#include "exact.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace merak {
namespace {

// A code is 4 * micro-batch + kind; every stage runs each kind in micro-batch order.
enum Part : int { kForward, kRecompute, kBackward, kWeight };
using Program = std::vector<int32_t>;

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
constexpr double kForEver = std::numeric_limits<double>::infinity();

struct Rule {
  std::vector<int32_t> warmup;
  double patience;
  bool forward_first;
  int32_t early;
  std::vector<bool> split;
  bool weights_last;
};

// Costs and limits, a value per stage, and which stages may run R and W on their own.
struct Pipeline {
  int32_t microbatches;
  std::vector<double> forward, backward, weight, recompute, transfer, latency;
  std::vector<double> cap, kept, taped, weight_held;
  std::vector<bool> early, split;

  int32_t stages() const { return int32_t(forward.size()); }

  std::vector<std::vector<double>> ends(const std::vector<Program>& programs) const;

  double makespan(const std::vector<Program>& programs) const {
    double last = -kForEver;
    for (const auto& end : ends(programs)) last = std::max(last, end.back());
    return last == -kForEver ? kForEver : last;
  }

  std::vector<Program> list(const Rule& rule) const;

  bool allows(int32_t stage, const Program& program) const;
};

// How far each stage has come on the clock.
struct Progress {
  std::vector<double> seconds;  // of each op
  size_t at = 0;
  double posted = 0.0;  // when the rank was free for its last F or B
  double free_forward = 0.0, free_backward = 0.0;
  std::vector<double> forwards, backwards;
};

// The end of every op, a zero first; none where the programs wait for each other.
std::vector<std::vector<double>> Pipeline::ends(const std::vector<Program>& programs) const {
  const int32_t count = stages();
  if (int32_t(programs.size()) != count) throw py::value_error("a program for every stage expected");
  std::vector<Progress> states(count);
  std::vector<std::vector<double>> found(count, std::vector<double>(1, 0.0));
  size_t left = 0;
  for (int32_t s = 0; s < count; ++s) {
    std::vector<bool> separate(4 * size_t(microbatches));
    for (const int32_t code : programs[s]) {
      if (code < 0 || code >= 4 * microbatches) throw py::value_error("codes of the micro-batches expected");
      separate[code] = true;
    }
    for (const int32_t code : programs[s]) {
      const double own[] = {forward[s], recompute[s], 0.0, weight[s]};
      const int32_t first = code & ~3;
      const double without = separate[first + kWeight] ? weight[s] : 0.0;
      const double with = separate[first + kRecompute] ? 0.0 : recompute[s];
      states[s].seconds.push_back((code & 3) == kBackward ? backward[s] - without + with : own[code & 3]);
    }
    left += programs[s].size();
    found[s].reserve(programs[s].size() + 1);
  }
  std::vector<int32_t> order;
  for (int32_t s = 0; s < count; ++s) order.push_back(s);
  for (int32_t s = count - 2; s > 0; --s) order.push_back(s);
  while (left) {
    const size_t before = left;
    for (const int32_t s : order) {
      Progress& state = states[s];
      std::vector<double>& end = found[s];
      double now = end.back();
      for (; state.at < programs[s].size(); ++state.at, --left) {
        const int32_t code = programs[s][state.at], kind = code & 3;
        const size_t k = size_t(code >> 2);
        if (kind == kForward || kind == kBackward) {
          const bool onward = kind == kForward;
          const int32_t source = onward ? s - 1 : s + 1;
          if (source >= 0 && source < count) {
            const std::vector<double>& arrived = onward ? states[source].forwards : states[source].backwards;
            if (k >= arrived.size()) break;
            double& free = onward ? state.free_forward : state.free_backward;
            const int32_t border = std::min(s, source);
            free = std::max(std::max(arrived[k], state.posted), free) + transfer[border];
            const double start = free + latency[border];
            if (start > now) now = start;
          }
          state.posted = end.back();
          now += state.seconds[state.at];
          (onward ? state.forwards : state.backwards).push_back(now);
        } else {
          now += state.seconds[state.at];
        }
        end.push_back(now);
      }
    }
    if (left == before) return {};
  }
  return found;
}

// A stage while a list is scheduled; Stage in listing.py says what its members are.
class Lister {
 public:
  Lister(const Pipeline& pipeline, const Rule& rule, int32_t index)
      : rule_(rule), count_(pipeline.microbatches), warmup_(std::min(rule.warmup[index], pipeline.microbatches)),
        first_(index == 0), last_(index == pipeline.stages() - 1), early_(pipeline.early[index]),
        split_(pipeline.split[index] && (rule.split.empty() || rule.split[index])), cap_(pipeline.cap[index]),
        kept_(pipeline.kept[index]), taped_(pipeline.taped[index]), weight_held_(pipeline.weight_held[index]) {
    seconds_[kForward] = pipeline.forward[index];
    seconds_[kRecompute] = pipeline.recompute[index];
    seconds_[kBackward] = pipeline.backward[index] - (split_ ? pipeline.weight[index] : 0.0);
    seconds_[kWeight] = pipeline.weight[index];
    if (!first_) hops_[kForward] = {pipeline.transfer[index - 1], pipeline.latency[index - 1]};
    if (!last_) hops_[kBackward] = {pipeline.transfer[index], pipeline.latency[index]};
  }

  double arrive(int kind, double sent) {
    through_[kind] = std::max(sent, through_[kind]) + hops_[kind].first;
    arrivals_[kind].push_back(through_[kind] + hops_[kind].second);
    return arrivals_[kind].back();
  }

  void run(int32_t code, double now) {
    const int kind = code & 3;
    double seconds = seconds_[kind];
    if (kind == kBackward && done_[kRecompute] <= done_[kBackward]) {
      seconds += seconds_[kRecompute];
      done_[kRecompute] = done_[kBackward] + 1;
    }
    ++done_[kind];
    free = now + seconds;
    program.push_back(code);
  }

  // (code, unknown) to run, or (-1, when to look again), unknown where only a message changes something.
  std::pair<int32_t, double> choose(double now) const {
    const int favoured = rule_.forward_first ? kForward : kBackward, second = rule_.forward_first ? kBackward : kForward;
    const double favourite = ready(favoured), other = ready(second);
    if (favourite <= now) return {4 * done_[favoured] + favoured, kUnknown};
    int chosen = second;
    if (!(other <= now)) {
      if (may_recompute()) {
        chosen = kRecompute;
      } else if (may_weigh()) {
        chosen = kWeight;
      } else {
        return {-1, kUnknown};
      }
    }
    double urgent = kForEver;
    for (const double time : {favourite, other})
      if (time > now && time < urgent) urgent = time;
    if (chosen == kRecompute && done_[kRecompute] == done_[kBackward]) urgent = kForEver;
    if (urgent < now + rule_.patience * seconds_[chosen]) return {-1, urgent};
    return {4 * done_[chosen] + chosen, kUnknown};
  }

  double free = 0.0;
  Program program;

 private:
  double held() const {
    const double waiting = split_ ? (done_[kBackward] - done_[kWeight]) * weight_held_ : 0.0;
    const double tapes = std::max(done_[kRecompute] - done_[kBackward], 0) * taped_;
    return (done_[kForward] - done_[kBackward]) * kept_ + tapes + waiting;
  }

  double ready(int kind) const {
    const int32_t k = done_[kind];
    if (k == count_) return kUnknown;
    if (kind == kForward) {
      const double tape = done_[kRecompute] <= done_[kBackward] ? taped_ : 0.0;
      if (k - done_[kBackward] >= warmup_ || held() + kept_ + tape > cap_) return kUnknown;
    } else if (k >= done_[kForward] || (done_[kRecompute] <= k && held() + taped_ > cap_)) {
      return kUnknown;
    }
    if (kind == kForward ? first_ : last_) return 0.0;
    return size_t(k) < arrivals_[kind].size() ? arrivals_[kind][k] : kUnknown;
  }

  bool may_recompute() const {
    const int32_t ahead = done_[kRecompute] - done_[kBackward];
    if (!early_ || done_[kRecompute] >= done_[kForward] || ahead >= rule_.early) return false;
    return held() + taped_ <= cap_;
  }

  bool may_weigh() const {
    if (!split_ || done_[kWeight] >= done_[kBackward]) return false;
    const bool full = held() + kept_ + taped_ > cap_;
    return full || !rule_.weights_last || done_[kBackward] == count_;
  }

  const Rule& rule_;
  const int32_t count_, warmup_;
  const bool first_, last_, early_, split_;
  const double cap_, kept_, taped_, weight_held_;
  double seconds_[4];
  std::pair<double, double> hops_[4] = {};
  double through_[4] = {};
  std::vector<double> arrivals_[4];
  int32_t done_[4] = {};
};

std::vector<Program> Pipeline::list(const Rule& rule) const {
  const int32_t count = stages();
  if (int32_t(rule.warmup.size()) != count || (!rule.split.empty() && int32_t(rule.split.size()) != count))
    throw py::value_error("a rule for every stage expected");
  std::vector<Lister> listers;
  for (int32_t index = 0; index < count; ++index) listers.emplace_back(*this, rule, index);
  using Wake = std::pair<double, int32_t>;
  std::priority_queue<Wake, std::vector<Wake>, std::greater<Wake>> wake;
  wake.emplace(0.0, 0);
  while (!wake.empty()) {
    const auto [now, s] = wake.top();
    wake.pop();
    Lister& stage = listers[s];
    if (stage.free > now) continue;
    const auto [code, until] = stage.choose(now);
    if (code < 0) {
      if (!std::isnan(until)) wake.emplace(until, s);
      continue;
    }
    stage.run(code, now);
    wake.emplace(stage.free, s);
    if ((code & 3) == kForward && s + 1 < count) wake.emplace(listers[s + 1].arrive(kForward, stage.free), s + 1);
    if ((code & 3) == kBackward && s > 0) wake.emplace(listers[s - 1].arrive(kBackward, stage.free), s - 1);
  }
  std::vector<Program> programs;
  for (Lister& stage : listers) programs.push_back(std::move(stage.program));
  return programs;
}

// Whether R and the sums of weight gradients are in order, and the stage stays within its cap: allows in problem.py.
bool Pipeline::allows(int32_t stage, const Program& program) const {
  if (stage < 0 || stage >= stages()) throw py::value_error("a stage of the pipeline expected");
  std::vector<bool> split(microbatches), recomputed(microbatches);
  for (const int32_t code : program) {
    if (code < 0 || code >= 4 * microbatches) throw py::value_error("codes of the micro-batches expected");
    if ((code & 3) == kWeight) split[code >> 2] = true;
  }
  int32_t last_recomputed = -1, last_sum = -1;
  for (const int32_t code : program) {
    const int32_t kind = code & 3, k = code >> 2;
    const bool sums = kind == kWeight || (kind == kBackward && !split[k]);
    if (kind == kRecompute && std::exchange(last_recomputed, k) >= k) return false;
    if (sums && std::exchange(last_sum, k) >= k) return false;
  }
  const double most = cap[stage], keeps = kept[stage], tape = taped[stage], weighs = weight_held[stage];
  if (most >= (keeps + tape + weighs) * microbatches) return true;
  double held = 0.0;
  for (const int32_t code : program) {
    const int32_t kind = code & 3, k = code >> 2;
    if (kind == kForward) {
      held += keeps;
    } else if (kind == kRecompute) {
      held += tape;
      recomputed[k] = true;
    } else if (kind == kBackward) {
      if (held + (recomputed[k] ? 0.0 : tape) > most) return false;
      held -= keeps + (recomputed[k] ? tape : 0.0);
      held += split[k] ? weighs : 0.0;
    } else {
      held -= weighs;
    }
    if (held > most) return false;
  }
  return true;
}

Pipeline pipeline(int32_t microbatches, const std::vector<std::vector<double>>& costs,
                  const std::vector<std::vector<double>>& limits, std::vector<bool> early, std::vector<bool> split) {
  if (costs.size() != 6 || limits.size() != 4) throw py::value_error("six kinds of costs and four of limits expected");
  const size_t stages = early.size();
  bool fits = stages > 0 && split.size() == stages && microbatches > 0 && microbatches <= INT32_MAX / 4;
  for (size_t i = 0; fits && i < 6; ++i) fits = costs[i].size() == (i < 4 ? stages : stages - 1);
  for (const auto& limit : limits) fits = fits && limit.size() == stages;
  if (!fits) throw py::value_error("a value for every stage or border expected");
  return {microbatches, costs[0],  costs[1],  costs[2],  costs[3],         costs[4],        costs[5],
          limits[0],    limits[1], limits[2], limits[3], std::move(early), std::move(split)};
}

}  // namespace

void bind_search(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Pipeline>(module, "Pipeline")
      .def(py::init(&pipeline), py::arg("microbatches"), py::arg("costs"), py::arg("limits"), py::arg("early"),
           py::arg("split"))
      .def("ends", &Pipeline::ends, py::arg("programs"), release)
      .def("allows", &Pipeline::allows, py::arg("stage"), py::arg("program"), release)
      .def("makespan", &Pipeline::makespan, py::arg("programs"), release)
      .def(
          "list",
          [](const Pipeline& self, std::vector<int32_t> warmup, double patience, bool forward_first, int32_t early,
             std::vector<bool> split, bool weights_last) {
            return self.list({std::move(warmup), patience, forward_first, early, std::move(split), weights_last});
          },
          py::arg("warmup"), py::arg("patience"), py::arg("forward_first"), py::arg("early"), py::arg("split"),
          py::arg("weights_last"), release);
}

}  // namespace merak
