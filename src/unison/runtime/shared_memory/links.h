// Operations between machines, through sockets that connect each of them with all others.
//
// One replica of every machine, its leader, performs them for the others. Large sums travel around
// a ring: every machine receives from the one before and sends on to the next what it has added its
// own to, piece after piece as it comes, and in a second turn the totals. So every machine sends
// less than twice the bytes of the operand, however many there are, and the bits are the same on
// all. Small sums are sent to everybody, which takes a single turn.

#pragma once

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "arithmetic.h"
#include "buffers.h"
#include "halt.h"

namespace unison {

constexpr size_t kDirectBytes = 1 << 16;   // sums up to this size are sent to everybody
constexpr size_t kScratchBytes = 1 << 18;  // what is received at most before it is added
constexpr size_t kCallBytes = 1 << 20;     // what a call to the system moves at most
constexpr size_t kCallPieces = 64;

class Links {
 public:
  // Takes over the sockets, one for every machine; that of the own one is -1. `names` are those of
  // the machines' leaders.
  Links(uint32_t own, std::vector<int> sockets, std::vector<std::string> names)
      : own_(own), size_(sockets.size()), sockets_(std::move(sockets)), names_(std::move(names)) {}

  ~Links() {
    for (const int socket : sockets_) {
      if (socket >= 0) close(socket);
    }
  }
  Links(const Links&) = delete;

  // Tells the other machines, and the own threads that wait for them, that the group is at an end.
  void shut() const {
    for (const int socket : sockets_) {
      if (socket >= 0) shutdown(socket, SHUT_RDWR);
    }
  }

  // Puts the reduction of what all machines have in `work` there.
  ffi::Error all_reduce(const Label& label, Halt& halt, const Span& work, int64_t kind,
                        Combine combine) const {
    if (work.bytes <= kDirectBytes) return all_reduce_directly(label, halt, work, kind, combine);
    const size_t share = (work.bytes / size_ + 63) / 64 * 64;
    std::vector<size_t> bounds;
    for (uint32_t host = 0; host < size_; ++host) {
      bounds.push_back(std::min(host * share, work.bytes));
    }
    bounds.push_back(work.bytes);
    return circulate(label, halt, work, bounds, kind, combine);
  }

  // Fills `work`, of which each machine has the part between its bounds.
  ffi::Error all_gather(const Label& label, Halt& halt, const Span& work,
                        const std::vector<size_t>& bounds) const {
    const Span own = work.part(bounds[own_], bounds[own_ + 1] - bounds[own_]);
    std::vector<Span> received(size_);
    for (uint32_t host = 0; host < size_; ++host) {
      received[host] = work.part(bounds[host], bounds[host + 1] - bounds[host]);
    }
    return send_to_all(label, halt, own, received);
  }

  // Fills `work`, which the machine `source` has.
  ffi::Error broadcast(const Label& label, Halt& halt, const Span& work, uint32_t source) const {
    std::vector<size_t> bounds(size_ + 1, 0);
    std::fill(bounds.begin() + source + 1, bounds.end(), work.bytes);
    return circulate(label, halt, work, bounds, kBroadcast, nullptr);
  }

 private:
  // A stream of bytes over a socket, to another machine or from it; a label goes before it.
  struct Flow {
    uint32_t host;
    Span span;
    size_t ready;  // how far it may go now
    size_t done = 0;

    Flow(uint32_t host, Label* label, const Span& data) : host(host), span(label, sizeof *label) {
      span.add(data);
      ready = span.bytes;
    }
    bool is_complete() const { return done == span.bytes; }
    bool can_move() const { return done < ready; }
    size_t data() const { return done > sizeof(Label) ? done - sizeof(Label) : 0; }
  };

