// Operations between the replicas of one machine, through memory that they share.
//
// Every replica has an area in a segment that all processes map: a few slots, and counters. For
// every operation it copies its operands to its slots, chunk after chunk, and takes what it needs
// from the slots of the others. Chunks are small enough to stay in the caches, so an all-reduce
// costs about a copy and an addition.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "arithmetic.h"
#include "buffers.h"
#include "halt.h"
#include "waiting.h"

namespace unison {

constexpr uint32_t kSlots = 4;

struct alignas(kLine) Slot {
  Label label;  // of the operation that the chunk belongs to; the words are there for its first
};

struct Area {
  // The counters count chunks, of all operations since the beginning.
  Counter published;  // chunks that are in the slots
  Counter summed;     // chunks of which this replica has summed its part
  Counter taken;      // chunks that this replica has taken from all others
  Slot slots[kSlots];
};

struct Memory {
  char* segment = nullptr;
  uint32_t size = 0;  // how many replicas this machine has
  size_t chunk_bytes = 0;
  uint32_t spins = 0;  // how often a replica looks for another before it sleeps
  std::vector<std::string> names;

  static size_t bytes(uint32_t size, size_t chunk_bytes) {
    return size * (sizeof(Area) + kSlots * chunk_bytes) + sizeof(Notice);
  }
  size_t area_bytes() const { return sizeof(Area) + kSlots * chunk_bytes; }
  Area& area(uint32_t rank) const {
    return *reinterpret_cast<Area*>(segment + rank * area_bytes());
  }
  char* slot(uint32_t rank, uint32_t chunk) const {
    return segment + rank * area_bytes() + sizeof(Area) + (chunk % kSlots) * chunk_bytes;
  }
  Notice* notice() const { return reinterpret_cast<Notice*>(segment + size * area_bytes()); }
};

// A replica's part in an operation of its machine. All replicas of the machine perform the same
// ones, with operands of as many bytes.
class MemoryOperation {
 public:
  MemoryOperation(const Memory& memory, Halt& halt, uint32_t rank, const Label& label, int64_t kind)
      : memory_(memory), halt_(halt), rank_(rank), label_(label), kind_(kind),
        first_(memory.area(rank).published.value) {}

  // The operands go to the slots in chunks of `stride` bytes, one after the other. `source` is the
  // rank of the replica whose operand is used, for operations that use one. A replica that needs no
  // result passes an empty `out`, which operations allow that do not combine several chunks.
  ffi::Error run(const Span& in, const Span& out, Combine combine, int64_t source) {
    const size_t block = in.bytes / memory_.size;
    const size_t stride = memory_.chunk_bytes;
    const uint32_t chunks = std::max<size_t>((in.bytes + stride - 1) / stride, 1);
    const bool in_parts = kind_ <= kMin && memory_.size > 2;
    // In flight: a chunk is published, the one before is summed, the one before that is taken.
    const uint32_t lag = in_parts ? 2 : 1;
    for (uint32_t step = 0; step < chunks + lag; ++step) {
      if (step < chunks && !publish(in, step, stride, source)) return failure_;
      if (in_parts && step >= 1 && step <= chunks) {
        const uint32_t chunk = step - 1;
        if (!await(chunk)) return failure_;
        sum_part(chunk, length(in, chunk, stride), combine);
      }
      if (step < lag) continue;
      const uint32_t chunk = step - lag;
      const size_t start = chunk * stride;
      const size_t size = length(in, chunk, stride);
      if (in_parts) {
        if (!take_parts(out, chunk, start, size)) return failure_;
      } else {
        if (!await(chunk)) return failure_;
        take(in, out, chunk, start, size, block, combine, source);
      }
      advance(area().taken, first_ + chunk + 1);
    }
    return ffi::Error::Success();
  }

 private:
  Area& area() const { return memory_.area(rank_); }

  static size_t length(const Span& in, uint32_t chunk, size_t stride) {
    return std::min(stride, in.bytes - chunk * stride);
  }

  bool publish(const Span& in, uint32_t chunk, size_t stride, int64_t source) {
    const uint32_t at = first_ + chunk;
    for (uint32_t other = 0; other < memory_.size; ++other) {
      if (other == rank_) continue;
      if (!await(other, memory_.area(other).taken, at + 1 - kSlots)) return false;
    }
    char* slot = memory_.slot(rank_, at);
    if (kind_ != kBroadcast || source == rank_) {
      in.each(chunk * stride, length(in, chunk, stride), [&](char* data, size_t offset, size_t n) {
        std::memcpy(slot + offset, data, n);
      });
    }
    Label& label = area().slots[at % kSlots].label;
    label.operation = label_.operation;
    label.fingerprint = label_.fingerprint;
    if (chunk == 0) std::memcpy(label.words, label_.words, sizeof label.words);
    advance(area().published, at + 1);
    return true;
  }

