"""Programs in processes that have imported JAX and Keras already, for tests that start many.

A server imports them, before it has a thread or JAX a backend, and forks. What it has forked runs
its program as `python -c` does, to the interpreter's end: `atexit`, `sys.excepthook`, exit codes
and signals are Python's own, and the program must import what it uses. What a fresh process is to
show (that imports work, that a worker starts or is killed) is started by `subprocess`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import BinaryIO, NoReturn

#: The folder of what Python runs first, in servers too.
_TESTS = os.path.dirname(os.path.abspath(__file__))
STARTUP = os.path.join(_TESTS, "startup")

#: The package beside these tests, which an environment may have installed from another checkout.
_SOURCE = os.path.join(os.path.dirname(_TESTS), "src")

#: Seconds in which a server imports its modules, and forks, on a machine that is busy.
_SECONDS_TO_IMPORT = 100
_SECONDS_TO_FORK = 30

_SERVING = """
import sys
sys.path.insert(0, sys.argv[1])
import warm_processes
del sys.path[:2]  # also the folder in which a server happens to be
warm_processes.serve()
"""
_MOST_BYTES = 1 << 20
_NUMBER = struct.Struct("i")
_PR_SET_PDEATHSIG = 1


class WarmProcess:
    """A process of its own that runs a program as `python -c source arguments...` does.

    It leads a group, and is killed with it when this process ends. Its children are killed when it
    ends.

    Args:
        source: The program.
        arguments: What follows `-c` in `sys.argv`.
        environment: All of its environment.
        imported: The modules that are imported before the program begins.
        server: Which of several servers forks it. Each has a hash seed of its own, so that the
            sets of two programs differ in their order as those of fresh processes do.
        stdin: What it reads.
        stdout: Where it writes.
        stderr: Where it writes what went wrong.
        folder: Its working folder. None: this one's.

    Attributes:
        pid: Its number, and that of its group.
        returncode: As `subprocess.Popen` gives it; None until it is known that it has ended.
    """

    def __init__(
        self,
        source: str,
        *arguments: str,
        environment: Mapping[str, str],
        imported: tuple[str, ...],
        server: int = 0,
        stdin: BinaryIO | socket.socket,
        stdout: BinaryIO,
        stderr: BinaryIO,
        folder: str | os.PathLike[str] | None = None,
    ):
        if not may_be_warm(environment):
            read = _read_at_import(os.environ)
            raise ValueError(f"Expected an environment with {read}. Received: {environment}")
        told = {
            "source": source,
            "arguments": arguments,
            "environment": dict(environment),
            "folder": os.fspath(folder or os.getcwd()),
        }
        connection, _ = _server(imported, server)
        self._status, status = os.pipe()
        try:
            passed = [stdin.fileno(), stdout.fileno(), stderr.fileno(), status]
            socket.send_fds(connection, [json.dumps(told).encode()], passed)
        finally:
            os.close(status)
        self.returncode: int | None = None
        self.pid = self._told(_SECONDS_TO_FORK)
        if self.pid < 0:
            raise RuntimeError(f"A server of warm processes has ended: {_server(imported, server)}")

    def _told(self, timeout: float | None) -> int:
        """Returns what is told next of the process: its number, then how it has ended."""
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a program in a warm process", timeout or 0)
        said = os.read(self._status, _NUMBER.size)
        return _NUMBER.unpack(said)[0] if said else -signal.SIGKILL  # with the one that watches it

    def poll(self) -> int | None:
        """Returns how it has ended, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: It has not ended within `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._told(timeout)
            os.close(self._status)
        return self.returncode

    def kill(self) -> None:
        """Kills it and its children."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def start_program(
    source: str,
    *arguments: str,
    imported: tuple[str, ...],
    server: int = 0,
    environment: Mapping[str, str],
    stdin: BinaryIO,
    stdout: BinaryIO,
    stderr: BinaryIO,
    folder: str | os.PathLike[str] | None = None,
) -> WarmProcess | subprocess.Popen[bytes]:
    """Starts a program in a warm process; in a fresh one where it cannot be warm, or need not."""
    files = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    if imported and may_be_warm(environment):
        return WarmProcess(
            source,
            *arguments,
            environment=environment,
            **files,
            folder=folder,
            imported=imported,
            server=server,
        )
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        env=environment,
        **files,
        cwd=folder,
        start_new_session=True,
    )


def may_be_warm(environment: Mapping[str, str]) -> bool:
    """Whether what is imported in this environment has read there what it would read in that."""
    return sys.platform == "linux" and _read_at_import(environment) == _read_at_import(os.environ)


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("JAX_", "KERAS_", "UNISON_LOG"))
    }


@functools.cache
def _server(
    imported: tuple[str, ...], number: int
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts a server; it ends when the connection to it is closed, at this process's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([STARTUP, _SOURCE])}
    environment.pop("PYTHONHASHSEED", None)
    environment["OPENBLAS_NUM_THREADS"] = "1"  # which are no threads beside Python's own
    command = [sys.executable, "-c", _SERVING, os.path.dirname(__file__)]
    with theirs:
        server = subprocess.Popen(
            [*command, str(theirs.fileno()), *imported],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    ours.settimeout(_SECONDS_TO_IMPORT)
    if not ours.recv(1):
        raise RuntimeError(f"A server of warm processes ended with {server.wait()}: see above.")
    return ours, server


# -- in the server -------------------------------------------------------------------------------


def serve() -> None:
    """Imports what is asked for, and runs each program that comes in a process of its own."""
    _, connection_number, *imported = sys.argv[1:]
    connection = socket.socket(fileno=int(connection_number))
    for name in imported:
        module = importlib.import_module(name)
        if name == "unison":  # which loads its names when they are used
            for public in module.__all__:
                getattr(module, public)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{imported} cannot be forked: importing them starts {threads} threads.")
    gc.collect()
    gc.freeze()  # what is imported stays, and the pages that it is in are shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a watcher
    connection.sendall(b"!")
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 4)
        if not message:
            return
        own = os.getpid()
        if os.fork() == 0:
            _end_with(own)
            break
        for descriptor in descriptors:
            os.close(descriptor)
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, status = descriptors
    watcher = os.getpid()
    program = os.fork()
    if program != 0:
        for descriptor in standard:
            os.close(descriptor)
        _watch(program, status)
    _end_with(watcher)
    os.setsid()
    os.write(status, _NUMBER.pack(os.getpid()))
    os.close(status)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _run(**json.loads(message))


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _watch(program: int, status: int) -> NoReturn:
    """Waits for the end of a program, ends its children, and says how it has ended."""
    os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program, signal.SIGKILL)
    _, how = os.waitpid(program, 0)
    os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(how)))
    os._exit(0)


def _run(source: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    on_path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = ["", *filter(None, on_path)]
    sys.argv[:] = ["-c", *arguments]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does so by itself
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    exec(compile(source, "<string>", "exec"), main)
