// Symbols of the C library that are newer than glibc 2.28, defined here.
//
// A symbol that this library imports has the version of the glibc that it is linked with, and does
// not load where that version is missing. Most symbols are older than 2.28; libstdc++, which is
// linked statically, uses these two. They are seen by this library only: `native.map` keeps
// them inside.

#pragma once

#include <features.h>

#ifdef __GLIBC_PREREQ

#if __GLIBC_PREREQ(2, 32)
#include <sys/single_threaded.h>

// Whether atomic operations may be left out because there is one thread: they may not.
char __libc_single_threaded = 0;
#endif

#if __GLIBC_PREREQ(2, 34)
#include <pthread.h>
#include <sched.h>

// Moved from libpthread to libc in 2.34, with a new version. libstdc++ calls it for its locales.
extern "C" int pthread_once(pthread_once_t* control, void (*initialize)()) {
  constexpr int kRunning = 1, kDone = 2;
  int expected = PTHREAD_ONCE_INIT;
  if (__atomic_compare_exchange_n(control, &expected, kRunning, false, __ATOMIC_ACQUIRE,
                                  __ATOMIC_ACQUIRE)) {
    initialize();
    __atomic_store_n(control, kDone, __ATOMIC_RELEASE);
  } else {
    while (__atomic_load_n(control, __ATOMIC_ACQUIRE) != kDone) sched_yield();
  }
  return 0;
}
#endif

#endif  // __GLIBC_PREREQ
