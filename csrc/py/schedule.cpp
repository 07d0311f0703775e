// Checks and passes over schedules as arrays. The Python of pipeline_parallel/ is their twin, and tells what is wrong.
#include "schedule.h"

#include <algorithm>
#include <map>
#include <utility>

namespace merak::pipeline {
namespace {

// (earlier, later) of one stage and micro-batch: where both exist, they stand in this order, in different entries.
constexpr std::pair<Kind, Kind> kInOrder[] = {{RECV_F, F}, {F, SEND_F}, {F, R},      {F, B},
                                              {R, B},      {RECV_B, B}, {B, SEND_B}, {B, W}};

}  // namespace

Wires::Wires(const Table& table) {
  std::map<std::pair<int32_t, int32_t>, int32_t> known;
  const auto wire = [&](int32_t source, int32_t destination) {
    const auto [found, is_new] = known.try_emplace({source, destination}, int32_t(ends.size()));
    if (is_new) ends.emplace_back(source, destination);
    return found->second;
  };
  for (int64_t stage = 0; stage + 1 < table.stages; ++stage) {
    forward.push_back(wire(table.home[stage], table.home[stage + 1]));
    backward.push_back(wire(table.home[stage + 1], table.home[stage]));
  }
}

// Where every op stands, -1 for none; false unless each is in bounds, on the rank of its stage, there once, and F and B of
// every micro-batch are there.
bool Table::places(std::vector<int64_t>& place) const {
  place.assign(numbers(), -1);
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (int64_t entry = programs[rank]; entry < programs[rank + 1]; ++entry)
      for (int64_t i = entries[entry]; i < entries[entry + 1]; ++i) {
        const Op& op = ops[i];
        if (op.stage >= stages || op.microbatch >= microbatches || home[op.stage] != rank) return false;
        if (entries[entry + 1] - entries[entry] > 1 && !computes(op.kind)) return false;
        if (std::exchange(place[number(op)], entry) >= 0) return false;
      }
  return std::find(place.begin(), place.begin() + 2 * stages * microbatches, -1) == place.begin() + 2 * stages * microbatches;
}

bool Table::sums_in_order(const std::vector<int64_t>& place) const {
  std::vector<int32_t> last_backward(stages, 0), last_weight(stages, 0);
  for (const Op& op : ops) {
    const bool adds = op.kind == W || (op.kind == B && place[number(W, op.stage, op.microbatch)] < 0);
    if (op.kind == B && std::exchange(last_backward[op.stage], op.microbatch) > op.microbatch) return false;
    if (adds && std::exchange(last_weight[op.stage], op.microbatch) > op.microbatch) return false;
  }
  return true;
}

bool Table::paired(const std::vector<int64_t>& place) const {
  for (int64_t s = 0; s < stages; ++s) {
    const bool above = s + 1 < stages && crosses(s, s + 1), below = s > 0 && crosses(s, s - 1);
    for (int64_t k = 0; k < microbatches; ++k) {
      if ((place[number(SEND_F, s, k)] >= 0) != above || (place[number(RECV_B, s, k)] >= 0) != above) return false;
      if ((place[number(SEND_B, s, k)] >= 0) != below || (place[number(RECV_F, s, k)] >= 0) != below) return false;
    }
  }
  return true;
}

bool Table::channels_agree() const {
  const Wires wires(*this);
  std::vector<std::vector<int64_t>> sent(2 * wires.ends.size()), received(2 * wires.ends.size());
  for (const Op& op : ops) {
    if (computes(op.kind)) continue;
    const bool gradient = op.kind == SEND_B || op.kind == RECV_B;
    const bool receives = op.kind == RECV_F || op.kind == RECV_B;
    const int64_t sender = op.stage - (op.kind == RECV_F) + (op.kind == RECV_B);
    (receives ? received : sent)[2 * wires.of(op) + gradient].push_back(number(F, sender, op.microbatch));
  }
  return sent == received;
}

bool Table::runs() const {
  if (int64_t(ops.size()) < 2 * stages * microbatches) return false;
  std::vector<int64_t> place;
  if (!places(place)) return false;
  const int64_t each = stages * microbatches;
  for (const auto& [first, second] : kInOrder)
    for (int64_t i = 0; i < each; ++i) {
      const int64_t earlier = place[first * each + i], later = place[second * each + i];
      if (earlier >= 0 && later >= 0 && earlier >= later) return false;
    }
  if (!sums_in_order(place) || (communicates && (!paired(place) || !channels_agree()))) return false;
  return walk([](int32_t, int64_t) {});
}

Table Table::with_communication() const {
  const Wires wires(*this);
  std::vector<int64_t> place;
  places(place);
  const int64_t count = int64_t(entries.size()) - 1;
  // The entry before which to post a receive: the F or B next before its consumer, else the first of the rank.
  std::vector<int64_t> ahead(count);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    int64_t last = programs[rank];
    for (int64_t entry = programs[rank]; entry < programs[rank + 1]; ++entry) {
      ahead[entry] = last;
      for (int64_t i = entries[entry]; i < entries[entry + 1]; ++i)
        if (ops[i].kind == F || ops[i].kind == B) last = entry;
    }
  }
  // Backwards through the sends of each rank: every receive goes as late as its consumer allows, and no later than the
  // one that follows it in its channel. Those of an entry are a list, the last one found first.
  std::vector<Op> receives;
  std::vector<int64_t> next, first(count, -1);
  std::vector<int64_t> latest(2 * wires.ends.size(), count);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t i = entries[programs[rank + 1]] - 1; i >= entries[programs[rank]]; --i) {
      const Op& op = ops[i];
      const bool forward = op.kind == F && op.stage + 1 < stages, backward = op.kind == B && op.stage > 0;
      const int32_t taker = op.stage + (forward ? 1 : -1);
      if ((!forward && !backward) || !crosses(op.stage, taker)) continue;
      const Op receive{taker, op.microbatch, forward ? RECV_F : RECV_B};
      int64_t& bound = latest[2 * wires.of(receive) + backward];
      bound = std::min(bound, ahead[place[number(op.kind, taker, op.microbatch)]]);
      next.push_back(std::exchange(first[bound], int64_t(receives.size())));
      receives.push_back(receive);
    }
  }
  Table found;
  found.stages = stages, found.microbatches = microbatches, found.ranks = ranks, found.home = home;
  found.communicates = !receives.empty();
  const auto append = [&](const Op& op) {
    found.entries.push_back(int64_t(found.ops.size()));
    found.ops.push_back(op);
  };
  for (int64_t rank = 0; rank < ranks; ++rank) {
    found.programs.push_back(int64_t(found.entries.size()));
    for (int64_t entry = programs[rank]; entry < programs[rank + 1]; ++entry) {
      for (int64_t i = first[entry]; i >= 0; i = next[i]) append(receives[i]);
      found.entries.push_back(int64_t(found.ops.size()));
      found.ops.insert(found.ops.end(), ops.begin() + entries[entry], ops.begin() + entries[entry + 1]);
      for (int64_t i = entries[entry]; i < entries[entry + 1]; ++i) {
        const Op& op = ops[i];
        if (op.kind == F && op.stage + 1 < stages && crosses(op.stage, op.stage + 1))
          append({op.stage, op.microbatch, SEND_F});
        if (op.kind == B && op.stage > 0 && crosses(op.stage, op.stage - 1)) append({op.stage, op.microbatch, SEND_B});
      }
    }
  }
  found.programs.push_back(int64_t(found.entries.size()));
  found.entries.push_back(int64_t(found.ops.size()));
  return found;
}

std::vector<int64_t> Table::peak_in_flight() const {
  std::vector<uint8_t> weighs(stages * microbatches);
  for (const Op& op : ops)
    if (op.kind == W) weighs[number(F, op.stage, op.microbatch)] = 1;
  std::vector<int64_t> held(stages), peak(stages);
  for (size_t entry = 0; entry + 1 < entries.size(); ++entry) {
    for (int64_t i = entries[entry]; i < entries[entry + 1]; ++i)
      if (ops[i].kind == F) peak[ops[i].stage] = std::max(peak[ops[i].stage], ++held[ops[i].stage]);
    for (int64_t i = entries[entry]; i < entries[entry + 1]; ++i) {
      const Op& op = ops[i];
      const bool frees = op.kind == W || (op.kind == B && !weighs[number(F, op.stage, op.microbatch)]);
      if (frees) --held[op.stage];
    }
  }
  return peak;
}

}  // namespace merak::pipeline
