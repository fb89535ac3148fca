"""`fit` and `run` beside plain JAX, Keras on JAX and PyTorch; what input and processes cost.

The contests are those of `benchmarks`, with fewer rounds: contestants take turns, each in a process
of its own.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.contestants import ENTRIES
from benchmarks.driver import Limits, Result, measure
from benchmarks.gpu.findings import Finding, Note, Row, Setting, Value, Wrong
from benchmarks.protocol import Round
from benchmarks.tables import OURS
from benchmarks.workloads import (
    CheckpointWork,
    FitWork,
    InputWork,
    RunWork,
    TrainingWork,
    Work,
)
from unison.train.orbax_format import is_orbax_installed

_ROUNDS = 5
_ROUNDS_ON_CPU = 1

#: The global batches and steps a round.
_FIT = {"mlp": (256, 400), "cnn": (256, 400), "wide_mlp": (256, 200), "gpt": (32, 20)}
_FIT_ON_CPU = {"mlp": (64, 8), "cnn": (16, 2), "gpt": (8, 2)}

#: Steps of several processes begin with the same parameters, and see the same batches: the norm of
#: the parameters agrees but for the order of sums, and TF32.
_NORMS_DIFFER = 2e-3

#: The ways to save, by the contestants' names.
_SAVING = {
    "unison": "asynchronous",
    "unison at once": "at once",
    "unison in parts": "asynchronous, in Orbax's format",
}

#: Of a check's time; the rest is for processes to end.
_PART_FOR_ROUNDS = 0.9

_MEBIBYTE = 2**20


def mlp(setting: Setting) -> Iterator[Finding]:
    return _fit(setting, "mlp")


def cnn(setting: Setting) -> Iterator[Finding]:
    return _fit(setting, "cnn")


def gpt(setting: Setting) -> Iterator[Finding]:
    """GPT-2's smallest network in bfloat16, with random tokens."""
    return _fit(setting, "gpt")


def memory(setting: Setting) -> Iterator[Finding]:
    """A model whose state outweighs all the rest; on CPUs, which have other memory, a small one."""
    return _fit(setting, "wide_mlp" if setting.on_gpus else "mlp", ("unison", "hand"))


def run(setting: Setting) -> Iterator[Finding]:
    """`strategy.run` of a function that adds to variables."""
    for variables in (1, 20):
        work = RunWork(variables, 0.7 if setting.on_gpus else 0.1, setting.device)
        result = _measured(setting, work, ("unison", "hand"), part=1 / 2)
        yield from _speed(result, "run: microseconds a call")


def prefetch(setting: Setting) -> Iterator[Finding]:
    """What a dataset's `prefetch` changes: beside training from a batch that is there already."""
    batch, steps = (256, 40) if setting.on_gpus else (16, 2)
    for way in ("fit", "run"):
        for prefetches in (False, True):
            work = InputWork(way, setting.devices, batch, steps, setting.device, prefetches)
            result = _measured(setting, work, ("unison",), part=1 / 4)
            yield from _failures(result)
            if not (rounds := result.rounds.get(OURS)):
                continue
            facts = rounds[-1].facts
            cells: dict[str, Value] = {"": way, "prefetch": prefetches}
            cells["us a step"] = _median(rounds)
            cells["us a step without input"] = facts["without"]
            cells["input adds %"] = facts["added %"]
            yield Row("The input's prefetch: the CNN from a dataset", cells)


def processes(setting: Setting) -> Iterator[Finding]:
    """Several processes of one device each, beside one."""
    batch, steps = (256, 200) if setting.on_gpus else (64, 4)
    norms: dict[str, float] = {}
    for count in (1, min(setting.devices, 4)):
        work = TrainingWork("workers", "mlp", count, batch, steps, device=setting.device)
        families = ("unison", "hand", "torch")
        result = _measured(setting, work, families, without=("unison tuned",), part=1 / 2)
        yield from _speed(result, "Several processes: steps a second")
        for name, rounds in result.rounds.items():
            if rounds:
                norms[f"{name}, {work.processes} processes"] = rounds[0].facts["norm"]
    if norms:
        expected = statistics.median(norms.values())
        for name, norm in norms.items():
            if not math.isclose(norm, expected, rel_tol=_NORMS_DIFFER):
                yield Wrong(
                    f"{name}: expected parameters of norm {expected:.6g}, as the others have after "
                    f"as many steps. Received: {norm:.6g}"
                )


