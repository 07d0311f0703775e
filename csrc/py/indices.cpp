// Which tokens make which sample, and which data set gives it: the loops of data/gpt_index.py and data/blend.py. The NumPy
// code there says what is computed; here it is the same, bit for bit.
#include "exact.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace merak {
namespace {

// The words of numpy.random.RandomState: MT19937 (Matsumoto and Nishimura, 1998), from a state of 624 words on.
class MersenneTwister {
 public:
  static constexpr int64_t kWords = 624, kMiddle = 397;

  MersenneTwister(uint32_t* state, int64_t position) : state_(state), position_(position) { temper(); }

  int64_t position() const { return position_; }

  uint32_t next() {
    if (position_ == kWords) {
      twist();
      temper();
      position_ = 0;
    }
    return tempered_[position_++];
  }

 private:
  static uint32_t mixed(uint32_t upper, uint32_t lower) {
    const uint32_t y = (upper & 0x80000000u) | (lower & 0x7fffffffu);
    return (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
  }

  void twist() {
    constexpr int64_t rest = kWords - kMiddle;
    for (int64_t i = 0; i < rest; ++i) state_[i] = state_[i + kMiddle] ^ mixed(state_[i], state_[i + 1]);
    for (int64_t i = rest; i < kWords - 1; ++i) state_[i] = state_[i - rest] ^ mixed(state_[i], state_[i + 1]);
    state_[kWords - 1] = state_[kMiddle - 1] ^ mixed(state_[kWords - 1], state_[0]);
  }

  void temper() {
    for (int64_t i = 0; i < kWords; ++i) {
      uint32_t y = state_[i];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9d2c5680u;
      y ^= (y << 15) & 0xefc60000u;
      tempered_[i] = y ^ (y >> 18);
    }
  }

  uint32_t* state_;
  int64_t position_;
  std::array<uint32_t, kWords> tempered_;
};

uint32_t ones_covering(uint32_t value) {
  for (int shift = 1; shift < 32; shift *= 2) value |= value >> shift;
  return value;
}

// Fisher and Yates, from the last place to the first, with the draws of RandomState.shuffle: a place up to i is the first
// word that does not exceed i under the smallest mask of ones that covers i. Places are drawn a batch
// ahead, without a branch on whether a word will do, so that what they name is on its way from memory when it is swapped.
template <class T>
void shuffle(T* items, int64_t size, MersenneTwister& words) {
  constexpr int64_t kBatch = 512;
  std::array<uint32_t, kBatch> places;
  for (int64_t last = size - 1; last > 0;) {
    const uint32_t mask = ones_covering(uint32_t(last));
    const int64_t wanted = std::min<int64_t>(kBatch, last - int64_t(mask >> 1));
    int64_t found = 0;
    while (found < wanted) {
      places[found] = words.next() & mask;
      found += places[found] <= uint32_t(last - found);
    }
    for (int64_t k = 0; k < wanted; ++k) __builtin_prefetch(items + places[k], 1);
    for (int64_t k = 0; k < wanted; ++k) std::swap(items[last - k], items[places[k]]);
    last -= wanted;
  }
}

// work(part) for every part, each on a thread of its own.
template <class Work>
void in_parallel(int64_t parts, const Work& work) {
  std::vector<std::thread> others;
  for (int64_t part = 1; part < parts; ++part) {
    try {
      others.emplace_back(work, part);
    } catch (const std::system_error&) {  // no more threads
      work(part);
    }
  }
  work(0);
  for (auto& thread : others) thread.join();
}

// A column of a file that may be mapped at any address.
template <class T>
struct Column {
  const char* data;
  int64_t size;

