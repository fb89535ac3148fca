"""`WorkerServer`: an input worker in a process of its own, which ends with this one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import weakref
from typing import Any

from unison.data.service.configuration import WorkerConfig
from unison.data.service.elements import error_of
from unison.data.service.local_workers import add_local_worker, remove_local_worker
from unison.data.workers.pool import PROGRAM
from unison.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError

_MODULE = "unison.data.service.worker_program"

#: Seconds in which the process has to start, and in which it has to end before it is killed.
_SECONDS_TO_START = 120.0
_SECONDS_TO_END = 5.0

#: Seconds for which the dispatcher is awaited: it may be started later.
_SECONDS_TO_REGISTER = 10.0

#: Seconds between two looks whether the process has ended.
_LOOK_AFTER = 0.2


class WorkerServer:
    """An input worker, which computes in a process of its own: this one's lock is not held.

    It serves from its creation on, and ends with this object, and with this process. Functions of
    datasets are loaded there: they import what they need, and do not see this process's variables.

    Args:
        config: The configuration.
        start: Whether it starts immediately.

    Raises:
        OSError: It cannot listen at its address.
        DeadlineExceededError: The process has not started in time.

    TF: `tf.data.experimental.service.WorkerServer`.
    """

    def __init__(self, config: WorkerConfig, start: bool = True):
        self._config = config
        self._process: _Process | None = None
        if start:
            self.start()

    def start(self) -> None:
        """Starts the process; returns when it listens."""
        if self._process is None:
            self._process = _Process(self._config)
            weakref.finalize(self, self._process.close)

    def join(self) -> None:
        """Waits until the process has ended.

        Raises:
            UnavailableError: It has not been stopped: it was killed, or has lost the dispatcher.
        """
        if self._process is not None:
            self._process.join()

    def stop(self) -> None:
        """Ends the process; its part of unfinished iterations is lost."""
        if self._process is not None:
            self._process.close()

    @property
    def address(self) -> str:
        """The address at which it is reached, host:port."""
        return self._started.address

    @property
    def process_id(self) -> int:
        """The id of its process."""
        return self._started.process_id

    @property
    def _started(self) -> _Process:
        if self._process is None:
            raise FailedPreconditionError(message="The worker has not been started: start().")
        return self._process


class _Process:
    def __init__(self, config: WorkerConfig):
        self._id = secrets.token_hex(8)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        # The process ends when this end is closed, in whichever way.
        self._lifeline, theirs = socket.socketpair()
        for end in (self._lifeline, theirs):
            end.settimeout(None)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), _MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # An interrupt from the terminal is for this process.
                start_new_session=True,
                env={"JAX_PLATFORMS": "cpu"} | os.environ,
            )
        finally:
            theirs.close()
        try:
            self.address = self._begun(config)
        except BaseException:
            self._end()
            raise
        self.process_id = self._popen.pid
        add_local_worker(self._id)

    def _begun(self, config: WorkerConfig) -> str:
        settings = {
            "path": sys.path,
            "id": self._id,
            "config": dataclasses.asdict(config),
            "seconds_to_register": _SECONDS_TO_REGISTER,
        }
        self._lifeline.settimeout(_SECONDS_TO_START)
        answer: dict[str, Any]
        try:
            self._lifeline.sendall(json.dumps(settings).encode() + b"\n")
            with self._lifeline.makefile("rb") as file:
                line = file.readline()
            answer = json.loads(line)
        except TimeoutError as error:
            raise DeadlineExceededError(
                message=f"The process of an input worker has not started within "
                f"{_SECONDS_TO_START:g} s."
            ) from error
        except (OSError, ValueError) as error:
            raise UnavailableError(
                message="The process of an input worker has ended while it started; its output "
                "says why."
            ) from error
        self._lifeline.settimeout(None)
        if "error" in answer:
            raise error_of(answer)
        return str(answer["address"])

    def join(self) -> None:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._popen.wait(_LOOK_AFTER)
                break
        was_closed = self._is_closed
        self.close()
        if status and not was_closed:
            raise UnavailableError(
                message=f"The input worker at {self.address} has ended with status {status}: it "
                "was killed, or has lost the dispatcher; its output says why."
            )

    def close(self) -> None:
        with self._lock:
            if self._is_closed or os.getpid() != self._owner:
                return  # a forked process does not end its parent's workers
            self._is_closed = True
            remove_local_worker(self._id)
            self._end()

    def _end(self) -> None:
        self._lifeline.close()
        try:
            self._popen.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
