"""Keeps memory that XLA frees in the C allocator, so that steps do not page-fault it in again.

XLA's CPU client takes the buffers of a program from `malloc` and frees them after the step. By
default glibc gets large blocks from the kernel and returns them as soon as they are freed, and the
next step faults every page in again: a third of the CPU time of a small CNN's step. With
`keep_freed_memory` they stay with the process. The cost: memory that was used once is not returned
to the system before the process ends.

This is done if several logical CPU devices or several processes train, before their backend starts,
and in the processes of parameter servers and input workers. The workers that Unison starts also get
memory in huge pages, which glibc asks for only if a variable says so when the process starts. The
environment variable `UNISON_KEEP_MEMORY=0` turns both off.
"""

from __future__ import annotations

import ctypes
import os

KEEP_MEMORY_VARIABLE = "UNISON_KEEP_MEMORY"

#: glibc's variable for what it reads when a process starts.
GLIBC_VARIABLE = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Configures glibc to keep freed memory; returns whether it will.

    Other C libraries are left alone, and so is a process whose user set one of glibc's own
    `MALLOC_` variables.
    """
    if os.environ.get(KEEP_MEMORY_VARIABLE) == "0" or _user_tuned_malloc():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Everything from one heap (blocks mapped one by one would be unmapped when freed, and a
    # thread's own arena cannot hold large ones), whose end is never returned to the system.
    options = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER, _M_ARENA_MAX: 1}
    accepted = [mallopt(option, value) for option, value in options.items()]
    return all(answer == 1 for answer in accepted)


def variables_of_huge_pages() -> dict[str, str]:
    """Returns the environment variables with which glibc asks for huge pages.

    The first touch of a page costs a page fault: of new memory in pages of 4 KiB, 0.3 s a GB, and
    of pages of 2 MiB, 0.1 s. So workers that start again, whose memory is all new, are sooner
    back. Once memory is used again, it makes no difference.

    If the user has set one of glibc's variables, there are none. glibc before 2.35, and other C
    libraries, ignore it.
    """
    if os.environ.get(KEEP_MEMORY_VARIABLE) == "0" or _user_tuned_malloc():
        return {}
    return {} if GLIBC_VARIABLE in os.environ else {GLIBC_VARIABLE: _HUGE_PAGES}


def _user_tuned_malloc() -> bool:
    return any(name.startswith("MALLOC_") for name in os.environ)