def checkpoint_time(setting: Setting) -> Iterator[Finding]:
    """What saving a state that is on a device costs the steps around it."""
    with tempfile.TemporaryDirectory(prefix="unison-gpu-") as folder:
        for megabytes in (100, 1000) if setting.on_gpus else (1,):
            work = CheckpointWork(megabytes, folder, setting.device)
            without = () if is_orbax_installed() else ("unison in parts",)
            result = _measured(setting, work, ("unison",), without, part=1 / 2)
            yield from _failures(result)
            for name, rounds in result.rounds.items():
                if not rounds:
                    continue
                cells: dict[str, Value] = {"": _SAVING[name], "MB": megabytes}
                cells["ms stalled"] = _median(rounds)
                cells["written after ms"] = rounds[-1].facts["in ms"]
                yield Row("Checkpoint: what steps wait for", cells)


def _fit(
    setting: Setting, model: str, families: Sequence[str] = ("unison", "hand", "keras", "torch")
) -> Iterator[Finding]:
    batch, steps = (_FIT if setting.on_gpus else _FIT_ON_CPU)[model]
    # Divisible by all devices.
    batch = math.ceil(batch / setting.devices) * setting.devices
    work = FitWork(model, batch, steps, device=setting.device)
    if "torch" in families and setting.on_gpus and setting.devices > 1:
        families = [family for family in families if family != "torch"]
        yield Note(
            "PyTorch is left out of `fit` on several GPUs: there it needs as many processes."
        )
    result = _measured(setting, work, families)
    yield from _speed(result, "fit: steps a second")
    for name, rounds in result.rounds.items():
        for done in rounds:
            if not math.isfinite(done.facts["loss"]):
                yield Wrong(f"{work.name}, {name}: the loss is {done.facts['loss']}")


def _measured(
    setting: Setting,
    work: Work,
    families: Sequence[str],
    without: Sequence[str] = (),
    part: float = 1.0,
) -> Result:
    """Measures a workload in a part of the check's time, with as many rounds as that allows."""
    pythons = {family: python for family in families if (python := _python(setting, family))}
    entries = [
        (entry, pythons[entry.family])
        for entry in ENTRIES
        if entry.family in pythons and entry.takes_part_in(work) and entry.name not in without
    ]
    rounds = _ROUNDS if setting.on_gpus else _ROUNDS_ON_CPU
    seconds = setting.seconds
    limits = Limits(start=seconds, round=seconds, all=_PART_FOR_ROUNDS * part * seconds)
    return measure(work, entries, rounds, limits, _say)


def _python(setting: Setting, family: str) -> str | None:
    if family != "torch":
        return sys.executable
    if setting.torch_python or importlib.util.find_spec("torch") is None:
        return setting.torch_python
    return sys.executable


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _speed(result: Result, table: str) -> Iterator[Finding]:
    """Yields a row a contestant, and what failed."""
    work = result.work
    plain = [_seconds_a_step(work, done) for done in result.rounds.get("hand", [])]
    for name, rounds in result.rounds.items():
        if not rounds:
            continue
        seconds = [_seconds_a_step(work, done) for done in rounds]
        cells: dict[str, Value] = {"": f"{work.name}: {name}"}
        if isinstance(work, RunWork):
            cells["us a call"] = 1e6 * statistics.median(seconds)
        else:
            cells["steps/s"] = 1 / statistics.median(seconds)
            cells["min"], cells["max"] = 1 / max(seconds), 1 / min(seconds)
        if plain and name != "hand":
            beyond = [own - its for own, its in zip(seconds, plain, strict=False)]
            cells["us beyond plain JAX"] = 1e6 * statistics.median(beyond)
        facts: dict[str, Any] = rounds[-1].facts
        if "device_peak_bytes" in facts:
            cells["device MiB"] = facts["device_peak_bytes"] / _MEBIBYTE
        if "state_bytes" in facts:
            cells["state MiB"] = facts["state_bytes"] / _MEBIBYTE
        cells["host MiB"] = rounds[-1].peak_rss / _MEBIBYTE
        yield Row(table, cells)
    yield from _failures(result)


def _failures(result: Result) -> Iterator[Finding]:
    """Yields who has failed.

    Raises:
        RuntimeError: Unison has.
    """
    for name, reason in result.failures.items():
        yield Note(f"{result.work.name}: {name} has no result: {reason}")
    if ours := [name for name in result.failures if name.split()[0] == OURS]:
        raise RuntimeError(f"{result.work.name}: {', '.join(ours)}: no result")


def _seconds_a_step(work: Work, done: Round) -> float:
    if isinstance(work, FitWork):
        return work.batch / done.value
    return 1 / done.value if work.higher_is_better else done.value / 1e6


def _median(rounds: Sequence[Round]) -> float:
    return statistics.median(done.value for done in rounds)
