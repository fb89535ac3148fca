"""Whether programs give on the devices the numbers that they give on a CPU.

The CPU's answers come from a process of their own, which runs beside that of the devices.

On GPUs float32 products are computed with TF32 unless more is asked for, so everything runs twice:

- *TF32 off* (`jax_default_matmul_precision` is "highest"): what is left is the order of sums and
  other approximations of `exp`, `log` and `tanh`: some units in the last place of float32 (6e-8),
  which a few steps of training multiply. What differs by more than `WITHOUT_TF32` is run again in
  float64 on both sides: a difference that does not vanish with the round-off is an error.
- *TF32 on* (JAX's default): the factors of products are rounded to 10 bits, a relative error of
  5e-4 in each, which averages out in long sums and grows over steps of training. An optimizer that
  divides gradients by their size (Adam, Lion) makes a step of full size of a gradient that is
  nothing but rounding, so a single program may differ by more than `WITH_TF32`: each is listed, and
  more than one in `FEW` are an error.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.gpu.answers import PARITY_PROGRAMS, SEED, parity_programs, read_seen
from benchmarks.gpu.findings import Finding, Note, Row, Setting, Wrong, environment
from benchmarks.processes import ROOT


class Tolerance(NamedTuple):
    """How far numbers may be from those of the CPU."""

    relative: float
    absolute: float


WITHOUT_TF32 = Tolerance(1e-3, 1e-4)
WITH_TF32 = Tolerance(3e-2, 1e-2)

#: The part of the programs that may differ by more with TF32, one in so many.
FEW = 10

#: The programs on logical CPU devices: as many as show that the checks work.
_PARITY_ON_CPU, _RANDOM_ON_CPU = 6, 3
_RANDOM_PROGRAMS = 60

#: The most processes that share the programs.
_MOST_PARTS = 4

#: The most replicas of a program.
_REPLICAS = 4


def parity(setting: Setting) -> Iterator[Finding]:
    """Programs of the parity set: beside the CPU's answers, and TensorFlow's."""
    from parity.recorded_answers import disagreement, expected_of, recorded

    theirs = recorded()
    replicas = min(setting.devices, _REPLICAS)
    facts = parity_programs(replicas, PARITY_PROGRAMS if setting.on_gpus else _PARITY_ON_CPU)
    ends = _ends(setting)
    with _answering("parity", len(facts), replicas, ends.last) as runs:
        reference = runs.start("reference", "cpu", ends.reference)
        for tf32, name, seconds in (("off", "TF32 off", ends.off), ("on", "TF32 on", ends.on)):
            folder = runs.wait(runs.start(tf32, setting.device, seconds, f"--tf32={tf32}"))
            if tf32 == "off":
                runs.wait(reference)
            compared, differing = 0, []
            for number, fact in enumerate(facts):
                ours, cpu = (folder / f"{number}.json"), (reference.folder / f"{number}.json")
                if not (ours.exists() and cpu.exists()):
                    continue
                compared += 1
                least = (WITHOUT_TF32 if tf32 == "off" else WITH_TF32).relative
                tolerance = max(least, fact.tolerance)
                answer = json.loads(ours.read_text())
                recorded_answer = expected_of(fact, theirs[fact.topic][fact.name])
                for what, expected in (
                    ("the CPU's", json.loads(cpu.read_text())),
                    ("TensorFlow's", recorded_answer),
                ):
                    if said := disagreement(expected, answer, tolerance):
                        differing.append(f"{fact.topic}::{fact.name}, beside {what}: {said[:300]}")
                        break
            yield from _summary("Programs of the parity set", name, tf32, compared, differing)
            if compared < len(facts):
                yield Note(
                    f"{name}: {len(facts) - compared} of {len(facts)} programs of the parity set "
                    "did not end in time, on the devices or on the CPU."
                )


def random(setting: Setting) -> Iterator[Finding]:
    """Random training programs on all devices, beside one CPU device."""
    from generated_programs.drawing import draw_program, on_replicas

    replicas = min(setting.devices, _REPLICAS)
    count = _RANDOM_PROGRAMS if setting.on_gpus else _RANDOM_ON_CPU
    programs = [on_replicas(draw_program(SEED, number), replicas) for number in range(count)]
    ends = _ends(setting)
    with _answering("random", count, replicas, ends.last) as runs:
        reference = runs.start("reference", "cpu", ends.reference, "--reference")
        for tf32, name, seconds in (("off", "TF32 off", ends.off), ("on", "TF32 on", ends.on)):
            folder = runs.wait(runs.start(tf32, setting.device, seconds, f"--tf32={tf32}"))
            if tf32 == "off":
                runs.wait(reference)
            tolerance = WITHOUT_TF32 if tf32 == "off" else WITH_TF32
            compared, found = _compared(reference.folder, folder, programs, tolerance)
            if tf32 == "off" and found:
                found = yield from _again_in_double(runs, setting, programs, found, ends.double)
            differing = [_command(number, said) for number, said in found.items()]
            yield from _summary("Random programs", name, tf32, compared, differing)


class _Ends(NamedTuple):
    """Seconds after which no further program is begun, by process; then it may end its last one."""

    reference: float
    off: float
    on: float
    double: float
    last: float


def _ends(setting: Setting) -> _Ends:
    seconds = setting.seconds
    return _Ends(0.34 * seconds, 0.34 * seconds, 0.22 * seconds, 0.08 * seconds, 0.09 * seconds)


class _Run(NamedTuple):
    """Processes that answer, and the folder that they write to."""

    processes: list[subprocess.Popen]
    folder: pathlib.Path
    ends: float


def parts_of(device: str, devices: int, cores: int) -> int:
    """Returns how many processes share the programs: compiling them is most of the work.

    Those that use several GPUs do not share them: their collectives could wait for each other.
    """
    if device == "gpu" and devices > 1:
        return 1
    return max(1, min(_MOST_PARTS, cores // 4))


class _Runs:
    """The processes of a check.

    Args:
        kind: "parity" or "random".
        count: How many programs there are.
        replicas: On how many devices they run.
        last: Seconds in which a process may end its last program.
        folder: An empty folder.
    """

    def __init__(self, kind: str, count: int, replicas: int, last: float, folder: pathlib.Path):
        self._command = [sys.executable, "-m", "benchmarks.gpu.answers", kind]
        self._options = [f"--replicas={replicas}", f"--count={count}"]
        self._devices = replicas
        self._last = last
        self._folder = folder
        self.running: list[subprocess.Popen] = []

    def start(self, name: str, device: str, seconds: float, *options: str) -> _Run:
        folder = self._folder / name
        folder.mkdir()
        command = [*self._command, str(folder), f"--device={device}", f"--seconds={seconds:.1f}"]
        variables = environment(device, self._devices)
        parts = parts_of(device, self._devices, machine.cores())
        if parts > 1:  # which share the GPU
            variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        run = _Run([], folder, time.monotonic() + seconds + self._last)
        for part in range(parts):
            process = subprocess.Popen(
                [*command, f"--part={part}/{parts}", *self._options, *options],
                cwd=ROOT,
                env=variables,
                stdout=subprocess.DEVNULL,
            )
            self.running.append(process)
            run.processes.append(process)
        return run

    def wait(self, run: _Run) -> pathlib.Path:
        """Waits until its processes have ended, or ends them; returns its folder.

        Raises:
            RuntimeError: One failed, and has said why.
        """
        for process in run.processes:
            try:
                status = process.wait(max(0.0, run.ends - time.monotonic()))
            except subprocess.TimeoutExpired:  # in a program that takes long
                process.kill()
                process.wait()
                continue
            if status:
                raise RuntimeError(f"{' '.join(map(str, process.args))} ended with {status}")
        return run.folder


@contextlib.contextmanager
def _answering(kind: str, count: int, replicas: int, last: float) -> Iterator[_Runs]:
    with tempfile.TemporaryDirectory(prefix="unison-gpu-") as folder:
        runs = _Runs(kind, count, replicas, last, pathlib.Path(folder))
        try:
            yield runs
        finally:
            for process in runs.running:
                process.kill()
                process.wait()


def _compared(
    reference: pathlib.Path, folder: pathlib.Path, programs: Sequence[Any], tolerance: Tolerance
) -> tuple[int, dict[int, str]]:
    """Returns how many programs both sides have run, and how which differ."""
    from generated_programs.comparing import TOLERANCES, difference

    compared, found = 0, {}
    for number, program in enumerate(programs):
        paths = [where / f"{number}.npz" for where in (folder, reference)]
        if not all(path.exists() for path in paths):
            continue
        (ours, failed), (theirs, theirs_failed) = map(read_seen, paths)
        if theirs_failed:  # not a program: the tests of programs say so
            continue
        compared += 1
        of_policy = TOLERANCES[program.policy]
        allowed = (max(tolerance.relative, of_policy[0]), max(tolerance.absolute, of_policy[1]))
        said = failed or difference(ours, theirs, allowed, program)
        if said:
            found[number] = said
    return compared, found


def _again_in_double(
    runs: _Runs, setting: Setting, programs: Sequence[Any], found: dict[int, str], seconds: float
) -> Generator[Finding, None, dict[int, str]]:
    """Runs programs that differ in float64, whatever their policy; returns those that still do."""
    from generated_programs.comparing import IN_DOUBLE_PRECISION, difference

    only = f"--only={','.join(map(str, found))}"
    both = [
        runs.start("reference-double", "cpu", seconds, only, "--double", "--reference"),
        runs.start("double", setting.device, seconds, only, "--double"),
    ]
    reference, ours = (runs.wait(run) for run in both)
    left = dict(found)
    for number in found:
        paths = [where / f"{number}.npz" for where in (ours, reference)]
        if not all(path.exists() for path in paths):
            yield Note(f"Random program {number} differs, and there was no time for float64.")
            continue
        (seen, failed), (expected, _) = map(read_seen, paths)
        said = failed or difference(seen, expected, IN_DOUBLE_PRECISION, programs[number])
        if said:
            left[number] = f"in float64: {said}"
        else:
            del left[number]
            yield Note(f"Random program {number}: its difference is round-off, gone in float64.")
    return left


def _command(number: int, said: str) -> str:
    return f"random program {number} of seed {SEED}: {said[-600:]}"


def _summary(
    title: str, name: str, tf32: str, compared: int, differing: Sequence[str]
) -> Iterator[Finding]:
    """Yields how many programs differ, and how.

    Raises:
        RuntimeError: None was compared.
    """
    tolerance = WITHOUT_TF32 if tf32 == "off" else WITH_TF32
    cells = {"": name, "programs": compared, "differing": len(differing)}
    yield Row(title, cells | {"relative tolerance": tolerance.relative})
    is_wrong = tf32 == "off" or len(differing) * FEW > compared
    for said in differing:
        yield Wrong(f"{name}: {said}") if is_wrong else Note(f"{name}: {said}")
    if not compared:
        raise RuntimeError(f"{title}, {name}: no program ended in time")
