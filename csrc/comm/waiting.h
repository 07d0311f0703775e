// Waiting for other processes: look again at once, then sleep until a bell rings.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace merak {

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Wakes the processes that sleep on it. In shared memory; all zero is a bell at rest.
//
// None sleeps through a change: who changes something does so, passes a full fence and then looks for sleepers; who
// wants to sleep enters itself, passes a full fence and then looks for the change. One of the two sees the other.
class Bell {
 public:
  // After a change that somebody may wait for.
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_relaxed) == 0) return;
    rings_.fetch_add(1, std::memory_order_release);
#ifdef __linux__
    syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
  }

  // Until the next ring, at most `seconds`; not at all if ready() holds once this process is entered as asleep.
  template <class Ready>
  void sleep(double seconds, const Ready& ready) {
    const uint32_t heard = rings_.load(std::memory_order_acquire);
    const Asleep asleep(sleepers_);
    if (ready()) return;
#ifdef __linux__
    timespec most = {time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
    syscall(SYS_futex, &rings_, FUTEX_WAIT, heard, &most, nullptr, 0);
#else
    if (rings_.load() == heard) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
  }

 private:
  struct Asleep {
    explicit Asleep(std::atomic<uint32_t>& count) : count(count) {
      count.fetch_add(1, std::memory_order_seq_cst);
      std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    ~Asleep() { count.fetch_sub(1, std::memory_order_relaxed); }
    std::atomic<uint32_t>& count;
  };

  std::atomic<uint32_t> rings_, sleepers_;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "shared memory needs atomics that work between processes");

// How often to look before sleeping: for about 0.2 ms, which is what waking up may take, or hardly at all where ranks
// have to share cores. Never to yield instead: a sleeper is woken ahead of others, who yields goes behind them.
class Patience {
 public:
  explicit Patience(bool crowded) : most_(crowded ? 50 : 6000) {}

  void renew() { count_ = 0; }

  // Lets a moment pass; false where it is time to sleep.
  bool pass() {
    if (count_ == most_) return false;
    ++count_;
    relax();
    return true;
  }

 private:
  const int most_;
  int count_ = 0;
};

}  // namespace merak
