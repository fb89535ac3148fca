"""Decodes modules of StableHLO in a child process with limits, before this process does.

MLIR's reader of bytecode reads what a location or an attribute refers to again for each reference
that it cannot resolve yet, so a few corrupt bytes can take it forever, and it aborts the process
where memory ends. Nothing interrupts it inside of a process. An error of the reader can leave the
process's memory corrupt: only valid modules are decoded in this process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from unison.saving.module_decoder_start import INVALID, READY, VALID

logger = logging.getLogger("unison")

_PROGRAM = Path(__file__).with_name("module_decoder_start.py")

#: The maximum CPU time in seconds and the maximum memory in bytes for a module: so much, and for
#: each of its bytes. One of 100 MB takes 0.3 s and 300 MB.
_SECONDS, _SECONDS_A_BYTE = 2, 1 / 25e6
_MEMORY, _MEMORY_A_BYTE = 40 << 20, 8

#: Seconds in which the child starts, and in which it answers, on a busy machine.
_PATIENCE = 60.0


class ModuleDecoder:
    """A child process that decodes modules, started for the first of them.

    Use it as a context manager: the process ends with the block.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ModuleDecoder:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def check(self, modules: Iterable[bytes]) -> None:
        """Decodes modules.

        Raises:
            ValueError: One is invalid, or decoding it takes too much time or memory.
        """
        for module in modules:
            if self._has_started:
                self._decode(module)

    @functools.cached_property
    def _has_started(self) -> bool:
        """Whether the child process runs; the first use starts it."""
        paths = [path for path in sys.path if path]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable or "", "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
            if self._answer() == READY:
                return True
        # Where the interpreter is a part of another program, for example.
        logger.warning(
            "No child process that decodes saved programs starts with the interpreter %s: they are "
            "decoded without limits of time and memory.",
            sys.executable,
        )
        return False

    def _decode(self, module: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        size = len(module)
        seconds = _SECONDS + int(size * _SECONDS_A_BYTE)
        memory = _MEMORY + size * _MEMORY_A_BYTE
        try:
            self._process.stdin.write(struct.pack("<QQQ", size, seconds, memory))
            self._process.stdin.write(module)
            self._process.stdin.flush()
        except BrokenPipeError:
            answer = b""
        else:
            answer = self._answer()
        if answer == INVALID:
            raise ValueError(
                f"a module of {size} bytes is no StableHLO that the installed jaxlib can read"
            )
        if answer != VALID:
            raise ValueError(
                f"decoding a module of {size} bytes takes more than {seconds} s of CPU time or "
                f"{memory >> 20} MB, or ends the process"
            )

    def _answer(self) -> bytes:
        """Returns the child's answer; empty if it has ended, or did not answer in time."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            in_time = selector.select(_PATIENCE)
        return os.read(self._process.stdout.fileno(), 1) if in_time else b""
