"""`launch`: a Python function in several worker processes, and what each of them returned."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import cloudpickle

from unison.runtime.launching.environments import cluster_on_this_machine, worker_environments
from unison.runtime.launching.jobs import Job, OnLine, Program

#: What a worker runs: see `calling`.
_CALLING = "unison.runtime.launching.calling"


class WorkerError(RuntimeError):
    """A worker of a launched function has failed; the message has its traceback.

    Attributes:
        worker: Its index.
        exit_code: How its process ended.
    """

    def __init__(self, message: str, worker: int, exit_code: int):
        super().__init__(message)
        self.worker = worker
        self.exit_code = exit_code


def launch(
    function: Callable[..., Any],
    workers: int = 2,
    args: Sequence[Any] = (),
    devices_per_worker: int | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    on_line: OnLine | None = None,
) -> list[Any]:
    """Calls a function in worker processes of one cluster on this machine.

    Each worker is a fresh Python process that finds the cluster in `TF_CONFIG`. When one fails,
    the others are ended.

    Args:
        function: What every worker calls; a function of a notebook or a lambda will do.
        workers: How many there are.
        args: What it is called with.
        devices_per_worker: Into how many logical devices each worker splits its CPU.
        environment: What else is added to the workers' environment.
        timeout: Seconds after which workers that still run are ended; None: none.
        on_line: Called with a worker's index and each line that it prints. Default: it is printed.

    Returns:
        What the function returned, by worker.

    Raises:
        WorkerError: A worker has failed. Its traceback is in the message.
        TimeoutError: Some took longer than `timeout`.
        TypeError: The function, an argument or a result cannot be pickled.

    Examples:
        >>> import json, os
        >>> launch(lambda: json.loads(os.environ["TF_CONFIG"])["task"]["index"], workers=2)
        [0, 1]
    """
    try:
        call = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:
        raise TypeError(
            f"launch sends the function and its arguments to other processes. {function!r} cannot "
            f"be pickled: {error}"
        ) from error
    cluster = cluster_on_this_machine(workers)
    environments = worker_environments(cluster, devices_per_worker)
    with contextlib.ExitStack() as open_pipes:
        pipes = [open_pipes.enter_context(_Pipes(call)) for _ in environments]
        programs = [
            Program(
                [sys.executable, "-m", _CALLING, *map(str, own.of_worker)],
                {**_import_path(), **added, **(environment or {})},
                own.of_worker,
            )
            for added, own in zip(environments, pipes, strict=True)
        ]
        with Job(programs, on_line or _printed) as job:
            for own in pipes:
                own.start()
            failure = job.wait(timeout)
        if failure is not None:
            shown = "\n".join(failure.last_lines)
            raise WorkerError(f"{failure}\n{shown}", failure.worker, failure.exit_code)
        return [cloudpickle.loads(own.result()) for own in pipes]


class _Pipes:
    """The two pipes between this process and one worker: for the call, and for its result."""

    def __init__(self, call: bytes):
        self._call = call
        self._result = b""
        self._has_started = False
        self._threads = [
            threading.Thread(target=work, name="unison-launch", daemon=True)
            for work in (self._write, self._read)
        ]

    def __enter__(self) -> Self:
        call_of_worker, self._to_worker = os.pipe()
        self._from_worker, result_of_worker = os.pipe()
        #: The worker's ends: where it reads the call, and where it writes the result.
        self.of_worker = (call_of_worker, result_of_worker)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._has_started:
            for descriptor in (*self.of_worker, self._to_worker, self._from_worker):
                os.close(descriptor)

    def start(self) -> None:
        """Begins to write and read; the worker has its ends."""
        self._has_started = True
        for descriptor in self.of_worker:
            os.close(descriptor)
        for thread in self._threads:
            thread.start()

    def result(self) -> bytes:
        """Returns what the worker, which has ended, has written."""
        self._threads[1].join()
        return self._result

    def _write(self) -> None:
        with contextlib.suppress(BrokenPipeError), open(self._to_worker, "wb") as pipe:
            pipe.write(self._call)

    def _read(self) -> None:
        with open(self._from_worker, "rb") as pipe:
            self._result = pipe.read()


def _import_path() -> dict[str, str]:
    """Returns the environment in which a worker finds the modules that this process finds."""
    return {"PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}


def _printed(worker: int, line: str) -> None:
    print(f"[worker {worker}] {line}", flush=True)
