#include "communicator.h"

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace merak {
namespace {

constexpr size_t kLine = 64, kPage = 4096;
constexpr double kNap = 0.05;  // seconds between two looks at who is still there

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Part `place` of `bytes` that are divided among ranks: [begin, end), whole cache lines but for the end.
std::pair<size_t, size_t> part(size_t bytes, int ranks, int place) {
  const size_t each = rounded((bytes + ranks - 1) / ranks, kLine);
  return {std::min(bytes, each * place), std::min(bytes, each * (place + 1))};
}

void copy(char* to, const char* from, size_t bytes) {
  if (to != from && bytes != 0) std::memmove(to, from, bytes);
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

enum State : uint32_t { kSound, kBreaking, kBroken };

}  // namespace

struct Communicator::Header {
  uint64_t token, slot_bytes;
  uint32_t ranks, slots;
  alignas(kLine) Bell bell;
  alignas(kLine) std::atomic<uint32_t> state;
  char reason[512];
};

// A line of its own for each count: its one writer and its readers do not disturb those of others.
struct Communicator::Counts {
  alignas(2 * kLine) std::atomic<uint64_t> published;
  alignas(2 * kLine) std::atomic<uint64_t> reduced;
  alignas(2 * kLine) std::atomic<uint64_t> finished;
};

namespace {

constexpr size_t kCounts = 1024, kCountsEach = 6 * kLine;

size_t signatures_at(const Shape& shape) { return kCounts + shape.ranks * kCountsEach; }

size_t slots_at(const Shape& shape) {
  return rounded(signatures_at(shape) + size_t(shape.ranks) * shape.slots * 2 * sizeof(uint64_t), kPage);
}

}  // namespace

size_t Shape::bytes() const { return slots_at(*this) + size_t(ranks) * slots * slot_bytes; }

// ---- The segment

Communicator::Communicator(Segment segment, const Shape& shape, const Seat& seat)
    : shape_(shape), seat_(seat), segment_(std::move(segment)), watched_(shape.ranks, false) {
  static_assert(sizeof(Header) <= kCounts && sizeof(Counts) == kCountsEach);
  static_assert(sizeof(Signature) == 2 * sizeof(uint64_t));
}

Communicator* Communicator::create(const std::string& name, uint64_t token, const Shape& shape, const Seat& seat) {
  if (shape.ranks < 2 || shape.ranks > kMostRanks || shape.slots < 1 || shape.slot_bytes % kPage != 0 ||
      shape.slot_bytes < kLine * size_t(shape.ranks))
    throw std::invalid_argument("no shape of a shared-memory group");
  Segment segment = Segment::create(name, shape.bytes());
  segment.claim(seat.place);
  auto made = new Communicator(std::move(segment), shape, seat);
  Header& header = made->header();
  header.slot_bytes = shape.slot_bytes;
  header.ranks = uint32_t(shape.ranks);
  header.slots = uint32_t(shape.slots);
  header.token = token;
  return made;
}

Communicator* Communicator::join(const std::string& name, uint64_t token, const Shape& shape, const Seat& seat) {
  Segment segment = Segment::open(name);
  const auto header = reinterpret_cast<const Header*>(segment.data());
  if (segment.size() != shape.bytes() || header->token != token || header->ranks != uint32_t(shape.ranks) ||
      header->slots != uint32_t(shape.slots) || header->slot_bytes != shape.slot_bytes)
    throw std::runtime_error("shared memory " + name + " is not the first rank's");
  segment.claim(seat.place);
  return new Communicator(std::move(segment), shape, seat);
}

void Communicator::watch() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int place = 0; place < shape_.ranks; ++place)
    watched_[place] = place != seat_.place && segment_ && segment_->claimed(place);
}

Communicator::Header& Communicator::header() const { return *reinterpret_cast<Header*>(segment_->data()); }

Communicator::Counts& Communicator::counts(int place) const {
  return *reinterpret_cast<Counts*>(segment_->data() + kCounts + place * kCountsEach);
}

Communicator::Signature& Communicator::signature(int place, uint64_t block) const {
  const auto first = reinterpret_cast<Signature*>(segment_->data() + signatures_at(shape_));
  return first[size_t(place) * shape_.slots + block % shape_.slots];
}

char* Communicator::slot(int place, uint64_t block) const {
  return segment_->data() + slots_at(shape_) +
         (size_t(place) * shape_.slots + block % shape_.slots) * shape_.slot_bytes;
}

// ---- Launching

uint64_t Communicator::all_reduce(const char* in, char* out, size_t bytes, Element element, Reduction reduction,
                                  const Limit& limit) {
  Operation operation = {Kind::all_reduce, element, reduction, 0, {in}, {out}, bytes, shape_.slot_bytes};
  operation.in_parts = shape_.ranks > 2 && bytes > shape_.slot_bytes;
  return launch(std::move(operation), limit);
}

uint64_t Communicator::reduce_scatter(std::vector<const char*> in, char* out, size_t bytes, Element element,
                                      Reduction reduction, const Limit& limit) {
  const size_t block = shape_.slot_bytes / shape_.ranks / kLine * kLine;
  return launch({Kind::reduce_scatter, element, reduction, 0, std::move(in), {out}, bytes, block}, limit);
}

