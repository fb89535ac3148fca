// Collective operations between the replicas of a job: between buffers in one process
// (`rendezvous.h`), through memory on one machine (`memory.h`), and between machines through sockets
// (`links.h`).
//
// The operations of a replica are numbered, and all replicas must perform the same ones in the same
// order. The caller ensures this with a ticket that each operation consumes and returns (see
// `rewriting.py`). A mismatch between replicas is detected. No replica waits for another one longer
// than the time limit, or after `unison_exchange_abort`.

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "arithmetic.h"
#include "buffers.h"
#include "decision.h"
#include "halt.h"
#include "links.h"
#include "memory.h"
#include "old_glibc.h"
#include "rendezvous.h"
#include "xla/ffi/api/ffi.h"

namespace unison {
namespace {

// What an operation consumes and returns; `library.py` has the same.
enum Ticket : uint32_t {
  kRank = 0,       // the replica's rank in the group
  kOperation = 1,  // the number of its operations so far
  kGroup = 2,      // the number of the group in this process
  kFailed = 3,     // whether an operation has failed, in a group that tolerates failures
  kCommitted = 4,  // the number of programs that have taken effect: see `kCommit`
  kTicketSize = 5,
};

// Sums of several machines are made in blocks of this size: replicas that wait for their leader
// wait for a block, and not for all.
constexpr size_t kBlockBytes = 1 << 23;

class Group {
 public:
  // `hosts` are the machines of all replicas; `own_size` replicas belong to this process. `memory`
  // is that of this machine; the destructor unmaps `mapped` bytes of it. `links` is set if this
  // process has the machine's leader.
  Group(Memory memory, size_t mapped, std::vector<uint32_t> hosts, uint32_t own_host,
        uint32_t own_size, std::unique_ptr<Links> links, double seconds, bool tolerates_failures)
      : halt(seconds, mapped ? memory.notice() : nullptr), decision(own_size, seconds),
        tolerates_failures(tolerates_failures), memory_(std::move(memory)), mapped_(mapped), hosts_(std::move(hosts)), own_host_(own_host),
        links_(std::move(links)) {
    for (uint32_t rank = 0; rank < hosts_.size(); ++rank) {
      if (hosts_[rank] >= ranks_.size()) ranks_.resize(hosts_[rank] + 1);
      locals_.push_back(ranks_[hosts_[rank]].size());
      ranks_[hosts_[rank]].push_back(rank);
    }
  }

  ~Group() {
    if (mapped_ != 0) munmap(memory_.segment, mapped_);
  }
  Group(const Group&) = delete;

  Halt halt;
  Decision decision;
  // Whether a failed operation is recorded in the ticket and returns zeros, instead of an error.
  const bool tolerates_failures;

  // Ends all waiting in the group.
  void abort(const ffi::Error& why) {
    halt.raise(why);
    if (links_ != nullptr) links_->shut();
  }

  // `senders` are, for `kPermute`, the rank from which each rank receives, -1 for nobody; for
  // `kBroadcast` the one that all receive from.
  ffi::Error perform(int64_t kind, std::string_view words, const int64_t* senders,
                     const uint32_t* ticket, const Span& in, const Span& out, Combine combine) {
    const uint32_t rank = ticket[kRank];
    const Label label(ticket[kOperation], kind, words);
    const int64_t source = kind == kPermute ? senders[rank] : kind == kBroadcast ? *senders : -1;
    if (halt.is_raised()) return halt.why();
    ffi::Error error;
    if (hosts_.size() == 1) {
      copy(in, out);
    } else if (ranks_.size() == 1) {
      error = MemoryOperation(memory_, halt, rank, label, kind).run(in, out, combine, source);
    } else {
      try {
        error = Across{*this, rank, label, combine}.run(kind, in, out, source);
      } catch (const std::bad_alloc&) {
        error = ffi::Error(ffi::ErrorCode::kResourceExhausted,
                           "There is no memory for the values of all replicas.");
      }
    }
    // Nobody sends: zeros, but only after the operand, which may be the same memory, was read.
    if (kind == kPermute && source < 0) out.clear();
    return error;
  }