  T operator[](int64_t i) const {
    T value;
    std::memcpy(&value, data + i * int64_t(sizeof(T)), sizeof(T));
    return value;
  }
};

template <class T>
Column<T> column(const py::array& array) {
  return {static_cast<const char*>(array.data()), int64_t(array.size())};
}

template <class T>
bool holds(const py::array& array) {
  return py::isinstance<py::array_t<T>>(array);
}

void demand(bool kept, const char* what) {
  if (!kept) throw std::invalid_argument(what);
}

// work(lengths, documents) with the columns of int32 or int64 that two arrays are.
template <class Work>
auto by_types(const py::array& lengths, const py::array& documents, const Work& work) {
  for (const auto* array : {&lengths, &documents}) {
    demand(array->ndim() == 1 && (array->flags() & py::array::c_style), "one dense dimension expected");
    demand(holds<int32_t>(*array) || holds<int64_t>(*array), "int32 or int64 expected");
  }
  const auto with_lengths = [&](auto length) {
    const auto first = column<decltype(length)>(lengths);
    return holds<int32_t>(documents) ? work(first, column<int32_t>(documents)) : work(first, column<int64_t>(documents));
  };
  return holds<int32_t>(lengths) ? with_lengths(int32_t()) : with_lengths(int64_t());
}

struct Stretch {
  int64_t first = 0, last = 0;         // positions [first, last) of the reading order
  int64_t tokens = 0, longest = 0;     // of its documents together, and of the longest
  bool unknown = false, negative = false;
};

template <class Lengths, class Documents>
void measure(const Lengths& lengths, const Documents& documents, Stretch& stretch) {
  int64_t tokens = 0, longest = 0, shortest = 0;
  bool unknown = lengths.size == 0 && stretch.first < stretch.last;
  for (int64_t i = stretch.first; i < stretch.last && lengths.size > 0; ++i) {
    const int64_t document = documents[i];
    const bool known = uint64_t(document) < uint64_t(lengths.size);
    unknown |= !known;
    const int64_t length = lengths[known ? document : 0];
    tokens += length;
    longest = std::max(longest, length);
    shortest = std::min(shortest, length);
  }
  stretch.unknown = unknown;
  stretch.tokens = tokens;
  stretch.longest = longest;
  stretch.negative = shortest < 0;
}

constexpr int64_t kGrain = 1 << 16;  // documents that are worth a thread

// The reading order in as many stretches as there are threads to use, each measured.
template <class Lengths, class Documents>
std::vector<Stretch> measured(const Lengths& lengths, const Documents& documents, int64_t threads, int64_t grain) {
  const int64_t size = documents.size, parts = std::clamp<int64_t>(size / grain, 1, std::max<int64_t>(1, threads));
  std::vector<Stretch> stretches(parts);
  for (int64_t part = 0; part < parts; ++part) {
    stretches[part].first = size / parts * part + std::min(part, size % parts);
    stretches[part].last = size / parts * (part + 1) + std::min(part + 1, size % parts);
  }
  in_parallel(parts, [&](int64_t part) { measure(lengths, documents, stretches[part]); });
  for (const auto& stretch : stretches) {
    if (stretch.unknown) throw std::out_of_range("a document that there is not");
    demand(!stretch.negative, "a document of negative length");
  }
  return stretches;
}

int64_t count_tokens(const py::array& lengths, const py::array& documents, int64_t threads, int64_t grain) {
  return by_types(lengths, documents, [&](auto from, auto order) {
    py::gil_scoped_release release;
    int64_t tokens = 0;
    for (const auto& stretch : measured(from, order, threads, grain)) tokens += stretch.tokens;
    return tokens;
  });
}

// The samples that start in a stretch, before which there are so many tokens; rows of (position, offset). The last sample
// may be cut short by the end of the text, at token `extent`.
template <class Row, class Lengths, class Documents>
void write_starts(const Lengths& lengths, const Documents& documents, const Stretch& stretch, int64_t before,
                  int64_t sequence_length, int64_t extent, int64_t samples, Row* rows) {
  if (before > extent) return;
  int64_t sample = before / sequence_length + (before % sequence_length > 0);
  int64_t token = std::min(sample * sequence_length, extent);
  for (int64_t i = stretch.first; i < stretch.last && sample <= samples; ++i) {
    const int64_t end = before + int64_t(lengths[documents[i]]);
    while (token < end) {
      rows[2 * sample] = Row(i);
      rows[2 * sample + 1] = Row(token - before);
      if (++sample > samples) return;
      token = std::min(sample * sequence_length, extent);
    }
    before = end;
  }
}

// The work of one thread is a stretch of documents: a first pass over all of them says how many tokens are before each, a
// second one writes its rows.
py::array sample_starts(const py::array& lengths, const py::array& documents, int64_t sequence_length, bool drop_last,
                        int64_t threads, int64_t grain) {
  demand(sequence_length > 0, "a sample of no tokens");
  return by_types(lengths, documents, [&](auto from, auto order) -> py::array {
    std::vector<Stretch> stretches;
    int64_t tokens = 0, longest = 0;
    {
      py::gil_scoped_release release;
      stretches = measured(from, order, threads, grain);
    }
    std::vector<int64_t> before;
    for (const auto& stretch : stretches) {
      before.push_back(tokens);
      tokens += stretch.tokens;
      longest = std::max(longest, stretch.longest);
    }
    demand(tokens > 0, "documents without a token");
    const int64_t extent = tokens - 1;
    const int64_t samples = extent / sequence_length + (!drop_last && extent % sequence_length > 0);
    const auto filled = [&](auto row) -> py::array {
      py::array_t<decltype(row)> found({py::ssize_t(samples + 1), py::ssize_t(2)});
      auto* rows = found.mutable_data();
      {
        py::gil_scoped_release release;
        in_parallel(int64_t(stretches.size()), [&](int64_t part) {
          write_starts(from, order, stretches[part], before[part], sequence_length, extent, samples, rows);
        });
      }
      rows[0] = 0;  // Megatron's first row names the first document even if that one is empty.
      return found;
    };
    const bool narrow = std::max(order.size, longest) <= std::numeric_limits<int32_t>::max();
    return narrow ? filled(int32_t()) : filled(int64_t());
  });
}

// Shuffles an array of 4- or 8-byte items in place; `state` holds the 624 words of a RandomState, in place too. Returns the
// position in them.
int64_t shuffle_array(py::array& items, py::array_t<uint32_t>& state, int64_t position) {
  demand(items.ndim() == 1 && (items.flags() & py::array::c_style) && items.writeable(), "a dense array expected");
  demand(items.itemsize() == 4 || items.itemsize() == 8, "items of 4 or 8 bytes expected");
  demand(items.size() <= int64_t(1) << 32, "places beyond 32 bits are not drawn here");
  demand(state.size() == MersenneTwister::kWords && state.writeable(), "624 words of state expected");
  demand(0 <= position && position <= MersenneTwister::kWords, "a position from 0 to 624 expected");
  void* data = items.mutable_data();
  uint32_t* words = state.mutable_data();
  const int64_t size = items.size();
  const bool narrow = items.itemsize() == 4;
  py::gil_scoped_release release;
  MersenneTwister twister(words, position);
  if (narrow) {
    shuffle(static_cast<uint32_t*>(data), size, twister);
  } else {
    shuffle(static_cast<uint64_t*>(data), size, twister);
  }
  return twister.position();
}

// What the data sets of a blend have given, those that may still give in order.
struct Blend {
  std::vector<double> shares, taken, lag;
  std::vector<int64_t> left, given;
  std::vector<int16_t> names;