  ffi::Error all_reduce_directly(const Label& label, Halt& halt, const Span& work, int64_t kind,
                                 Combine combine) const {
    const size_t bytes = work.bytes;
    const size_t stride = (bytes + 63) / 64 * 64;
    std::vector<char> buffer(stride * size_ + 64);
    std::vector<const char*> sources(size_);
    std::vector<Span> received(size_);
    for (uint32_t host = 0; host < size_; ++host) {
      received[host] = Span(buffer.data() + host * stride, bytes);
      sources[host] = buffer.data() + host * stride;
    }
    copy(work, received[own_]);
    ffi::Error error = send_to_all(label, halt, received[own_], received);
    if (error.failure()) return error;
    char* total = buffer.data() + own_ * stride;
    combine(kind, sources.data(), size_, total, bytes);
    copy(received[own_], work);
    return error;
  }

  ffi::Error send_to_all(const Label& label, Halt& halt, const Span& own,
                         const std::vector<Span>& received) const {
    Label sent = label;
    std::vector<Label> labels(size_);
    std::vector<Flow> sends, receives;
    for (uint32_t turn = 1; turn < size_; ++turn) {
      const uint32_t host = (own_ + turn) % size_;
      sends.emplace_back(host, &sent, own);
      receives.emplace_back(host, &labels[host], received[host]);
    }
    return move(label, halt, sends, receives, labels, [] {});
  }

  // A ring reduce-scatter, followed by a ring all-gather. Each machine begins by sending its own part
  // of `work`; it combines each part that it receives with its own values, and sends it on. Then the
  // complete parts are sent around once more, into their final places. Without `combine`, only the
  // all-gather.
  ffi::Error circulate(const Label& label, Halt& halt, const Span& work,
                       const std::vector<size_t>& bounds, int64_t kind, Combine combine) const {
    const uint32_t steps = (combine == nullptr ? 1 : 2) * (size_ - 1);
    const uint32_t combined_steps = combine == nullptr ? 0 : size_ - 1;
    const size_t header = sizeof(Label);
    const auto part = [&](uint32_t step) {  // what is sent in this step, and received before it
      const uint32_t host = (own_ + 2 * size_ - step) % size_;
      return work.part(bounds[host], bounds[host + 1] - bounds[host]);
    };
    Label sent = label;
    std::vector<Label> labels(size_);
    const auto scratch = std::make_unique<char[]>(kScratchBytes);
    Span outgoing, targets, incoming;
    std::vector<size_t> ends;  // of the parts to be combined
    for (uint32_t step = 0; step < steps; ++step) {
      outgoing.add(part(step));
      targets.add(part(step + 1));
      if (step < combined_steps) ends.push_back(targets.bytes);
    }
    const size_t to_combine = ends.empty() ? 0 : ends.back();
    while (incoming.bytes < to_combine) {
      incoming.add(scratch.get(), std::min(kScratchBytes, to_combine - incoming.bytes));
    }
    incoming.add(targets.part(to_combine, targets.bytes - to_combine));
    const size_t own_bytes = part(0).bytes;
    std::vector<Flow> sends, receives;
    sends.emplace_back((own_ + 1) % size_, &sent, outgoing);
    const uint32_t before = (own_ + size_ - 1) % size_;
    receives.emplace_back(before, &labels[before], incoming);
    size_t combined = 0;
    size_t current = 0;  // the part that is being combined
    const auto settle = [&] {
      const size_t received = receives[0].data();
      while (current < ends.size()) {
        size_t size = std::min(received, ends[current]) - combined;
        if (received < ends[current]) size -= size % 8;  // whole elements
        const Span fresh = incoming.part(combined, size);
        size_t at = combined;
        for (const Span::Piece& piece : fresh.pieces) {
          targets.each(at, piece.bytes, [&](char* data, size_t offset, size_t bytes) {
            const char* sources[] = {piece.data + offset, data};
            combine(kind, sources, 2, data, bytes);
          });
          at += piece.bytes;
        }
        combined = at;
        if (combined < ends[current]) break;
        ++current;
      }
      const bool is_combined = combined == to_combine;
      const size_t settled = is_combined ? std::max(received, to_combine) : combined;
      sends[0].ready = std::min(header + own_bytes + settled, sends[0].span.bytes);
      receives[0].ready = is_combined ? receives[0].span.bytes
                                      : std::min(header + combined + kScratchBytes,
                                                 header + to_combine);
    };
    return move(label, halt, sends, receives, labels, settle);
  }

