"""`launch` whose workers have imported Unison and Keras already: see `warm_processes`.

All else is `unison.runtime.launch`. `tests/integration/test_launching.py` has it start its workers
itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO
from unittest import mock

from unison.runtime.launching import Program, functions
from unison.runtime.launching.workers import OnLine, ProcessWorker, Worker
from warm_processes import WarmProcess

#: pytest, since the functions that workers call are in tests.
IMPORTED = ("unison", "keras", "pytest")


def launch(
    function: Callable[..., Any], *args: Any, imported: tuple[str, ...] = IMPORTED, **options: Any
) -> list[Any]:
    """Calls a function in workers, and returns what each has returned: `unison.runtime.launch`.

    Args:
        function: The function.
        args: See there.
        imported: What the workers have imported already.
        options: See there.
    """
    warm = functools.partial(WarmWorker, imported=imported)
    worker = warm if sys.platform == "linux" else ProcessWorker
    with mock.patch.object(functions, "ProcessWorker", worker):
        return functions.launch(function, *args, **options)


class WarmWorker(Worker):
    """A worker in a warm process; what it has printed is heard at its end."""

    def __init__(
        self,
        index: int,
        program: Program,
        on_line: OnLine,
        imported: tuple[str, ...] = IMPORTED,
    ):
        super().__init__(index, on_line)
        self._result = b""
        _, module = program.arguments
        own_end, end_of_worker = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115 (the thread closes it)
        with end_of_worker:
            self._process = WarmProcess(
                f"from {module} import main; main()",
                environment={**os.environ, **program.environment},
                stdin=end_of_worker,
                stdout=output,
                stderr=output,
                imported=imported,
                server=index % 2,
            )
        self._waiter = threading.Thread(
            target=self._wait, args=(own_end, program.call or b"", output), daemon=True
        )
        self._waiter.start()

    def signal(self, number: int) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        self._waiter.join()

    def result(self) -> bytes:
        return self._result

    def _wait(self, connection: socket.socket, call: bytes, output: BinaryIO) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(call)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as answer:
                self._result = answer.read()
        code = self._process.wait()
        self.ended_at = time.monotonic()
        with output:
            output.seek(0)
            for line in output.read().decode(errors="replace").splitlines():
                self.hear(line)
        self.exit_code = code if code >= 0 else 128 - code