uint64_t Communicator::all_gather(const char* in, std::vector<char*> out, size_t bytes, const Limit& limit) {
  return launch({Kind::all_gather, {}, {}, 0, {in}, std::move(out), bytes, shape_.slot_bytes}, limit);
}

uint64_t Communicator::broadcast(char* data, size_t bytes, int root, const Limit& limit) {
  return launch({Kind::broadcast, {}, {}, root, {data}, {data}, bytes, shape_.slot_bytes}, limit);
}

uint64_t Communicator::launch(Operation operation, const Limit& limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  require_sound();
  while (queue_.size() >= size_t(shape_.slots)) finish(done_ + 1, limit);
  operation.begin = operation.next = launched_;
  launched_ += (operation.bytes + operation.block - 1) / operation.block;
  operation.end = launched_;
  operation.reduced = false;
  operation.launched = seconds_now();
  queue_.push_back(std::move(operation));
  publish_all();
  return ++numbered_;
}

// Publishes, in order, every launched block that has room; whether there was one.
bool Communicator::publish_all() {
  if (published_ == launched_) return false;
  const uint64_t before = published_;
  for (Operation& operation : queue_) {
    while (published_ < operation.end) {
      if (!has_room(published_)) return published_ != before;
      publish(operation, published_);
      ++published_;
    }
  }
  return published_ != before;
}

bool Communicator::has_room(uint64_t block) {
  if (block < room_ + shape_.slots) return true;
  room_ = finished_;
  for (int place = 0; place < shape_.ranks; ++place)
    if (place != seat_.place)
      room_ = std::min(room_, counts(place).finished.load(std::memory_order_acquire));
  return block < room_ + shape_.slots;
}

void Communicator::publish(const Operation& operation, uint64_t block) {
  const size_t offset = (block - operation.begin) * operation.block;
  const size_t bytes = std::min(operation.block, operation.bytes - offset);
  char* to = slot(seat_.place, block);
  if (operation.kind == Kind::reduce_scatter) {
    for (int place = 0; place < shape_.ranks; ++place)
      if (place != seat_.place) copy(to + place * operation.block, operation.in[place] + offset, bytes);
  } else if (operation.in_parts) {  // all but the part that this rank reduces
    const auto [begin, end] = part(bytes, shape_.ranks, seat_.place);
    copy(to, operation.in[0] + offset, begin);
    copy(to + end, operation.in[0] + offset + end, bytes - end);
  } else if (operation.kind != Kind::broadcast || operation.root == seat_.place) {
    copy(to, operation.in[0] + offset, bytes);
  }
  signature(seat_.place, block) = operation.signature();
  counts(seat_.place).published.store(block + 1, std::memory_order_release);
  header().bell.ring();
}

// ---- Waiting

void Communicator::wait(uint64_t number, const Limit& limit) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (done_ < number) finish(number, limit);
}

bool Communicator::test(uint64_t number, const Limit& limit) {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || done_ >= number) return done_ >= number;
  require_sound();
  while (done_ < number && step()) {
  }
  if (done_ < number) examine(queue_.front().launched, limit);
  return done_ >= number;
}

void Communicator::finish(uint64_t number, const Limit& limit) {
  require_sound();
  Patience patience(seat_.crowded);
  double since = 0;  // when the last step was, once it is time to sleep
  while (done_ < number) {
    bool moved = step();
    if (!moved && patience.pass()) continue;
    if (!moved) {
      if (since == 0) since = seconds_now();
      header().bell.sleep(std::min(kNap, limit.seconds), [&] { return moved = step(); });
    }
    if (moved) {
      patience.renew();
      since = 0;
    } else {
      examine(since, limit);
    }
  }
}