  // Moves bytes until all flows are complete; calls `settle` at first and whenever some have come.
  template <typename Settle>
  ffi::Error move(const Label& label, Halt& halt, std::vector<Flow>& sends,
                  std::vector<Flow>& receives, const std::vector<Label>& labels,
                  Settle settle) const {
    double deadline = now() + halt.seconds;
    settle();
    while (true) {
      bool moved = false;
      bool has_come = false;
      bool is_complete = true;
      const Flow* broken = nullptr;
      for (Flow& flow : sends) {
        const ssize_t bytes = flow.can_move() ? transfer(flow, true) : 0;
        if (bytes < 0) broken = &flow;
        moved = moved || bytes > 0;
        is_complete = is_complete && flow.is_complete();
      }
      for (Flow& flow : receives) {
        const bool had_label = flow.done >= sizeof(Label);
        const ssize_t bytes = flow.can_move() ? transfer(flow, false) : 0;
        if (bytes < 0) broken = &flow;
        if (!had_label && flow.done >= sizeof(Label) && !labels[flow.host].meets(label)) {
          return mismatch(names_[own_], label, names_[flow.host], labels[flow.host]);
        }
        if (bytes > 0) settle();
        has_come = has_come || bytes > 0;
        is_complete = is_complete && flow.is_complete();
      }
      // Only when all has been read: it may be another operation, which says why they closed.
      if (broken != nullptr && !has_come) return lost(*broken, halt);
      moved = moved || has_come;
      if (is_complete) return ffi::Error::Success();
      if (halt.is_raised()) return halt.why();
      if (moved) {
        deadline = now() + halt.seconds;
        continue;
      }
      if (now() > deadline) {
        for (const Flow& flow : receives) {
          if (flow.can_move()) return halt.timeout(names_[flow.host], label);
        }
        return halt.timeout(names_[sends.front().host], label);
      }
      wait(sends, receives);
    }
  }

  // Waits until a flow can move on, or it is time to look whether the group is at an end.
  void wait(const std::vector<Flow>& sends, const std::vector<Flow>& receives) const {
    std::vector<pollfd> events;
    for (const Flow& flow : sends) {
      if (flow.can_move()) events.push_back({sockets_[flow.host], POLLOUT, 0});
    }
    for (const Flow& flow : receives) {
      if (flow.can_move()) events.push_back({sockets_[flow.host], POLLIN, 0});
    }
    poll(events.data(), events.size(), 20);
  }

  // Moves some bytes, and returns how many; -1 if the connection is lost.
  ssize_t transfer(Flow& flow, bool sends) const {
    iovec pieces[kCallPieces];
    msghdr message{};
    message.msg_iov = pieces;
    const Span range = flow.span.part(flow.done, std::min(flow.ready - flow.done, kCallBytes));
    for (const Span::Piece& piece : range.pieces) {
      if (message.msg_iovlen == kCallPieces) break;
      pieces[message.msg_iovlen++] = {piece.data, piece.bytes};
    }
    const int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    const ssize_t bytes = sends ? sendmsg(sockets_[flow.host], &message, flags)
                                : recvmsg(sockets_[flow.host], &message, flags);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    if (bytes == 0 && !sends) return -1;
    if (bytes > 0) flow.done += bytes;
    return bytes;
  }

  ffi::Error lost(const Flow& flow, Halt& halt) const {
    const ffi::Error why = halt.why();
    if (why.failure()) return why;
    return ffi::Error(ffi::ErrorCode::kUnavailable,
                      names_[flow.host] + " has closed its connection with " + names_[own_] + ".");
  }

  const uint32_t own_;
  const uint32_t size_;
  const std::vector<int> sockets_;
  const std::vector<std::string> names_;
};

}  // namespace unison
