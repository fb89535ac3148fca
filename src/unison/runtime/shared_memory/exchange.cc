// Collective operations between the replicas of one machine, through memory that they share.
//
// Every replica has an area in a segment that all processes map: a few slots, and counters. For
// every operation it copies its operands to its slots, chunk after chunk, and takes what it needs
// from the slots of the others. Chunks are small enough to stay in the caches, so an all-reduce
// costs about a copy and an addition. Nobody waits for another replica longer than the time limit,
// or after `unison_exchange_abort`.
//
// The operations of a replica are numbered, and all replicas must perform the same ones in the same
// order: whoever calls sees to that by a ticket, which each operation takes and hands on (see
// `rewriting.py`). Replicas that meet in different operations find out.

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr uint32_t kSlots = 4;
constexpr size_t kLine = 128;
constexpr size_t kWordsBytes = 256;

// What replicas tell each other. The counters count chunks, of all operations since the beginning.
struct alignas(kLine) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};

struct alignas(kLine) Slot {
  uint64_t operation;      // the number of the operation that the chunk belongs to
  uint64_t fingerprint;    // of what the operation does
  char words[kWordsBytes];  // the same for people
};

struct Area {
  Counter published;  // chunks that are in the slots
  Counter summed;     // chunks of which this replica has summed its part
  Counter taken;      // chunks that this replica has taken from all others
  Slot slots[kSlots];
};

enum Kind : int64_t {
  kSum = 0,
  kMax = 1,
  kMin = 2,
  kGather = 3,         // replica r's operand becomes block r of the result
  kSumAndScatter = 4,  // block r of the sum goes to replica r
  kPermute = 5,        // the operand of the replica that is named becomes the result
  kAllToAll = 6,       // block s of replica r's operand becomes block r of replica s's result
  kPass = 7,           // nothing: only the ticket is taken and handed on
};

struct Group {
  char* segment = nullptr;
  uint32_t size = 0;
  size_t chunk_bytes = 0;
  uint32_t spins = 0;
  double seconds = 0;  // how long a replica waits for another
  std::vector<std::string> names;
  std::atomic<bool> aborted{false};
  std::mutex mutex;
  std::string reason;

  size_t area_bytes() const { return sizeof(Area) + kSlots * chunk_bytes; }
  Area& area(uint32_t rank) const {
    return *reinterpret_cast<Area*>(segment + rank * area_bytes());
  }
  char* slot(uint32_t rank, uint32_t chunk) const {
    return segment + rank * area_bytes() + sizeof(Area) + (chunk % kSlots) * chunk_bytes;
  }
};

std::mutex groups_mutex;
std::vector<std::unique_ptr<Group>> groups;

Group* find(int64_t number) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  return number < static_cast<int64_t>(groups.size()) ? groups[number].get() : nullptr;
}

// ---- waiting ---------------------------------------------------------------------------------

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Tells the core that this is a loop that waits.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool reached(const Counter& counter, uint32_t count) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - count) >= 0;
}