  // Waits until the chunk of every other replica is there, and is one of this operation.
  bool await(uint32_t chunk) {
    const uint32_t at = first_ + chunk;
    for (uint32_t other = 0; other < memory_.size; ++other) {
      if (other == rank_) continue;
      Area& area = memory_.area(other);
      if (!await(other, area.published, at + 1)) return false;
      const Label& label = area.slots[at % kSlots].label;
      if (label.meets(label_)) continue;
      Label theirs = label;
      if (chunk != 0) theirs.words[0] = 0;
      failure_ = mismatch(memory_.names[rank_], label_, memory_.names[other], theirs);
      return false;
    }
    return true;
  }

  bool await(uint32_t other, Counter& counter, uint32_t count) {
    if (wait_for(halt_, memory_.spins, counter, count)) return true;
    failure_ = halt_.why();
    if (failure_.success()) failure_ = halt_.timeout(memory_.names[other], label_);
    return false;
  }

  // The range of a chunk that a replica sums, aligned to elements of all sizes.
  void part_of(uint32_t rank, size_t size, size_t* start, size_t* end) const {
    const size_t part = (size / memory_.size + 63) / 64 * 64;
    *start = std::min(rank * part, size);
    *end = rank + 1 == memory_.size ? size : std::min(*start + part, size);
  }

  void sum_part(uint32_t chunk, size_t size, Combine combine) {
    size_t start, end;
    part_of(rank_, size, &start, &end);
    std::vector<const char*> sources(memory_.size);
    for (uint32_t r = 0; r < memory_.size; ++r) {
      sources[r] = memory_.slot(r, first_ + chunk) + start;
    }
    // Into this replica's slot: no other replica reads this part before it is summed.
    combine(kind_, sources.data(), memory_.size, memory_.slot(rank_, first_ + chunk) + start,
            end - start);
    advance(area().summed, first_ + chunk + 1);
  }

  bool take_parts(const Span& out, uint32_t chunk, size_t at, size_t size) {
    for (uint32_t turn = 0; turn < memory_.size; ++turn) {
      const uint32_t r = (rank_ + turn) % memory_.size;
      if (!await(r, memory_.area(r).summed, first_ + chunk + 1)) return false;
      size_t start, end;
      part_of(r, size, &start, &end);
      const char* slot = memory_.slot(r, first_ + chunk) + start;
      out.each(at + start, end - start, [&](char* data, size_t offset, size_t part) {
        std::memcpy(data, slot + offset, part);
      });
    }
    return true;
  }

  void take(const Span& in, const Span& out, uint32_t chunk, size_t start, size_t size,
            size_t block, Combine combine, int64_t source) {
    const uint32_t at = first_ + chunk;
    // The part of the chunk that lies in the own block, for operations that look at blocks.
    const size_t own_start = std::max(start, rank_ * block);
    const size_t own_end = std::min(start + size, (rank_ + 1) * block);
    std::vector<const char*> sources(memory_.size);
    const auto combine_range = [&](size_t from, size_t to, size_t result) {
      out.each(result, to - from, [&](char* data, size_t offset, size_t part) {
        for (uint32_t r = 0; r < memory_.size; ++r) {
          sources[r] = memory_.slot(r, at) + (from - start) + offset;
        }
        combine(kind_, sources.data(), memory_.size, data, part);
      });
    };
    const auto copy_range = [&](uint32_t from, size_t begin, size_t end, size_t result) {
      const char* slot = memory_.slot(from, at) + (begin - start);
      out.each(result, end - begin, [&](char* data, size_t offset, size_t part) {
        std::memcpy(data, slot + offset, part);
      });
    };
    switch (kind_) {
      case kGather:
        for (uint32_t r = 0; r < memory_.size; ++r) {
          copy_range(r, start, start + size, r * in.bytes + start);
        }
        break;
      case kSumAndScatter:
        if (own_start < own_end) combine_range(own_start, own_end, own_start - rank_ * block);
        break;
      case kPermute:
      case kBroadcast:
        if (source >= 0) copy_range(source, start, start + size, start);
        break;
      case kAllToAll:
        for (uint32_t r = 0; r < memory_.size && own_start < own_end; ++r) {
          copy_range(r, own_start, own_end, r * block + own_start - rank_ * block);
        }
        break;
      default:
        combine_range(start, start + size, start);
    }
  }

  const Memory& memory_;
  Halt& halt_;
  const uint32_t rank_;
  const Label& label_;
  const int64_t kind_;
  const uint32_t first_;
  ffi::Error failure_;
};

}  // namespace unison