// Does one thing that can be done without waiting; whether there was one.
bool Communicator::step() {
  const bool published = publish_all();
  if (queue_.empty()) return published;
  Operation& oldest = queue_.front();
  const bool taken = oldest.next < oldest.end && take(oldest);
  if (oldest.next < oldest.end) return published || taken;
  queue_.pop_front();
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

// One phase of the operation's next block, if the other ranks are as far as it needs them.
bool Communicator::take(Operation& operation) {
  const uint64_t block = operation.next;
  if (block >= published_) return false;
  for (int place = 0; place < shape_.ranks; ++place)
    if (lags(place)) return false;
  const size_t offset = (block - operation.begin) * operation.block;
  const size_t bytes = std::min(operation.block, operation.bytes - offset);
  Counts& own = counts(seat_.place);
  if (!operation.reduced) compare(operation);
  if (operation.in_parts && !operation.reduced) {
    reduce_part(operation, offset, bytes);
    operation.reduced = true;
    own.reduced.store(block + 1, std::memory_order_release);
  } else {
    read(operation, offset, bytes);
    operation.reduced = false;
    finished_ = ++operation.next;
    own.finished.store(finished_, std::memory_order_release);
  }
  header().bell.ring();
  return true;
}

// Whether the oldest operation needs more of a rank than it has done: a slot read, a block published, a part reduced.
bool Communicator::lags(int place) const {
  if (place == seat_.place || queue_.empty()) return false;
  const Operation& oldest = queue_.front();
  const Counts& other = counts(place);
  if (oldest.next >= published_)
    return other.finished.load(std::memory_order_acquire) + shape_.slots <= oldest.next;
  if (oldest.kind == Kind::broadcast && oldest.root != place) return false;
  return (oldest.reduced ? other.reduced : other.published).load(std::memory_order_acquire) <= oldest.next;
}

void Communicator::compare(const Operation& operation) {
  const Signature own = operation.signature();
  for (int place = 0; place < shape_.ranks; ++place) {
    if (place == seat_.place || (operation.kind == Kind::broadcast && operation.root != place)) continue;
    const Signature& other = signature(place, operation.next);
    if (other.what == own.what && other.bytes == own.bytes) continue;
    fail(name(seat_.place) + " launched " + operation.text() + " where " + name(place) +
         " launched another collective or size");
  }
}

// This rank's part of a block of an all-reduce: into the result, and into the slot for the others.
void Communicator::reduce_part(const Operation& operation, size_t offset, size_t bytes) {
  const auto [begin, end] = part(bytes, shape_.ranks, seat_.place);
  const char* from[kMostRanks];
  for (int place = 0; place < shape_.ranks; ++place)
    from[place] = (place == seat_.place ? operation.in[0] + offset : slot(place, operation.next)) + begin;
  char* out = operation.out[0] + offset + begin;
  reduce(operation.element, operation.reduction, out, from, shape_.ranks, end - begin);
  copy(slot(seat_.place, operation.next) + begin, out, end - begin);
}

// What this rank takes from the slots of the others.
void Communicator::read(const Operation& operation, size_t offset, size_t bytes) {
  const char* from[kMostRanks];
  for (int place = 0; place < shape_.ranks; ++place) from[place] = slot(place, operation.next);
  const int own = seat_.place;
  switch (operation.kind) {
    case Kind::all_reduce:
      if (!operation.in_parts) {
        from[own] = operation.in[0] + offset;
        return reduce(operation.element, operation.reduction, operation.out[0] + offset, from, shape_.ranks, bytes);
      }
      for (int place = 0; place < shape_.ranks; ++place) {
        const auto [begin, end] = part(bytes, shape_.ranks, place);
        if (place != own) copy(operation.out[0] + offset + begin, from[place] + begin, end - begin);
      }
      return;
    case Kind::reduce_scatter:
      for (int place = 0; place < shape_.ranks; ++place) from[place] += own * operation.block;
      from[own] = operation.in[own] + offset;
      return reduce(operation.element, operation.reduction, operation.out[0] + offset, from, shape_.ranks, bytes);
    case Kind::all_gather:
      from[own] = operation.in[0] + offset;
      for (int place = 0; place < shape_.ranks; ++place) copy(operation.out[place] + offset, from[place], bytes);
      return;
    case Kind::broadcast:
      if (operation.root != own) copy(operation.out[0] + offset, from[operation.root], bytes);
      return;
  }
}

// ---- When it goes wrong

void Communicator::examine(double since, const Limit& limit) {
  require_sound();
  if (limit.interrupted) limit.interrupted();
  const double waited = seconds_now() - since;
  std::string late;
  for (int place = 0; place < shape_.ranks; ++place) {
    if (!lags(place)) continue;
    const bool ended = watched_[place] && !segment_->claimed(place);
    if (ended && lags(place))  // it may have gone on just before it ended
      fail(name(place) + " has ended, and " + name(seat_.place) + " waits for it in " + queue_.front().text() +
           " since " + seconds_text(waited));
    late += (late.empty() ? "" : ", ") + name(place);
  }
  if (waited > limit.seconds && !late.empty())
    fail(name(seat_.place) + " has waited " + seconds_text(waited) + " for " + late + " in " + queue_.front().text());
}

std::string Communicator::name(int place) const { return "rank " + std::to_string(seat_.ranks[place]); }

void Communicator::require_sound() const {
  if (!segment_) throw std::runtime_error("shared memory of group " + seat_.group + ": the group has been closed");
  uint32_t state = header().state.load(std::memory_order_acquire);
  if (state == kSound) return;
  for (int looks = 0; state == kBreaking && looks < 1000000; ++looks) {  // until the reason is written
    relax();
    state = header().state.load(std::memory_order_acquire);
  }
  const std::string reason = state == kBroken ? header().reason : "a rank gave up";
  throw std::runtime_error("shared memory of group " + seat_.group + ": " + reason);
}

void Communicator::fail(const std::string& reason) {
  abort(reason);
  require_sound();
  throw std::logic_error(reason);
}

void Communicator::abort(const std::string& reason) {
  if (!segment_) return;
  uint32_t sound = kSound;
  if (!header().state.compare_exchange_strong(sound, kBreaking)) return;
  std::strncpy(header().reason, reason.c_str(), sizeof header().reason - 1);
  header().state.store(kBroken, std::memory_order_release);
  header().bell.ring();
}

void Communicator::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.clear();
  segment_.reset();
}

}  // namespace merak