void advance(Counter& counter, uint32_t count) {
  counter.value.store(count, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
}

// Returns whether `counter` reached `count` before the limit and before the group was aborted.
bool wait_for(Group& group, Counter& counter, uint32_t count) {
  for (uint32_t spin = 0; spin < group.spins; ++spin) {
    if (reached(counter, count)) return true;
    relax();
  }
  const double deadline = now() + group.seconds;
  while (!reached(counter, count)) {
    if (group.aborted.load(std::memory_order_acquire) || now() > deadline) return false;
    counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = counter.value.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - count) < 0) {
      const timespec limit{0, 20'000'000};  // then look whether the group was aborted
      syscall(SYS_futex, &counter.value, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    counter.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
  return true;
}

// ---- arithmetic ------------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
    bits = is_nan ? (wide >> 16 | 0x40) : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
};

template <typename T>
struct Wide {  // what a sum of several values is kept in
  using type = T;
};
template <>
struct Wide<BFloat16> {
  using type = float;
};
#ifdef __FLT16_MAX__  // what older compilers do not have
template <>
struct Wide<_Float16> {
  using type = float;
};
#endif

// result = sources[0] op sources[1] op ..., in this order on every replica, so that all get the
// same bits. A source may be the result.
template <typename T, typename Op>
void combine(const char* const* sources, uint32_t count, char* result, size_t bytes, Op op) {
  using W = typename Wide<T>::type;
  T* out = reinterpret_cast<T*>(result);
  const size_t size = bytes / sizeof(T);
  if (count == 2) {
    const T* left = reinterpret_cast<const T*>(sources[0]);
    const T* right = reinterpret_cast<const T*>(sources[1]);
#pragma GCC ivdep
    for (size_t i = 0; i < size; ++i) {
      out[i] = static_cast<T>(op(static_cast<W>(left[i]), static_cast<W>(right[i])));
    }
    return;
  }
  constexpr size_t kBlock = 512;
  W block[kBlock];
  for (size_t start = 0; start < size; start += kBlock) {
    const size_t length = std::min(kBlock, size - start);
    const T* first = reinterpret_cast<const T*>(sources[0]) + start;
    for (size_t i = 0; i < length; ++i) block[i] = static_cast<W>(first[i]);
    for (uint32_t source = 1; source < count; ++source) {
      const T* next = reinterpret_cast<const T*>(sources[source]) + start;
      for (size_t i = 0; i < length; ++i) block[i] = op(block[i], static_cast<W>(next[i]));
    }
    for (size_t i = 0; i < length; ++i) out[start + i] = static_cast<T>(block[i]);
  }
}

template <typename T>
void combine(int64_t kind, const char* const* sources, uint32_t count, char* result, size_t bytes) {
  using W = typename Wide<T>::type;
  switch (kind) {
    case kMax:  // NaN wins, as in XLA
      return combine<T>(sources, count, result, bytes,
                        [](W a, W b) { return a >= b || a != a ? a : b; });
    case kMin:
      return combine<T>(sources, count, result, bytes,
                        [](W a, W b) { return a <= b || a != a ? a : b; });
    default:
      return combine<T>(sources, count, result, bytes,
                        [](W a, W b) { return static_cast<W>(a + b); });
  }
}

using Combine = void (*)(int64_t, const char* const*, uint32_t, char*, size_t);

Combine combine_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return combine<float>;
    case ffi::F64: return combine<double>;
    case ffi::BF16: return combine<BFloat16>;
#ifdef __FLT16_MAX__
    case ffi::F16: return combine<_Float16>;
#endif
    case ffi::S8: return combine<int8_t>;
    case ffi::S16: return combine<int16_t>;
    case ffi::S32: return combine<int32_t>;
    case ffi::S64: return combine<int64_t>;
    case ffi::U8: return combine<uint8_t>;
    case ffi::U16: return combine<uint16_t>;
    case ffi::U32: return combine<uint32_t>;
    case ffi::U64: return combine<uint64_t>;
    default: return nullptr;
  }
}

// ---- operations ------------------------------------------------------------------------------

// Several buffers, seen as one.
struct Span {
  struct Piece {
    char* data;
    size_t bytes;
  };
  std::vector<Piece> pieces;
  size_t bytes = 0;

  void add(void* data, size_t size) {
    pieces.push_back({static_cast<char*>(data), size});
    bytes += size;
  }

  // Calls `visit(data, offset, size)` for the parts of the buffers that make up the range.
  template <typename Visit>
  void each(size_t start, size_t size, Visit visit) const {
    size_t done = 0;
    for (const Piece& piece : pieces) {
      if (size == done) return;
      if (start >= piece.bytes) {
        start -= piece.bytes;
        continue;
      }
      const size_t part = std::min(piece.bytes - start, size - done);
      visit(piece.data + start, done, part);
      done += part;
      start = 0;
    }
  }
};

uint64_t fnv(std::string_view text) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

class Operation {
 public:
  Operation(Group& group, uint32_t rank, uint64_t number, int64_t kind, std::string_view words)
      : group_(group), rank_(rank), number_(number), kind_(kind), words_(words),
        fingerprint_(fnv(words) + kind), first_(group.area(rank).published.value) {}

