"""The program of the child process of `module_decoder`.

It is run as a file, not as a part of the package: it needs XLA's dialects and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from jaxlib.mlir.dialects import stablehlo


def main(seconds: int, megabytes: int) -> None:
    """Decodes the modules that come through the standard input, each after its size in 8 bytes.

    Writes a byte when it is ready, and one after each module, whether that is valid or not.

    Args:
        seconds: The maximum CPU time for a module.
        megabytes: The maximum memory for it, with all before it.
    """
    given, answers = sys.stdin.buffer, os.dup(1)
    _limit_memory(megabytes << 20)
    os.write(answers, b"r")
    while size := given.read(8):
        module = given.read(int.from_bytes(size, "big"))
        _limit_time(seconds)
        # What is wrong with it is said by the process that uses it.
        with contextlib.suppress(Exception):
            stablehlo.deserialize_portable_artifact_str(module)
        os.write(answers, b"d")


def _limit_time(seconds: int) -> None:
    with contextlib.suppress(ImportError):
        import resource

        most = int(time.process_time()) + 1 + seconds
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def _limit_memory(more: int) -> None:
    with contextlib.suppress(ImportError, OSError):  # elsewhere than on Linux
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + more
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limits = [limit for limit in (most, soft) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