 private:
  // A replica's part in an operation of several machines: within the machine, between the machines'
  // leaders, and within the machine again.
  struct Across {
    Group& group;
    const uint32_t rank;
    const Label& label;
    const Combine combine;
    const uint32_t local = group.locals_[rank];
    const bool is_leader = local == 0;

    ffi::Error run(int64_t kind, const Span& in, const Span& out, int64_t source) const {
      const size_t count = group.hosts_.size();
      const size_t block = in.bytes / count;
      if (kind <= kMin) return all_reduce(kind, in, out);
      if (kind == kGather) return all_gather(in, out);
      if (kind == kBroadcast) return broadcast(in, out, source);
      const size_t bytes = kind == kSumAndScatter ? in.bytes : in.bytes * count;
      const std::unique_ptr<char[]> buffer(new char[bytes]);
      const Span all(buffer.get(), bytes);
      const ffi::Error error = kind == kSumAndScatter ? all_reduce(kSum, in, all)
                                                      : all_gather(in, all);
      if (error.failure()) return error;
      if (kind == kSumAndScatter) copy(all.part(rank * block, block), out);
      if (kind == kPermute && source >= 0) copy(all.part(source * in.bytes, in.bytes), out);
      for (size_t other = 0; other < count && kind == kAllToAll; ++other) {
        copy(all.part(other * in.bytes + rank * block, block), out.part(other * block, block));
      }
      return error;
    }

    ffi::Error all_reduce(int64_t kind, const Span& in, const Span& out) const {
      return in_blocks(in.bytes, [&](size_t start, size_t size) {
        const Span own = in.part(start, size), total = out.part(start, size);
        ffi::Error error = within(kind, own, is_leader ? total : Span(), 0);
        if (error.success() && is_leader) {
          error = group.links_->all_reduce(label, group.halt, total, kind, combine);
        }
        return error.success() ? from(0, total) : error;
      });
    }

    ffi::Error all_gather(const Span& in, const Span& all) const {
      Span by_host;
      std::vector<size_t> bounds;
      for (const std::vector<uint32_t>& ranks : group.ranks_) {
        bounds.push_back(by_host.bytes);
        for (const uint32_t r : ranks) by_host.add(all.part(r * in.bytes, in.bytes));
      }
      bounds.push_back(by_host.bytes);
      const size_t start = bounds[group.own_host_];
      const Span own = by_host.part(start, bounds[group.own_host_ + 1] - start);
      ffi::Error error = within(kGather, in, is_leader ? own : Span(), 0);
      if (error.success() && is_leader) {
        error = group.links_->all_gather(label, group.halt, by_host, bounds);
      }
      return error.success() ? from(0, by_host) : error;
    }

    ffi::Error broadcast(const Span& in, const Span& out, int64_t source) const {
      if (rank == source) copy(in, out);
      const uint32_t host = group.hosts_[source];
      const bool is_here = host == group.own_host_;
      return in_blocks(out.bytes, [&](size_t start, size_t size) {
        const Span block = out.part(start, size);
        ffi::Error error;
        if (is_here) error = from(group.locals_[source], block);
        if (error.success() && is_leader) {
          error = group.links_->broadcast(label, group.halt, block, host);
        }
        return error.failure() || is_here ? error : from(0, block);
      });
    }

    // Gives `span` of a replica of this machine to the others.
    ffi::Error from(uint32_t source, const Span& span) const {
      return within(kBroadcast, span, local == source ? Span() : span, source);
    }

    ffi::Error within(int64_t kind, const Span& in, const Span& out, int64_t source) const {
      if (group.memory_.size == 1) {
        copy(in, out);
        return ffi::Error::Success();
      }
      return MemoryOperation(group.memory_, group.halt, local, label, kind)
          .run(in, out, combine, source);
    }

    template <typename Visit>
    ffi::Error in_blocks(size_t bytes, Visit visit) const {
      // The same on all machines.
      const bool has_followers = group.hosts_.size() > group.ranks_.size();
      const size_t most = has_followers ? kBlockBytes : std::max<size_t>(bytes, 1);
      size_t start = 0;
      ffi::Error error;
      do {
        error = visit(start, std::min(most, bytes - start));
        start += most;
      } while (error.success() && start < bytes);
      return error;
    }
  };

