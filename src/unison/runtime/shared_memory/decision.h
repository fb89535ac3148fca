// What the replicas of one process decide together.

#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "futex.h"
#include "halt.h"

namespace unison {

// Lets all replicas of a process decide together whether a program takes effect: a failure may reach
// some of them before their last exchange, and others after it.
class Decision {
 public:
  Decision(uint32_t size, double seconds) : size_(size), seconds_(seconds) {}

  // Returns, for all of them, whether no replica has failed. It waits for the others, who never
  // wait for anybody longer than the time limit.
  bool all_are_well(bool is_well) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (is_over_) return false;
    well_ = well_ && is_well;
    const uint64_t round = round_;
    if (++arrived_ == size_) {
      verdict_ = well_;
      well_ = true;
      arrived_ = 0;
      ++round_;
      tell_others();
      return verdict_;
    }
    const double deadline = now() + seconds_;
    while (round_ == round && !is_over_ && now() < deadline) {
      const uint32_t seen = changes_.load(std::memory_order_relaxed);
      lock.unlock();
      sleep_on(changes_, seen, duration(deadline - now()));
      lock.lock();
    }
    if (round_ != round) return verdict_;
    end();
    return false;
  }

  // Whoever waits, or comes later, is told that a replica has failed.
  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    end();
  }

 private:
  void end() {
    is_over_ = true;
    tell_others();
  }

  // Called under the lock: a thread that has read the old state can no longer fall asleep.
  void tell_others() {
    changes_.fetch_add(1, std::memory_order_relaxed);
    wake_all(changes_);
  }

  static timespec duration(double seconds) {
    seconds = std::clamp(seconds, 0.0, 3600.0);
    const time_t whole = static_cast<time_t>(seconds);
    return {whole, static_cast<long>((seconds - whole) * 1e9)};
  }

  const uint32_t size_;
  const double seconds_;
  std::mutex mutex_;
  // A futex: to wait for a condition variable with a monotonic clock is newer than glibc 2.28.
  std::atomic<uint32_t> changes_{0};
  uint64_t round_ = 0;
  uint32_t arrived_ = 0;
  bool well_ = true;
  bool verdict_ = false;
  bool is_over_ = false;
};

}  // namespace unison
