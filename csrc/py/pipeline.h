// The problem of pipeline_parallel/search: problem.py says what its members are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace merak::search {

// A code is 4 * (micro-batch * stages of the rank + place among them) + kind; every stage runs each kind in micro-batch
// order.
enum Part : int { kForward, kRecompute, kBackward, kWeight };
using Program = std::vector<int32_t>;

constexpr double kForEver = std::numeric_limits<double>::infinity();

struct Rule {
  std::vector<int32_t> warmup;
  double patience;
  bool forward_first;
  int32_t early;
  std::vector<bool> split;
  bool weights_last;
  std::pair<bool, bool> late;
};

// Costs and limits, a value per stage, of the cap one per rank; which stages may run R and W on their own, and where they are.
struct Pipeline {
  int32_t microbatches;
  std::vector<double> forward, backward, weight, recompute, transfer, latency;
  std::vector<double> cap, kept, taped, weight_held;
  std::vector<bool> early, split;
  std::vector<int32_t> home;                     // the rank of each stage
  std::vector<std::vector<int32_t>> stages_of{};  // of each rank, ascending

  int32_t stages() const { return int32_t(forward.size()); }
  int32_t ranks() const { return int32_t(cap.size()); }

  std::vector<std::vector<double>> ends(const std::vector<Program>& programs) const;

  double makespan(const std::vector<Program>& programs) const {
    double last = -kForEver;
    for (const auto& end : ends(programs)) last = std::max(last, end.back());
    return last == -kForEver ? kForEver : last;
  }

  std::vector<Program> list(const Rule& rule) const;

  bool allows(int32_t rank, const Program& program) const;
};

}  // namespace merak::search
