"""Runs a Python program in several processes of one cluster on this machine."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
from typing import Any, BinaryIO

from subprocess_program import environment_of_program, kill_group
from warm_processes import WarmProcess, start_program

_PROLOGUE = """
import json, sys
import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
INDEX, COUNT, PORT = map(int, sys.argv[1:4])
jax.distributed.initialize(
    f"localhost:{PORT}", COUNT, INDEX, initialization_timeout=30, heartbeat_timeout_seconds=10
)
GIVEN = json.loads(sys.argv[4])

def report(value):
    print("REPORT", json.dumps(value), flush=True)
"""


def run_workers(
    source: str, count: int, given: Any = None, timeout: float = 60
) -> list[tuple[Any, str]]:
    """Runs `source` in `count` processes, which `jax.distributed` connects.

    The program has INDEX, COUNT, GIVEN (what is given, through JSON) and `report(value)`. All
    processes, and those that they started, are killed at the end.

    Returns:
        For every process: what it has reported, and what it has written to stderr.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = environment_of_program({"NPROC": "1"})
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as ending:
        outputs = []
        processes = []
        for index in range(count):
            files = [ending.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            process = start_program(
                _PROLOGUE + source,
                *map(str, (index, count, port)),
                json.dumps(given),
                imported=("jax", "unison"),
                server=index % 2,
                environment=environment,
                **dict(zip(("stdin", "stdout", "stderr"), files, strict=True)),
            )
            ending.callback(_end, process)
            processes.append(process)
            outputs.append(files[1:])
        for process in processes:
            process.wait(max(deadline - time.monotonic(), 0.1))
        return [_reported(*map(_read, files)) for files in outputs]


def _end(process: WarmProcess | subprocess.Popen[bytes]) -> None:
    kill_group(process.pid)
    process.wait()


def _read(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()


def _reported(stdout: str, stderr: str) -> tuple[Any, str]:
    lines = [line for line in stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, f"Expected one report. Received: {stdout}\n{stderr}"
    return json.loads(lines[0].removeprefix("REPORT ")), stderr