  const Memory memory_;
  const size_t mapped_;
  const std::vector<uint32_t> hosts_;        // of every rank
  const uint32_t own_host_;
  const std::unique_ptr<Links> links_;
  std::vector<std::vector<uint32_t>> ranks_;  // of every host
  std::vector<uint32_t> locals_;              // every rank's place among those of its host
};

// Groups are never moved, and those that are closed leave their place empty. Never destroyed: a
// thread of XLA may be in an exchange when the process ends.
std::mutex& groups_mutex = *new std::mutex;
std::vector<std::shared_ptr<Group>>& groups = *new std::vector<std::shared_ptr<Group>>;

std::shared_ptr<Group> find(int64_t number) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  return number < static_cast<int64_t>(groups.size()) ? groups[number] : nullptr;
}

bool is_closed(int64_t number) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  return number < static_cast<int64_t>(groups.size()) && groups[number] == nullptr;
}

int64_t add(std::shared_ptr<Group> group) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  groups.push_back(std::move(group));
  return groups.size() - 1;
}

// Counts in `ticket` whether the program takes effect.
ffi::Error commit(uint32_t* ticket) {
  const std::shared_ptr<Group> group = find(ticket[kGroup]);
  const bool is_well = group != nullptr && group->decision.all_are_well(!ticket[kFailed]);
  ++ticket[kOperation];
  if (is_well) {
    ++ticket[kCommitted];
  } else {
    ticket[kFailed] = 1;
  }
  return ffi::Error::Success();
}

// Performs an operation of the group that `ticket` names, and makes it the next one's.
ffi::Error perform(int64_t kind, std::string_view words, const int64_t* senders, uint32_t* ticket,
                   const Span& in, const Span& out, Combine combine) {
  if (combine == nullptr && (kind <= kMin || kind == kSumAndScatter)) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "This dtype cannot be reduced.");
  }
  if (kind == kCommit) return commit(ticket);
  const std::shared_ptr<Group> group = ticket[kFailed] ? nullptr : find(ticket[kGroup]);
  ffi::Error error;
  if (group != nullptr) {
    error = group->perform(kind, words, senders, ticket, in, out, combine);
  } else if (!ticket[kFailed] && !is_closed(ticket[kGroup])) {
    error = ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                       "This program was compiled for workers that share memory, and this process "
                       "shares none with them.");
  }
  ++ticket[kOperation];
  if (group != nullptr && error.success()) return error;
  if (error.failure() && (group == nullptr || !group->tolerates_failures)) return error;
  if (group != nullptr) group->abort(error);
  ticket[kFailed] = 1;
  out.clear();
  return ffi::Error::Success();
}

// Carries out an operation of a program by `perform(ticket, in, out, combine)`, for which the ticket
// is that of the next operation.
template <typename Perform>
ffi::Error on_buffers(int64_t kind, const ffi::Buffer<ffi::U32>& ticket,
                      const ffi::RemainingArgs& operands, ffi::Result<ffi::Buffer<ffi::U32>>& next,
                      const ffi::RemainingRets& results, Perform perform) {
  std::memmove(next->typed_data(), ticket.typed_data(), kTicketSize * sizeof(uint32_t));
  Span in, out;
  Combine combine = nullptr;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<ffi::AnyBuffer>(i);
    auto result = results.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) return operand.error();
    if (result.has_error()) return result.error();
    combine = combine_of(operand->element_type());
    in.add(operand->untyped_data(), operand->size_bytes());
    out.add((*result)->untyped_data(), (*result)->size_bytes());
  }
  if (kind != kPass) return perform(next->typed_data(), in, out, combine);
  copy(in, out);
  ++next->typed_data()[kOperation];
  return ffi::Error::Success();
}

