// What the replicas of one process decide together.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace unison {

// Makes it one decision of all replicas of a process whether a program takes effect: a failure may
// find some of them before their last exchange, and others after it.
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
      changed_.notify_all();
      return verdict_;
    }
    changed_.wait_for(lock, std::chrono::duration<double>(seconds_),
                      [&] { return round_ != round || is_over_; });
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
    changed_.notify_all();
  }

  const uint32_t size_;
  const double seconds_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t round_ = 0;
  uint32_t arrived_ = 0;
  bool well_ = true;
  bool verdict_ = false;
  bool is_over_ = false;
};

}  // namespace unison
