// What ends the waiting of replicas for each other.

#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "buffers.h"
#include "xla/ffi/api/ffi.h"

namespace unison {

namespace ffi = xla::ffi;

inline double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Where a machine's processes record why their group has ended. It is filled with zeros at first,
// and a process that writes it may die before it is complete.
struct Notice {
  std::atomic<uint32_t> writers;
  std::atomic<uint32_t> complete;
  ffi::ErrorCode code;
  char reason[1024];
};

// Whether a group is at an end, and why. Only the first reason counts.
class Halt {
 public:
  // `seconds` is how long a replica waits for another; what others leave at `notice` counts, too.
  Halt(double seconds, Notice* notice) : seconds(seconds), notice_(notice) {}

  const double seconds;

  bool is_raised() const {
    return raised_.load(std::memory_order_acquire) ||
           (notice_ != nullptr && notice_->complete.load(std::memory_order_acquire) != 0);
  }

  void raise(const ffi::Error& why, bool tells_others = true) {
    std::lock_guard<std::mutex> lock(mutex_);
    look();
    if (why_.failure()) return;
    why_ = why;
    raised_.store(true, std::memory_order_release);
    if (notice_ == nullptr || !tells_others || notice_->writers.fetch_add(1) != 0) return;
    notice_->code = *why.errc();
    const size_t size = std::min(why.message().size(), sizeof notice_->reason - 1);
    std::memcpy(notice_->reason, why.message().data(), size);
    notice_->complete.store(1, std::memory_order_release);
  }

  // Success as long as it was not raised.
  ffi::Error why() {
    std::lock_guard<std::mutex> lock(mutex_);
    look();
    return why_;
  }

  ffi::Error timeout(const std::string& who, const Label& label) const {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                      who + " did not reach operation " + std::to_string(label.operation) + ", " +
                          label.words + ", within " + std::to_string(std::lround(seconds)) +
                          " s. It has ended, is stuck, or runs a different program.");
  }

 private:
  void look() {
    if (why_.failure() || notice_ == nullptr) return;
    if (notice_->complete.load(std::memory_order_acquire) == 0) return;
    why_ = ffi::Error(notice_->code, notice_->reason);
  }

  Notice* const notice_;
  std::atomic<bool> raised_{false};
  std::mutex mutex_;
  ffi::Error why_;
};

// What two replicas say that meet in different operations; `theirs` may have no words.
inline ffi::Error mismatch(const std::string& own, const Label& label, const std::string& other,
                           const Label& theirs) {
  std::string words = theirs.words[0] ? std::string(", ") + theirs.words : "";
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    own + " is at operation " + std::to_string(label.operation) + ", " +
                        label.words + "; " + other + " is at operation " +
                        std::to_string(theirs.operation) + words +
                        ". All workers must run the same program on values of the same shapes.");
}

}  // namespace unison
