// List scheduling: the twin of pipeline_parallel/search/listing.py, with the same numbers added and compared in the same
// order.
#include "exact.h"

#include "pipeline.h"

#include <cmath>
#include <functional>
#include <queue>
#include <stdexcept>

namespace merak::search {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// A stage while a list is scheduled; Stage in listing.py says what its members are.
class ListedStage {
 public:
  ListedStage(const Pipeline& pipeline, const Rule& rule, int32_t stage)
      : index(stage), kept(pipeline.kept[stage]), taped(pipeline.taped[stage]), count_(pipeline.microbatches),
        warmup_(std::min(rule.warmup[stage], pipeline.microbatches)), most_early_(rule.early), first_(stage == 0),
        last_(stage == pipeline.stages() - 1), early_(pipeline.early[stage]),
        split_(pipeline.split[stage] && (rule.split.empty() || rule.split[stage])), weights_last_(rule.weights_last),
        weight_held_(pipeline.weight_held[stage]) {
    growth = split_ ? std::max(weight_held_ - kept, 0.0) : 0.0;
    seconds[kForward] = pipeline.forward[stage];
    seconds[kRecompute] = pipeline.recompute[stage];
    seconds[kBackward] = pipeline.backward[stage] - (split_ ? pipeline.weight[stage] : 0.0);
    seconds[kWeight] = pipeline.weight[stage];
    if (!first_) hops_[kForward] = {pipeline.transfer[stage - 1], pipeline.latency[stage - 1]};
    if (!last_) hops_[kBackward] = {pipeline.transfer[stage], pipeline.latency[stage]};
  }

  double arrive(int kind, double sent) {
    through_[kind] = std::max(sent, through_[kind]) + hops_[kind].first;
    arrivals_[kind].push_back(through_[kind] + hops_[kind].second);
    return arrivals_[kind].back();
  }

  double held() const {
    const double waiting = split_ ? (done[kBackward] - done[kWeight]) * weight_held_ : 0.0;
    const double tapes = std::max(done[kRecompute] - done[kBackward], 0) * taped;
    return (done[kForward] - done[kBackward]) * kept + tapes + waiting;
  }

  double run(int kind) {
    double time = seconds[kind];
    if (kind == kBackward && done[kRecompute] <= done[kBackward]) {
      time += seconds[kRecompute];
      done[kRecompute] = done[kBackward] + 1;
    }
    ++done[kind];
    return time;
  }

  double ready(int kind, double room, double tape) const {
    const int32_t k = done[kind];
    if (k == count_) return kUnknown;
    if (kind == kForward) {
      if (k - done[kBackward] >= warmup_ || kept + std::max(tape, needed()) > room) return kUnknown;
    } else if (k >= done[kForward] || needed() > room) {
      return kUnknown;
    }
    if (kind == kForward ? first_ : last_) return 0.0;
    return size_t(k) < arrivals_[kind].size() ? arrivals_[kind][k] : kUnknown;
  }

  double needed() const {
    const bool early = done[kRecompute] > done[kBackward];
    return early ? std::max(growth - taped, 0.0) : std::max(taped, growth);
  }

  bool may_recompute(double room) const {
    const int32_t ahead = done[kRecompute] - done[kBackward];
    return early_ && done[kRecompute] < done[kForward] && ahead < most_early_ && taped <= room;
  }

  bool may_weigh(bool full) const {
    if (!split_ || done[kWeight] >= done[kBackward]) return false;
    return full || !weights_last_ || done[kBackward] == count_;
  }

  bool is_over() const { return done[kBackward] == count_ && (done[kWeight] == 0 || done[kWeight] == count_); }

  const int32_t index;
  const double kept, taped;
  double growth;
  double seconds[4];
  int32_t done[4] = {};

 private:
  const int32_t count_, warmup_, most_early_;
  const bool first_, last_, early_, split_, weights_last_;
  const double weight_held_;
  std::pair<double, double> hops_[4] = {};
  double through_[4] = {};
  std::vector<double> arrivals_[4];
};

// Its rank; Rank in listing.py.
class ListedRank {
 public:
  ListedRank(const Pipeline& pipeline, const Rule& rule, int32_t index) : rule_(rule), cap_(pipeline.cap[index]) {
    for (const int32_t stage : pipeline.stages_of[index]) stages.emplace_back(pipeline, rule, stage);
  }

  // The stage of an op that starts now.
  int32_t run(int32_t code, double now) {
    ListedStage& stage = stages[(code >> 2) % stages.size()];
    free = now + stage.run(code & 3);
    program.push_back(code);
    held_ = 0.0;
    for (const ListedStage& each : stages) held_ += each.held();
    return stage.index;
  }

