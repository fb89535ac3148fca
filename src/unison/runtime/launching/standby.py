"""Standbys: processes that have imported what a worker's program imports, and wait to be it.

A job that starts again continues sooner with them. A standby is the process of its worker from the
beginning: Python with the program's arguments. It stops before the program, in a `sitecustomize`
(in `standing_by`) that imports the modules and waits on a pipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import marshal
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from unison.runtime.launching import standing_by
from unison.runtime.launching.priorities import LowPriority
from unison.runtime.launching.workers import OnLine, ProcessWorker, Program, Worker, in_thread

logger = logging.getLogger("unison")

#: The folder of the file that Python runs first in a standby, and its variable: see that file.
_FOLDER = os.path.dirname(os.path.abspath(standing_by.__file__))
_VARIABLE = "UNISON_STANDBY"
_TRIAL = "trial"
_SHOWN = 87

#: The beginnings of variables that are read when Python starts or modules are imported. A standby
#: in which one has another value is not used.
_READ_EARLY = (
    *("GLIBC_", "JAX_", "KERAS_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON"),
    "UNISON_LOG",
)

#: Seconds in which the trial ends.
_LONGEST_TRIAL = 60.0


class StandbyWorkers:
    """The standbys of a job's workers, as a context manager.

    Its exit ends those that were not used. Workers, including those that were standbys, must have
    ended before.

    Examples:
        >>> program = Program(["-u", "-c", "import json; print('hello')"], {})
        >>> with StandbyWorkers() as standbys:
        ...     standbys.prepare(0, program, ["json"], {})
        ...     worker = standbys.start(0, program, lambda worker, line: print(worker, line))
        ...     worker.close()
        0 hello
    """

    def __init__(self) -> None:
        self._standbys: dict[int, _Standby] = {}
        self._asked: dict[int, tuple[Program, list[str], dict[str, str]]] = {}
        self._used: list[_Standby] = []
        self._has_ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        # Linux kills them when the thread that has started them ends, so that it is one of its own.
        self._thread = in_thread(self._prepare_all)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            unused = list(self._standbys.values())
            self._standbys.clear()
        for standby in unused:
            standby.end()
        if self._thread is not None and all(each.exit_code is not None for each in self._used):
            self._thread.join()

    def start(self, index: int, program: Program, on_line: OnLine) -> Worker:
        """Starts a worker: the standby that was prepared for its program; without one, as ever.

        Args:
            index: Its index.
            program: Its program.
            on_line: Called for every line that it prints, in a thread.
        """
        with self._changed:
            self._asked.pop(index, None)
            standby = self._standbys.get(index)
            is_ready = standby is not None and standby.is_ready_for(program)
            self._standbys.pop(index, None)
            if standby is not None and is_ready:
                standby.go_on(program, on_line)
                self._used = [each for each in self._used if each.exit_code is None] + [standby]
                return standby
        if standby is not None:
            standby.end()
        return ProcessWorker(index, program, on_line)

    def prepare(
        self,
        index: int,
        program: Program,
        modules: Iterable[str],
        environment: Mapping[str, str],
    ) -> None:
        """Starts a standby for a worker, in a thread, unless there is one for this program.

        A program that is called, or whose first argument besides `-u` is another option of Python
        than `-m` and `-c`, has none.

        Args:
            index: The worker's index.
            program: The program as it was started last.
            modules: The names of the modules that it imports, in order. Those that cannot be
                imported are skipped.
            environment: The variables that are set before the imports, as the program sets them. It
                begins without them, except for those that the imports set, too.
        """
        if not _can_wait(program):
            return
        with self._changed:
            standby = self._standbys.get(index)
            if standby is None or not standby.is_ready_for(program):
                self._asked[index] = (program, list(modules), dict(environment))
                self._changed.notify_all()

    def _prepare_all(self) -> None:
        """Starts standbys as they are asked for, and waits for the end of those that are used."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._has_ended)
            # Outside of the lock, as it takes a while.
            is_possible = self._has_ended or _is_possible()
            with self._changed:
                if self._has_ended:
                    break
                asked, self._asked = self._asked, {}
                before = [self._standbys.pop(index, None) for index in asked]
                for index, (program, modules, environment) in asked.items():
                    if is_possible:
                        with _logging_errors():
                            standby = _Standby(index, program, modules, environment)
                            self._standbys[index] = standby
            for standby in filter(None, before):
                standby.end()
        for standby in self._used:
            standby.close()