  // The one that lags furthest behind its share after so many steps; the first of several.
  int64_t furthest(double steps) {
    const int64_t count = int64_t(shares.size());
    const double *share = shares.data(), *took = taken.data();
    double *behind = lag.data(), most = -std::numeric_limits<double>::infinity();
#pragma omp simd reduction(max : most)
    for (int64_t d = 0; d < count; ++d) {
      behind[d] = share[d] * steps - took[d];
      most = std::max(most, behind[d]);
    }
    return std::find(behind, behind + count, most) - behind;
  }

  void drop(int64_t d) {
    shares.erase(shares.begin() + d);
    taken.erase(taken.begin() + d);
    left.erase(left.begin() + d);
    given.erase(given.begin() + d);
    names.erase(names.begin() + d);
  }
};

// Writes (data set, its sample) of `size` steps. Data sets have `sizes` samples, or as many as it takes.
void give(const std::vector<double>& shares, const std::vector<int64_t>& sizes, int64_t size, int16_t* set,
          int64_t* sample) {
  Blend now;
  for (size_t d = 0; d < shares.size(); ++d) {
    if (!sizes.empty() && sizes[d] <= 0) continue;
    now.shares.push_back(shares[d]);
    now.left.push_back(sizes.empty() ? std::numeric_limits<int64_t>::max() : sizes[d]);
    now.names.push_back(int16_t(d));
  }
  now.taken.resize(now.shares.size());
  now.lag.resize(now.shares.size());
  now.given.resize(now.shares.size());
  for (int64_t step = 0; step < size; ++step) {
    const int64_t d = now.furthest(double(std::max<int64_t>(step, 1)));
    set[step] = now.names[d];
    sample[step] = now.given[d]++;
    now.taken[d] += 1;
    if (--now.left[d] == 0) now.drop(d);
  }
}

py::tuple blend(const std::vector<double>& shares, const std::vector<int64_t>& sizes, int64_t size) {
  demand(shares.size() <= size_t(std::numeric_limits<int16_t>::max()), "more data sets than int16 can name");
  demand(sizes.empty() || sizes.size() == shares.size(), "a size for every data set expected");
  int64_t most = shares.empty() ? 0 : std::numeric_limits<int64_t>::max();
  if (!sizes.empty()) {
    most = 0;
    for (const int64_t left : sizes) most += std::max<int64_t>(left, 0);
  }
  demand(0 <= size && size <= most, "more steps than samples");
  for (const double share : shares) demand(std::isfinite(share), "finite shares expected");
  py::array_t<int16_t> which(size);
  py::array_t<int64_t> sample(size);
  int16_t* const set = which.mutable_data();
  int64_t* const rank = sample.mutable_data();
  {
    py::gil_scoped_release release;
    give(shares, sizes, size, set, rank);
  }
  return py::make_tuple(std::move(which), std::move(sample));
}

}  // namespace

void bind_indices(py::module_& module) {
  module.def("count_tokens", &count_tokens, py::arg("lengths"), py::arg("documents"), py::arg("threads"),
             py::arg("grain") = kGrain);
  module.def("sample_starts", &sample_starts, py::arg("lengths"), py::arg("documents"), py::arg("sequence_length"),
             py::arg("drop_last"), py::arg("threads"), py::arg("grain") = kGrain);
  module.def("shuffle", &shuffle_array, py::arg("items").noconvert(), py::arg("state").noconvert(), py::arg("position"));
  module.def("blend", &blend, py::arg("shares"), py::arg("sizes"), py::arg("size"));
}

}  // namespace merak