ffi::Error exchange(int64_t kind, std::string_view words, ffi::Span<const int64_t> senders,
                    ffi::Buffer<ffi::U32> ticket, ffi::RemainingArgs operands,
                    ffi::Result<ffi::Buffer<ffi::U32>> next, ffi::RemainingRets results) {
  return on_buffers(
      kind, ticket, operands, next, results,
      [&](uint32_t* ticket, const Span& in, const Span& out, Combine combine) {
        return perform(kind, words, senders.begin(), ticket, in, out, combine);
      });
}

RendezvousMap& meetings = *new RendezvousMap;

ffi::Error exchange_in_process(ffi::RunId run, int64_t program, int64_t size, int64_t spins,
                               double seconds, int64_t kind, std::string_view words,
                               ffi::Span<const int64_t> senders, ffi::Buffer<ffi::U32> ticket,
                               ffi::RemainingArgs operands,
                               ffi::Result<ffi::Buffer<ffi::U32>> next,
                               ffi::RemainingRets results) {
  return on_buffers(
      kind, ticket, operands, next, results,
      [&](uint32_t* ticket, const Span& in, const Span& out, Combine combine) {
        const uint32_t rank = ticket[kRank];
        const Label label(ticket[kOperation]++, kind, words);
        const int64_t source = kind == kPermute ? senders[rank] : -1;
        const ffi::Error error = meetings.at(run.run_id, program, size, label, kind, seconds)
                                     ->run(rank, label, in, out, combine, source, spins);
        if (kind == kPermute && source < 0) out.clear();
        return error;
      });
}

std::vector<std::string> lines(std::string_view text) {
  std::vector<std::string> found;
  while (true) {
    const size_t end = text.find('\n');
    found.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return found;
    text.remove_prefix(end + 1);
  }
}

}  // namespace
}  // namespace unison

