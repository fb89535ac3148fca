"""Runs a Python program in several processes of one cluster on this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from typing import Any

from subprocess_program import environment_of_program, kill_group

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
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                _PROLOGUE + source,
                str(index),
                str(count),
                str(port),
                json.dumps(given),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for index in range(count)
    ]
    deadline = time.monotonic() + timeout
    try:
        outputs = [
            process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            for process in processes
        ]
    finally:
        for process in processes:
            kill_group(process.pid)
            process.wait()
    return [(_reported(stdout, stderr), stderr) for stdout, stderr in outputs]


def _reported(stdout: str, stderr: str) -> Any:
    lines = [line for line in stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, f"Expected one report. Received: {stdout}\n{stderr}"
    return json.loads(lines[0].removeprefix("REPORT "))