  // The operands go to the slots in chunks of `stride` bytes, one after the other.
  ffi::Error run(const Span& in, const Span& out, Combine combine, int64_t source) {
    const size_t block = in.bytes / group_.size;
    const size_t stride = group_.chunk_bytes;
    const uint32_t chunks = std::max<size_t>((in.bytes + stride - 1) / stride, 1);
    const bool in_parts = kind_ <= kMin && group_.size > 2;
    // In flight: a chunk is published, the one before is summed, the one before that is taken.
    const uint32_t lag = in_parts ? 2 : 1;
    for (uint32_t step = 0; step < chunks + lag; ++step) {
      if (step < chunks && !publish(in, step, stride)) return failure_;
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
  Area& area() const { return group_.area(rank_); }

  static size_t length(const Span& in, uint32_t chunk, size_t stride) {
    return std::min(stride, in.bytes - chunk * stride);
  }

  bool publish(const Span& in, uint32_t chunk, size_t stride) {
    const uint32_t at = first_ + chunk;
    for (uint32_t other = 0; other < group_.size; ++other) {
      if (other != rank_ && !await(other, group_.area(other).taken, at + 1 - kSlots)) return false;
    }
    char* slot = group_.slot(rank_, at);
    in.each(chunk * stride, length(in, chunk, stride),
            [&](char* data, size_t offset, size_t size) { std::memcpy(slot + offset, data, size); });
    Slot& label = area().slots[at % kSlots];
    label.operation = number_;
    label.fingerprint = fingerprint_;
    if (chunk == 0) {
      const size_t size = std::min(words_.size(), kWordsBytes - 1);
      std::memcpy(label.words, words_.data(), size);
      label.words[size] = 0;
    }
    advance(area().published, at + 1);
    return true;
  }

  // Waits until the chunk of every other replica is there, and is one of this operation.
  bool await(uint32_t chunk) {
    const uint32_t at = first_ + chunk;
    for (uint32_t other = 0; other < group_.size; ++other) {
      if (other == rank_) continue;
      Area& area = group_.area(other);
      if (!await(other, area.published, at + 1)) return false;
      const Slot& label = area.slots[at % kSlots];
      if (label.operation == number_ && label.fingerprint == fingerprint_) continue;
      failure_ = ffi::Error(
          ffi::ErrorCode::kFailedPrecondition,
          group_.names[rank_] + " is at operation " + std::to_string(number_) + ", " +
              std::string(words_) + "; " + group_.names[other] + " is at operation " +
              std::to_string(label.operation) + (chunk == 0 ? std::string(", ") + label.words : "") +
              ". All workers must run the same program on values of the same shapes.");
      return false;
    }
    return true;
  }

  bool await(uint32_t other, Counter& counter, uint32_t count) {
    if (wait_for(group_, counter, count)) return true;
    std::lock_guard<std::mutex> lock(group_.mutex);
    if (group_.aborted) {
      failure_ = ffi::Error(ffi::ErrorCode::kUnavailable, group_.reason);
    } else {
      failure_ = ffi::Error(
          ffi::ErrorCode::kDeadlineExceeded,
          group_.names[other] + " did not come to operation " + std::to_string(number_) + ", " +
              std::string(words_) + ", within " + std::to_string(std::lround(group_.seconds)) +
              " s. It has ended, is stuck, or runs another program.");
    }
    return false;
  }

  // The range of a chunk that a replica sums, aligned to elements of all sizes.
  void part_of(uint32_t rank, size_t size, size_t* start, size_t* end) const {
    const size_t part = (size / group_.size + 63) / 64 * 64;
    *start = std::min(rank * part, size);
    *end = rank + 1 == group_.size ? size : std::min(*start + part, size);
  }

  void sum_part(uint32_t chunk, size_t size, Combine combine) {
    size_t start, end;
    part_of(rank_, size, &start, &end);
    std::vector<const char*> sources(group_.size);
    for (uint32_t r = 0; r < group_.size; ++r) sources[r] = group_.slot(r, first_ + chunk) + start;
    // Into the own slot: this part of it, nobody else reads before it is summed.
    combine(kind_, sources.data(), group_.size, group_.slot(rank_, first_ + chunk) + start,
            end - start);
    advance(area().summed, first_ + chunk + 1);
  }

  bool take_parts(const Span& out, uint32_t chunk, size_t at, size_t size) {
    for (uint32_t turn = 0; turn < group_.size; ++turn) {
      const uint32_t r = (rank_ + turn) % group_.size;
      if (!await(r, group_.area(r).summed, first_ + chunk + 1)) return false;
      size_t start, end;
      part_of(r, size, &start, &end);
      const char* slot = group_.slot(r, first_ + chunk) + start;
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
    std::vector<const char*> sources(group_.size);
    const auto combine_range = [&](size_t from, size_t to, size_t result) {
      out.each(result, to - from, [&](char* data, size_t offset, size_t part) {
        for (uint32_t r = 0; r < group_.size; ++r) {
          sources[r] = group_.slot(r, at) + (from - start) + offset;
        }
        combine(kind_, sources.data(), group_.size, data, part);
      });
    };
    const auto copy_range = [&](uint32_t from, size_t begin, size_t end, size_t result) {
      const char* slot = group_.slot(from, at) + (begin - start);
      out.each(result, end - begin, [&](char* data, size_t offset, size_t part) {
        std::memcpy(data, slot + offset, part);
      });
    };
    switch (kind_) {
      case kGather:
        for (uint32_t r = 0; r < group_.size; ++r) {
          copy_range(r, start, start + size, r * in.bytes + start);
        }
        break;
      case kSumAndScatter:
        if (own_start < own_end) combine_range(own_start, own_end, own_start - rank_ * block);
        break;
      case kPermute:
        if (source >= 0) copy_range(source, start, start + size, start);
        break;
      case kAllToAll:
        for (uint32_t r = 0; r < group_.size && own_start < own_end; ++r) {
          copy_range(r, own_start, own_end, r * block + own_start - rank_ * block);
        }
        break;
      default:
        combine_range(start, start + size, start);
    }
  }

  Group& group_;
  const uint32_t rank_;
  const uint64_t number_;
  const int64_t kind_;
  const std::string_view words_;
  const uint64_t fingerprint_;
  const uint32_t first_;
  ffi::Error failure_;
};

// The ticket is (the replica's rank, the number of operations so far).
ffi::Error exchange(int64_t number, int64_t kind, std::string_view words,
                    ffi::Span<const int64_t> senders, ffi::Buffer<ffi::U32> ticket,
                    ffi::RemainingArgs operands, ffi::Result<ffi::Buffer<ffi::U32>> next,
                    ffi::RemainingRets results) {
  Group* group = find(number);
  if (group == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "This program was compiled for workers that share memory, and this process "
                      "shares none with them.");
  }
  const uint32_t rank = ticket.typed_data()[0];
  const uint32_t operation = ticket.typed_data()[1];
  next->typed_data()[0] = rank;
  next->typed_data()[1] = operation + 1;
  Span in, out;
  Combine combine = nullptr;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<ffi::AnyBuffer>(i);
    auto result = results.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) return operand.error();
    if (result.has_error()) return result.error();
    combine = combine_of(operand->element_type());
    if (combine == nullptr && (kind <= kMin || kind == kSumAndScatter)) {
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, "Numbers of this type have no sum.");
    }
    in.add(operand->untyped_data(), operand->size_bytes());
    out.add((*result)->untyped_data(), (*result)->size_bytes());
  }
  if (kind == kPass) {
    for (size_t i = 0; i < in.pieces.size(); ++i) {
      if (out.pieces[i].data == in.pieces[i].data) continue;
      std::memcpy(out.pieces[i].data, in.pieces[i].data, in.pieces[i].bytes);
    }
    return ffi::Error::Success();
  }
  const int64_t source = kind == kPermute ? senders[rank] : -1;
  if (kind == kPermute && source < 0) {
    // Nobody sends: zeros, but only after the operand, which may be the same memory, was read.
    ffi::Error error = Operation(*group, rank, operation, kind, words).run(in, out, combine, source);
    for (const auto& piece : out.pieces) std::memset(piece.data, 0, piece.bytes);
    return error;
  }
  return Operation(*group, rank, operation, kind, words).run(in, out, combine, source);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(unison_exchange, exchange,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("kind")
                                  .Attr<std::string_view>("words")
                                  .Attr<ffi::Span<const int64_t>>("senders")
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::U32>>()
                                  .RemainingRets());

