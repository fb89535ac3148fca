// What an operation is, and the buffers that it reads and writes.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace unison {

// What an operation does; `library.py` has the same.
enum Kind : int64_t {
  kSum = 0,
  kMax = 1,
  kMin = 2,
  kGather = 3,         // replica r's operand becomes block r of the result
  kSumAndScatter = 4,  // block r of the sum goes to replica r
  kPermute = 5,        // the operand of the replica that is named becomes the result
  kAllToAll = 6,       // block s of replica r's operand becomes block r of replica s's result
  kPass = 7,           // nothing: only the ticket is consumed and returned
  kBroadcast = 8,      // the operand of one replica becomes the result of all
  kCommit = 9,         // the replicas of this process decide whether a program takes effect
};

// The identity of an operation, which replicas compare.
struct Label {
  uint64_t operation = 0;    // its number
  uint64_t fingerprint = 0;  // of what it does
  char words[256] = {};      // its description, for messages

  Label() = default;
  Label(uint64_t number, int64_t kind, std::string_view text) : operation(number) {
    fingerprint = 14695981039346656037ull;  // FNV-1a
    for (const char c : text) {
      fingerprint = (fingerprint ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    }
    fingerprint += kind;
    std::memcpy(words, text.data(), std::min(text.size(), sizeof words - 1));
  }

  bool meets(const Label& other) const {
    return operation == other.operation && fingerprint == other.fingerprint;
  }
};

// Several buffers, seen as one.
struct Span {
  struct Piece {
    char* data;
    size_t bytes;
  };
  std::vector<Piece> pieces;
  size_t bytes = 0;

  Span() = default;
  Span(void* data, size_t size) { add(data, size); }

  void add(void* data, size_t size) {
    pieces.push_back({static_cast<char*>(data), size});
    bytes += size;
  }

  void add(const Span& other) {
    for (const Piece& piece : other.pieces) add(piece.data, piece.bytes);
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

  Span part(size_t start, size_t size) const {
    Span range;
    each(start, size, [&](char* data, size_t, size_t length) { range.add(data, length); });
    return range;
  }

  // Whether the buffers of the other are as large as these.
  bool fits(const Span& other) const {
    return std::equal(pieces.begin(), pieces.end(), other.pieces.begin(), other.pieces.end(),
                      [](const Piece& a, const Piece& b) { return a.bytes == b.bytes; });
  }

  void clear() const {
    for (const Piece& piece : pieces) std::memset(piece.data, 0, piece.bytes);
  }
};

// Copies as many bytes as both have, unless they are the same memory.
inline void copy(const Span& from, const Span& to) {
  size_t at = 0;
  for (const Span::Piece& piece : to.pieces) {
    from.each(at, piece.bytes, [&](char* data, size_t offset, size_t size) {
      if (piece.data + offset != data) std::memcpy(piece.data + offset, data, size);
    });
    at += piece.bytes;
  }
}

}  // namespace unison
