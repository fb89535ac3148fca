"""The program of the child process of `module_decoder`.

It is run as a file, not as a part of the package: it needs XLA's dialects and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
from collections.abc import Callable

READY, VALID, INVALID = b"r", b"v", b"i"


def main() -> None:
    """Decodes the modules that come through the standard input.

    Each comes after three numbers of 8 bytes: its size, and the maximum CPU time in seconds and the
    maximum memory in bytes for it. Writes `READY` once, and `VALID` or `INVALID` after each module.
    """
    if sys.platform == "linux":
        # MLIR and NumPy start a thread for each core, and what each reserves counts as memory.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from jaxlib.mlir.dialects import stablehlo

    given, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    limit = _limits()
    os.write(answers, READY)
    while head := given.read(24):
        size, seconds, memory = struct.unpack("<QQQ", head)
        module = given.read(size)
        limit(seconds, memory)
        try:
            stablehlo.deserialize_portable_artifact_str(module)
        except MemoryError:
            return  # without an answer, as where the library ends the process
        except Exception:
            os.write(answers, INVALID)
        else:
            os.write(answers, VALID)


def _limits() -> Callable[[int, int], None]:
    """Returns a function that limits what is used from now on: seconds, and bytes."""
    try:
        import resource
    except ImportError:  # on Windows
        return lambda seconds, memory: None

    def limit(kind: int, most: int) -> None:
        soft, hard = before[kind]
        resource.setrlimit(
            kind, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard)
        )

    def limit_both(seconds: int, memory: int) -> None:
        limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds)
        with contextlib.suppress(OSError):  # elsewhere than on Linux
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
            limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)

    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS)}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return limit_both


if __name__ == "__main__":
    main()