extern "C" {

// Returns what tells the source that this was built from.
const char* unison_exchange_source() { return UNISON_EXCHANGE_SOURCE; }

// Returns how many bytes the segment of a group takes.
size_t unison_exchange_bytes(uint32_t size, size_t chunk_bytes) {
  return size * (sizeof(Area) + kSlots * chunk_bytes);
}

// Adds a group whose segment, filled with zeros at first, is mapped at `segment`, and returns its
// number. `names` are the replicas' names, each on a line.
int64_t unison_exchange_join(void* segment, uint32_t size, size_t chunk_bytes, uint32_t spins,
                             double seconds, const char* names) {
  auto group = std::make_unique<Group>();
  group->segment = static_cast<char*>(segment);
  group->size = size;
  group->chunk_bytes = chunk_bytes;
  group->spins = spins;
  group->seconds = seconds;
  std::string_view rest(names);
  for (uint32_t rank = 0; rank < size; ++rank) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    group->names.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  std::lock_guard<std::mutex> lock(groups_mutex);
  groups.push_back(std::move(group));
  return groups.size() - 1;
}

// Ends all waiting of this process in the group, now and later, with an error that says `reason`.
void unison_exchange_abort(int64_t number, const char* reason) {
  Group* group = find(number);
  std::lock_guard<std::mutex> lock(group->mutex);
  if (group->aborted) return;
  group->reason = reason;
  group->aborted.store(true, std::memory_order_release);
}

}  // extern "C"