XLA_FFI_DEFINE_HANDLER_SYMBOL(unison_exchange, unison::exchange,
                              xla::ffi::Ffi::Bind()
                                  .Attr<int64_t>("kind")
                                  .Attr<std::string_view>("words")
                                  .Attr<xla::ffi::Span<const int64_t>>("senders")
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(unison_exchange_in_process, unison::exchange_in_process,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::RunId>()
                                  .Attr<int64_t>("program")
                                  .Attr<int64_t>("size")
                                  .Attr<int64_t>("spins")
                                  .Attr<double>("seconds")
                                  .Attr<int64_t>("kind")
                                  .Attr<std::string_view>("words")
                                  .Attr<xla::ffi::Span<const int64_t>>("senders")
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .RemainingRets());

extern "C" {

// Returns the digest of the sources that this was built from.
const char* unison_exchange_source() { return UNISON_SOURCE; }

// Returns the version of XLA's FFI that this was built for. A jaxlib that has an older one refuses the
// operation, and with it the whole CPU backend.
void unison_exchange_api(int* major, int* minor) {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}

// Returns how many bytes the segment of a group takes.
size_t unison_exchange_bytes(uint32_t size, size_t chunk_bytes) {
  return unison::Memory::bytes(size, chunk_bytes);
}

// Adds a group whose segment, filled with zeros at first, is mapped at `segment`, and returns its
// number. `names` are the replicas' names, each on a line.
int64_t unison_exchange_join(void* segment, uint32_t size, size_t chunk_bytes, uint32_t spins,
                             double seconds, const char* names) {
  unison::Memory memory{static_cast<char*>(segment), size, chunk_bytes, spins,
                        unison::lines(names)};
  std::vector<uint32_t> hosts(size, 0);
  return unison::add(std::make_shared<unison::Group>(std::move(memory), 0, std::move(hosts), 0, 1,
                                                     nullptr, seconds, false));
}

// Adds a group that tolerates failures, of replicas on one machine or several, and returns its
// number; -1 where the segment cannot be mapped (errno says why).
//
// `hosts` are the machines of all `size` replicas, numbered from zero; this process is on
// `own_host` and has `own_size` of them. `segment` is the file that the replicas of this machine share, filled with zeros at
// first, or -1 where there is only one. `sockets` are those that connect its leader with the
// leaders of the `num_hosts` machines (-1 for the own one), which the group takes over; null for
// the other processes. `names` are the replicas' names, each on a line.
int64_t unison_exchange_form(int segment, const uint32_t* hosts, uint32_t size, uint32_t own_host,
                             uint32_t own_size, const int* sockets, uint32_t num_hosts, size_t chunk_bytes,
                             uint32_t spins, double seconds, const char* names) {
  const std::vector<std::string> all_names = unison::lines(names);
  unison::Memory memory{nullptr, 0, chunk_bytes, spins, {}};
  std::vector<std::string> leaders(num_hosts);
  for (uint32_t rank = 0; rank < size; ++rank) {
    if (leaders[hosts[rank]].empty()) leaders[hosts[rank]] = all_names[rank];
    if (hosts[rank] == own_host) memory.names.push_back(all_names[rank]);
  }
  memory.size = memory.names.size();
  size_t mapped = 0;
  if (segment >= 0) {
    mapped = unison::Memory::bytes(memory.size, chunk_bytes);
    void* address = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, segment, 0);
    if (address == MAP_FAILED) return -1;
    memory.segment = static_cast<char*>(address);
  }
  std::unique_ptr<unison::Links> links;
  if (sockets != nullptr) {
    links = std::make_unique<unison::Links>(
        own_host, std::vector<int>(sockets, sockets + num_hosts), std::move(leaders));
  }
  return unison::add(std::make_shared<unison::Group>(
      std::move(memory), mapped, std::vector<uint32_t>(hosts, hosts + size), own_host, own_size,
      std::move(links), seconds, true));
}

// Performs an operation outside of programs, on `count` operands and results. `dtype` is XLA's
// number of what they hold. Returns the code of the error; 0 if the outcome is in the ticket.
int unison_exchange_run(int64_t kind, const char* words, const int64_t* senders, uint32_t* ticket,
                        int dtype, size_t count, void* const* operands, const size_t* operand_bytes,
                        void* const* results, const size_t* result_bytes) {
  unison::Span in, out;
  for (size_t i = 0; i < count; ++i) {
    in.add(operands[i], operand_bytes[i]);
    out.add(results[i], result_bytes[i]);
  }
  const auto combine = unison::combine_of(static_cast<xla::ffi::DataType>(dtype));
  const auto error = unison::perform(kind, words, senders, ticket, in, out, combine);
  return static_cast<int>(*error.errc());
}

// Ends all waiting in the group, now and later; `reason` says why.
void unison_exchange_abort(int64_t number, const char* reason) {
  const auto group = unison::find(number);
  if (group != nullptr) group->abort(xla::ffi::Error(xla::ffi::ErrorCode::kUnavailable, reason));
}

// Ends all waiting of the replicas of this process in a program, now and until it recovers; `reason`
// says why.
void unison_exchange_fail(int64_t program, const char* reason) {
  unison::meetings.fail(program, xla::ffi::Error(xla::ffi::ErrorCode::kAborted, reason));
}

// Lets a program that has failed run again.
void unison_exchange_recover(int64_t program) { unison::meetings.recover(program); }

// Ends the group in this process: operations that still come to it fail, and when the last one has
// left, its memory is unmapped and its sockets are closed. Others may still end their last one.
void unison_exchange_close(int64_t number) {
  const auto group = unison::find(number);
  if (group == nullptr) return;
  group->halt.raise(xla::ffi::Error(xla::ffi::ErrorCode::kUnavailable, "The group is closed."),
                    false);
  group->decision.close();
  std::lock_guard<std::mutex> lock(unison::groups_mutex);
  unison::groups[number] = nullptr;
}

// Writes why the group is at an end to `reason`, which has room for `size` bytes. Returns the code
// of the error; 0 if it is not at an end, or is closed.
int unison_exchange_reason(int64_t number, char* reason, size_t size) {
  const auto group = unison::find(number);
  if (group == nullptr) return 0;
  const xla::ffi::Error why = group->halt.why();
  const size_t length = std::min(why.message().size(), size - 1);
  std::memcpy(reason, why.message().data(), length);
  reason[length] = 0;
  return static_cast<int>(*why.errc());
}

}  // extern "C"
