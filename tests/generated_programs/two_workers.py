"""Runs programs under two workers, which hold the replicas of one process between them."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import traceback
from collections.abc import Sequence

from generated_programs.choices import Program
from generated_programs.comparing import Complaint, compare
from generated_programs.drawing import on_replicas
from generated_programs.running import Seen, in_double_precision, run_under

#: Seconds for the first program, and for each.
_START, _EACH = 60, 30


def complaints_under_two_workers(
    programs: Sequence[Program], devices: int
) -> dict[Program, Complaint]:
    """Compares programs under two workers with what is documented.

    Args:
        programs: The programs; they run on two times `devices` replicas.
        devices: The devices of a worker.

    Returns:
        What is wrong, by the program as it ran.
    """
    programs = [on_replicas(program, 2 * devices) for program in programs]
    found = {}
    for program, runs in zip(programs, _launched(programs, devices, False), strict=True):
        complaint = _complaint(program, runs, devices)
        if complaint is not None:
            found[program] = complaint
    return found


def _complaint(program: Program, runs: list[Seen | str], devices: int) -> Complaint | None:
    for worker, first in enumerate(runs):
        given = [first]

        def run(folder: pathlib.Path, given: list = given, worker: int = worker) -> Seen:
            # Asked again, it is for the run in double precision.
            seen = given.pop() if given else _launched([program], devices, True)[0][worker]
            if isinstance(seen, str):
                raise RuntimeError(f"Worker {worker}:\n{seen}")
            return seen

        complaint = compare(program, run)
        if complaint is not None:
            return dataclasses.replace(complaint, text=f"worker {worker}: {complaint.text}")
    return None


def _launched(programs: Sequence[Program], devices: int, is_double: bool) -> list[list[Seen | str]]:
    """Returns for each program what each worker has seen, or its traceback."""
    from warm_workers import launch

    with tempfile.TemporaryDirectory(prefix="unison-programs-") as folder:
        of_workers = launch(
            _run_all,
            2,
            args=(list(programs), folder, is_double),
            devices_per_worker=devices,
            timeout=_START + _EACH * len(programs),
            on_line=lambda worker, line: None,
        )
    return [list(runs) for runs in zip(*of_workers, strict=True)]


def _run_all(programs: Sequence[Program], folder: str, is_double: bool) -> list[Seen | str]:
    """Runs programs as a worker."""
    import unison

    strategy = unison.MultiWorkerMirroredStrategy()
    runs: list[Seen | str] = []
    for number, program in enumerate(programs):
        of_program = pathlib.Path(folder, str(number))
        of_program.mkdir(exist_ok=True)
        try:
            with in_double_precision() if is_double else contextlib.nullcontext():
                runs.append(run_under(program, strategy, of_program))
        except Exception:
            runs.append(traceback.format_exc())
    return runs
