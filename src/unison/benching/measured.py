"""The program of a worker of `unison bench`: it runs the user's program and records its steps.

The order is read from standard input, as JSON, and the record is sent back there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import runpy
import socket
import sys
from typing import Any


@dataclasses.dataclass(frozen=True)
class Order:
    """The program to run and measure.

    Attributes:
        script: The program's file, or a module's name.
        is_module: Which of them it is.
        arguments: The program's arguments.
        warmup: The number of steps before measuring begins.
        steps: The minimum number of steps for the pace.
        cores: On which cores; None: on all.
    """

    script: str
    is_module: bool
    arguments: list[str]
    warmup: int
    steps: int
    cores: list[int] | None

    def as_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def of(cls, said: bytes) -> Order:
        return cls(**json.loads(said))


def main() -> None:
    """Runs the program in the order from standard input, and replies there."""
    # A copy, which the program's children do not inherit; their standard input is empty.
    connection = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    connection.settimeout(None)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    with connection, connection.makefile("rb") as call:
        order = Order.of(call.read())
        if order.cores is not None:
            os.sched_setaffinity(0, order.cores)
        connection.sendall(json.dumps(_measured(order)).encode())


def _measured(order: Order) -> dict[str, Any] | None:
    """Returns the record of the program's steps; None if it has run none."""
    from unison.benching.recording import AllMeasured, Recorder
    from unison.strategies.observing import observe_steps

    recorder = Recorder(order.warmup, order.steps)
    observe_steps(recorder)
    sys.argv = [order.script, *order.arguments]
    with contextlib.suppress(AllMeasured):
        _run(order)
    observe_steps(None)
    record = recorder.record()
    return None if record is None else record.as_dict()


def _run(order: Order) -> None:
    try:
        if order.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(order.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(order.script)))
            runpy.run_path(order.script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main()
