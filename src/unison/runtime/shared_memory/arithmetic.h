// Sums, maxima and minima of what replicas have, for numbers of all types.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstddef>
#include <cstring>

#include "buffers.h"
#include "xla/ffi/api/ffi.h"

namespace unison {

namespace ffi = xla::ffi;

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

inline Combine combine_of(ffi::DataType type) {
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

}  // namespace unison