  // (code, unknown) to run, or (-1, when to look again), unknown where only a message changes something.
  std::pair<int32_t, double> choose(double now) const {
    const int favoured = rule_.forward_first ? kForward : kBackward, second = rule_.forward_first ? kBackward : kForward;
    const auto [favourite, at] = next(favoured, now);
    const auto [other, there] = next(second, now);
    if (favourite <= now) return {code(at, favoured), kUnknown};
    int chosen = second, place = there;
    if (!(other <= now)) {
      if ((place = first([&](int each) { return stages[each].may_recompute(room(each)); })) >= 0) {
        chosen = kRecompute;
      } else {
        double most = 0.0;
        for (const ListedStage& stage : stages) most = std::max(most, stage.kept + std::max(stage.taped, stage.growth));
        const bool full = most > room(0);
        if ((place = first([&](int each) { return stages[each].may_weigh(full); })) < 0) return {-1, kUnknown};
        chosen = kWeight;
      }
    }
    const ListedStage& stage = stages[place];
    double urgent = kForEver;
    for (const double time : {favourite, other})
      if (time > now && time < urgent) urgent = time;
    if (chosen == kRecompute && stage.done[kRecompute] == stage.done[kBackward]) urgent = kForEver;
    if (urgent < now + rule_.patience * stage.seconds[chosen]) return {-1, urgent};
    return {code(place, chosen), kUnknown};
  }

  std::vector<ListedStage> stages;
  double free = 0.0;
  Program program;

 private:
  int32_t code(int place, int kind) const { return 4 * (stages[place].done[kind] * int32_t(stages.size()) + place) + kind; }

  int nth(int kind, int i) const {
    const bool late = kind == kForward ? rule_.late.first : rule_.late.second;
    return late ? int(stages.size()) - 1 - i : i;
  }

  template <class Test>
  int first(const Test& test) const {
    for (int i = 0; i < int(stages.size()); ++i)
      if (test(nth(kBackward, i))) return nth(kBackward, i);
    return -1;
  }

  std::pair<double, int> next(int kind, double now) const {
    std::pair<double, int> soonest{kUnknown, -1};
    for (int i = 0; i < int(stages.size()); ++i) {
      const int place = nth(kind, i);
      const auto [room, tape] = kind == kForward ? left(place) : std::pair<double, double>(cap_ - held_, 0.0);
      const double time = stages[place].ready(kind, room, tape);
      if (time <= now) return {time, place};
      if (!std::isnan(time) && !(time >= soonest.first)) soonest = {time, place};
    }
    return soonest;
  }

  std::pair<double, double> left(int place) const {
    double room = cap_ - held_, tape = 0.0;
    for (size_t later = place + 1; later < stages.size(); ++later) {
      tape = std::max({tape, stages[later].taped, stages[later].growth});
      if (stages[later].done[kForward] == stages[later].done[kBackward]) room -= stages[later].kept;
    }
    return {room, tape};
  }

  double room(int place) const {
    const auto [room, tape] = left(place);
    return room - tape;
  }

  const Rule& rule_;
  const double cap_;
  double held_ = 0.0;
};

}  // namespace

// None where they do not come to an end.
std::vector<Program> Pipeline::list(const Rule& rule) const {
  const int32_t count = stages();
  if (int32_t(rule.warmup.size()) != count || (!rule.split.empty() && int32_t(rule.split.size()) != count))
    throw std::invalid_argument("a rule for every stage expected");
  std::vector<ListedRank> listed;
  for (int32_t index = 0; index < ranks(); ++index) listed.emplace_back(*this, rule, index);
  std::vector<ListedStage*> of_stage(count);
  for (ListedRank& rank : listed)
    for (ListedStage& stage : rank.stages) of_stage[stage.index] = &stage;
  using Wake = std::pair<double, int32_t>;
  std::priority_queue<Wake, std::vector<Wake>, std::greater<Wake>> wake;
  wake.emplace(0.0, home[0]);
  while (!wake.empty()) {
    const auto [now, r] = wake.top();
    wake.pop();
    ListedRank& rank = listed[r];
    if (rank.free > now) continue;
    const auto [code, until] = rank.choose(now);
    if (code < 0) {
      if (!std::isnan(until)) wake.emplace(until, r);
      continue;
    }
    const int32_t s = rank.run(code, now);
    if ((code & 3) == kForward && s + 1 < count) wake.emplace(of_stage[s + 1]->arrive(kForward, rank.free), home[s + 1]);
    if ((code & 3) == kBackward && s > 0) wake.emplace(of_stage[s - 1]->arrive(kBackward, rank.free), home[s - 1]);
    wake.emplace(rank.free, r);
  }
  std::vector<Program> programs;
  for (ListedRank& rank : listed) {
    for (const ListedStage& stage : rank.stages)
      if (!stage.is_over()) return {};
    programs.push_back(std::move(rank.program));
  }
  return programs;
}

}  // namespace merak::search
