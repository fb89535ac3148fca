// Operations between the replicas of one process, directly between their buffers.
//
// The replicas meet at every operation of a run of a program, and each says where its operands and
// results are. Sums are then divided into parts: whichever replica is awake takes the next one, adds
// the operands of all, and stores the sum in the results of all. A small sum is one part, which the
// last replica to arrive computes. Nobody leaves before all are done with its buffers.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "arithmetic.h"
#include "buffers.h"
#include "halt.h"
#include "waiting.h"

namespace unison {

// The bytes of a part: those of several replicas fit into a core's cache.
constexpr size_t kPartBytes = 1 << 17;

// One operation of the replicas of a process.
class Rendezvous {
 public:
  Rendezvous(uint32_t size, const Label& label, int64_t kind, double seconds)
      : size_(size), label_(label), kind_(kind), halt_(seconds, nullptr), in_(size), out_(size) {}
  Rendezvous(const Rendezvous&) = delete;

  // Ends the waiting for replicas that have not arrived. When all have, they use each other's
  // buffers, and go on.
  void fail(const ffi::Error& why) {
    std::lock_guard<std::mutex> lock(arriving_);
    if (!reached(arrived_, size_)) halt_.raise(why);
  }

  // A replica's part. `source` is the rank whose operand it receives, for `kPermute`; -1 for none.
  ffi::Error run(uint32_t rank, const Label& label, const Span& in, const Span& out,
                 Combine combine, int64_t source, uint32_t spins) {
    const bool is_sum = kind_ <= kMin;
    const uint32_t parts =
        is_sum ? std::max<size_t>((in.bytes + kPartBytes - 1) / kPartBytes, 1) : size_;
    bool is_last = false;
    const ffi::Error error = arrive(rank, label, in, out, &is_last);
    if (error.failure()) return error;
    if (is_last || parts > 1) {
      if (!until(arrived_, size_, spins)) return halt_.why();
      if (is_sum) {
        for (uint32_t part; (part = next_.fetch_add(1)) < parts;) sum(part, parts, combine);
      } else {
        take(rank, combine, source);
        increment(done_);
      }
    }
    return until(done_, parts, spins) ? ffi::Error::Success() : halt_.why();
  }

 private:
  ffi::Error arrive(uint32_t rank, const Label& label, const Span& in, const Span& out,
                    bool* is_last) {
    std::lock_guard<std::mutex> lock(arriving_);
    // Labels do not have the sizes of all operands.
    const bool is_first = arrived_.value == 0;
    if (is_first) first_ = rank;
    if (!label.meets(label_) || !in.fits(is_first ? in : in_[first_])) {
      halt_.raise(mismatch("Replica " + std::to_string(rank), label, "another one", label_));
    }
    if (halt_.is_raised()) return halt_.why();
    in_[rank] = in;
    out_[rank] = out;
    *is_last = increment(arrived_) == size_;
    return ffi::Error::Success();
  }

  // Waits for a counter; returns false if a replica has not arrived in time. When all have, they use
  // each other's buffers, and nobody may leave.
  bool until(Counter& counter, uint32_t count, uint32_t spins) {
    while (!wait_for(halt_, spins, counter, count)) {
      std::lock_guard<std::mutex> lock(arriving_);
      if (reached(arrived_, size_)) continue;
      halt_.raise(halt_.timeout("A replica", label_));  // unless it ends for another reason
      return false;
    }
    return true;
  }

  void sum(uint32_t part, uint32_t parts, Combine combine) {
    if (parts == 1) {
      sum_of(in_, out_, combine);
    } else {
      const size_t start = part * kPartBytes;
      const size_t length = std::min(kPartBytes, in_[0].bytes - start);
      std::vector<Span> in, out;
      for (uint32_t r = 0; r < size_; ++r) {
        in.push_back(in_[r].part(start, length));
        out.push_back(out_[r].part(start, length));
      }
      sum_of(in, out, combine);
    }
    increment(done_);
  }

  void sum_of(const std::vector<Span>& in, const std::vector<Span>& out, Combine combine) const {
    std::vector<const char*> sources(size_);
    for (size_t piece = 0; piece < out[0].pieces.size(); ++piece) {
      const auto [total, bytes] = out[0].pieces[piece];
      for (uint32_t r = 0; r < size_; ++r) sources[r] = in[r].pieces[piece].data;
      combine(kind_, sources.data(), size_, total, bytes);
      for (uint32_t r = 1; r < out.size(); ++r) std::memcpy(out[r].pieces[piece].data, total, bytes);
    }
  }

  // Stores what this replica receives.
  void take(uint32_t rank, Combine combine, int64_t source) const {
    const Span& out = out_[rank];
    const size_t bytes = in_[rank].bytes;
    const size_t block = bytes / size_;
    switch (kind_) {
      case kGather:
        for (uint32_t r = 0; r < size_; ++r) copy(in_[r], out.part(r * bytes, bytes));
        break;
      case kSumAndScatter: {
        std::vector<Span> in;
        for (const Span& each : in_) in.push_back(each.part(rank * block, block));
        sum_of(in, {out}, combine);
        break;
      }
      case kAllToAll:
        for (uint32_t r = 0; r < size_; ++r) {
          copy(in_[r].part(rank * block, block), out.part(r * block, block));
        }
        break;
      default:
        if (source >= 0) copy(in_[source], out);
    }
  }

  const uint32_t size_;
  const Label label_;  // of the first replica that came
  uint32_t first_ = 0;
  const int64_t kind_;
  Halt halt_;
  std::mutex arriving_;
  std::vector<Span> in_, out_;
  Counter arrived_{}, done_{};  // replicas; parts
  std::atomic<uint32_t> next_{0};
};

// The operations at which not all replicas have arrived, by the run of the program and the
// operation's number. Never destroyed: a thread of XLA may be here when the process ends.
class RendezvousMap {
 public:
  // `program` is the number by which the program may be failed; 0 for none.
  std::shared_ptr<Rendezvous> at(int64_t run, int64_t program, uint32_t size, const Label& label,
                                 int64_t kind, double seconds) {
    const auto key = std::make_tuple(run, label.operation, size);
    std::lock_guard<std::mutex> lock(mutex_);
    Waiting& waiting = waiting_[key];
    if (waiting.rendezvous == nullptr) {
      waiting.program = program;
      waiting.rendezvous = std::make_shared<Rendezvous>(size, label, kind, seconds);
      const auto why = failed_.find(program);
      if (why != failed_.end()) waiting.rendezvous->fail(why->second);
    }
    const auto found = waiting.rendezvous;
    if (++waiting.arrived == size) waiting_.erase(key);
    return found;
  }

  // Ends all waiting in runs of a program, now and until `recover`: a replica of it has failed.
  void fail(int64_t program, const ffi::Error& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    failed_.emplace(program, why);
    for (auto& [key, waiting] : waiting_) {
      if (waiting.program == program) waiting.rendezvous->fail(why);
    }
  }

  // Lets a program that has failed run again. Its replicas have left the run that failed.
  void recover(int64_t program) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed_.erase(program) == 0) return;
    for (auto each = waiting_.begin(); each != waiting_.end();) {
      each = each->second.program == program ? waiting_.erase(each) : std::next(each);
    }
  }

 private:
  struct Waiting {
    int64_t program = 0;
    std::shared_ptr<Rendezvous> rendezvous;
    uint32_t arrived = 0;
  };
  std::mutex mutex_;
  std::map<std::tuple<int64_t, uint64_t, uint32_t>, Waiting> waiting_;
  std::map<int64_t, ffi::Error> failed_;
};

}  // namespace unison