@contextlib.contextmanager
def _logging_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError):
        logger.debug("A standby cannot be started.", exc_info=True)


class _Standby(ProcessWorker):
    """A standby, and the worker that it becomes.

    Args:
        index: Its index.
        program: The program for which it is prepared.
        modules: The names of the modules that it imports.
        environment: The variables that are set before.
    """

    def __init__(
        self, index: int, program: Program, modules: list[str], environment: dict[str, str]
    ):
        self._is_prepared_for = _what_it_cannot_change(program)
        told, self._pipe = os.pipe()
        self._told = told
        reporting = dataclasses.replace(program, on_report=lambda line, ahead: None)
        try:
            super().__init__(index, reporting, lambda worker, line: None)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(told)
        self._priority = LowPriority(self._process.pid)
        begin = self._environment(reporting)
        self._teller = in_thread(self._tell, marshal.dumps((begin, environment, modules)))

    def is_ready_for(self, program: Program) -> bool:
        """Returns whether it is alive, and can become the worker with a program."""
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        is_alive = os.waitid(os.P_PID, self._process.pid, ended) is None
        return is_alive and _what_it_cannot_change(program) == self._is_prepared_for

    def go_on(self, program: Program, on_line: OnLine) -> None:
        """Tells it to run a program.

        Args:
            program: The program.
            on_line: Called for every line that it prints from now on, in a thread.
        """
        self._lines.clear()
        self._on_line, self._on_report = on_line, program.on_report
        unused = [] if program.on_report else [int(self._pipe_of_reports.partition(":")[0])]
        word = marshal.dumps((self._environment(program), unused))
        in_thread(self._tell_the_last, word, self._teller)

    def end(self) -> None:
        """Ends it, which has not become a worker."""
        self.signal(signal.SIGKILL)
        self.close()
        self._teller.join()
        os.close(self._pipe)

    def _open(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        options["env"] = _waiting(options["env"], str(self._told))
        options["pass_fds"] = (*options["pass_fds"], self._told)
        return super()._open(command, **options)

    def _tell_the_last(self, word: bytes, before: threading.Thread) -> None:
        before.join()
        self._tell(word)
        os.close(self._pipe)
        self._priority.undo()

    def _tell(self, word: bytes) -> None:
        """Writes to its pipe, which may be full until it reads."""
        with contextlib.suppress(OSError):  # it has ended
            while word:
                word = word[os.write(self._pipe, word) :]


def _what_it_cannot_change(program: Program) -> tuple[object, ...]:
    """Returns what a process has from its start on, of what a program asks for."""
    environment = {**os.environ, **program.environment}
    read = {name: value for name, value in environment.items() if name.startswith(_READ_EARLY)}
    cores = None if program.cores is None else sorted(program.cores)
    return (list(program.arguments), cores, _files(program.inherited), read)


def _files(descriptors: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns which files they are, as numbers may be used again."""
    found = [(descriptor, os.fstat(descriptor)) for descriptor in descriptors]
    return [(descriptor, file.st_dev, file.st_ino) for descriptor, file in found]


def _can_wait(program: Program) -> bool:
    """Returns whether Python, given these arguments, runs the file in which a standby waits."""
    first = next((each for each in program.arguments if each != "-u"), "-")
    is_known = first in ("-c", "-m") or not first.startswith("-")
    return is_known and program.call is None


@functools.cache
def _is_possible() -> bool:
    """Returns whether this Python runs that file, as a trial shows.

    It would not if it were a script that starts Python with other paths; then a standby would not
    wait, but run the program.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", ""],
            env=_waiting(os.environ, _TRIAL),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LONGEST_TRIAL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == _SHOWN


def _waiting(environment: Mapping[str, str], said: str) -> dict[str, str]:
    """Returns an environment in which Python runs the file in which a standby waits."""
    path = environment.get("PYTHONPATH")
    # Nothing is added to a path that is empty: an empty entry would be the working folder.
    with_folder = os.pathsep.join([_FOLDER, path]) if path else _FOLDER
    return {**environment, "PYTHONPATH": with_folder, _VARIABLE: said}
