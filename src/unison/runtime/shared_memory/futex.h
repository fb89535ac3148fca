// How a thread sleeps until another one, of this process or of one that shares memory with it, has
// changed a word.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace unison {

// Sleeps as long as `word` is `seen` and nobody wakes, but no longer than `limit`. It may also
// return for no reason: whoever calls looks again.
inline void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, const timespec& limit) {
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace unison
