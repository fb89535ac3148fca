// How a replica waits for others, of this process or of one that shares memory with it.

#pragma once

#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "futex.h"
#include "halt.h"

namespace unison {

constexpr size_t kLine = 128;

// What replicas tell each other: how far they are.
struct alignas(kLine) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};

// Tells the core that this is a loop that waits.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline bool reached(const Counter& counter, uint32_t count) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - count) >= 0;
}

inline void advance(Counter& counter, uint32_t count) {
  counter.value.store(count, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) {
    wake_all(counter.value);
  }
}

// Counts one more, where several replicas count; returns how many there are now.
inline uint32_t increment(Counter& counter) {
  const uint32_t count = counter.value.fetch_add(1, std::memory_order_seq_cst) + 1;
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) wake_all(counter.value);
  return count;
}

// Returns whether `counter` reached `count` before the limit and before the group was at an end.
inline bool wait_for(const Halt& halt, uint32_t spins, Counter& counter, uint32_t count) {
  for (uint32_t spin = 0; spin < spins; ++spin) {
    if (reached(counter, count)) return true;
    relax();
  }
  const double deadline = now() + halt.seconds;
  while (!reached(counter, count)) {
    if (halt.is_raised() || now() > deadline) return false;
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = counter.value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - count) < 0) {
      const timespec limit{0, 20'000'000};  // then look whether the group is at an end
      sleep_on(counter.value, seen, limit);
    }
    counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
  return true;
}

}  // namespace unison
