"""How well `unison plan` foretells this machine: `python -m benchmarks.planned`.

Measures what the machine can do (`unison plan --calibrate`), plans the training of the models that
`weak_scaling` trains for 1 to 8 processes, trains them, and compares; with `--links` also for
2 to 8 hosts that links of limited speed join (only root can make them).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import machine, namespaces, workloads
from benchmarks.contestants import ENTRIES
from benchmarks.driver import Limits, measure
from benchmarks.namespaces import THIS_MACHINE
from benchmarks.workloads import TrainingWork
from unison.planning import (
    Calibration,
    StepPlan,
    StepTime,
    calibrate,
    cluster_named,
    plan_fit,
    read_calibration,
    step_time,
    target,
)

_PROCESSES = 8
_BATCH_OF_PROCESS = 128
_MEGABITS = (1000, 100)
_HOSTS = (2, 4, 8)
_ROUND_SECONDS = 1.5
#: What is stated of a link of 1000 Mbit/s; others carry in proportion.
_GIGABIT = "ethernet-1g-tcp"


class Compared(NamedTuple):
    """A training that was planned and measured.

    Attributes:
        name: Which one.
        planned: Seconds a step.
        measured: Likewise.
    """

    name: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, metavar="N", help="rounds of each training (%(default)s)")
    add("--model", choices=tuple(workloads.WIDTHS), help="only this model (default: all)")
    add("--links", action="store_true", help="hosts over slow links as well; needs root")
    add("--calibration", metavar="PATH", help="what `unison plan --calibrate` wrote")
    add("--json", type=pathlib.Path, metavar="PATH", help="write everything there")
    add("--quick", action="store_true", help="two steps a round: shows that all works, no more")
    options = parser.parse_args(arguments)
    if options.links and (reason := namespaces.what_is_missing()):
        parser.error(f"--links needs network namespaces, and {reason}.")
    measured = read_calibration(options.calibration) if options.calibration else calibrate()
    print(
        f"{machine.description()['cpu']}: {measured.device.flops / 1e9:.0f} GFLOP/s and "
        f"{measured.device.memory_rate / 1e9:.1f} GB/s a core, {measured.cores} cores; "
        + " and ".join(
            f"{link.latency * 1e6:.1f} us and {link.rate / 1e9:.2f} GB/s between {those}"
            for link, those in (
                (measured.link, "processes"),
                (measured.shared_link, "those that take turns"),
            )
        )
    )
    compared = []
    for model in workloads.WIDTHS:
        if options.model in (None, model):
            for one in _compared(model, measured, options):
                print(
                    f"{one.name:50} planned {one.planned * 1e3:9.2f} ms, measured "
                    f"{one.measured * 1e3:9.2f} ms ({one.error:+.0%})",
                    flush=True,
                )
                compared.append(one)
    within = sum(abs(one.error) <= 0.2 for one in compared)
    print(f"{within} of {len(compared)} within 20 %")
    if options.json:
        told = [one._asdict() | {"error": one.error} for one in compared]
        options.json.write_text(json.dumps({"machine": machine.description(), "compared": told}))
    return 0


def _compared(model: str, measured: Calibration, options: argparse.Namespace) -> Iterator[Compared]:
    plan = _plan(model, measured)
    for planned in plan.scaling()[: 2 if options.quick else None]:
        work = _work("weak_scaling", model, planned, options.quick)
        yield Compared(work.name, planned.seconds, _seconds(work, options.rounds))
    for megabits in _MEGABITS if options.links else ():
        shaped = namespaces.Link(megabits)
        for count in _HOSTS[: 1 if options.quick else None]:
            cluster = cluster_named(f"cpu:{count}x1", _GIGABIT, measured)
            link = cluster.network
            cluster = cluster._replace(network=link._replace(rate=link.rate * megabits / 1000))
            workload = plan.workload_on(cluster)
            # Hosts of this machine share its cores.
            seconds = workload.seconds * max(1.0, count / measured.cores)
            planned = step_time(workload._replace(seconds=seconds), cluster)
            work = _work("network", model, planned, options.quick, str(shaped))
            with namespaces.hosts(count, shaped) as hosts:
                yield Compared(work.name, planned.seconds, _seconds(work, options.rounds, hosts))


def _plan(model: str, measured: Calibration) -> StepPlan:
    """Plans the training for the most processes, and so for fewer."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import jax
    import keras

    import unison
    from benchmarks.contestants.training_keras import model_of, optimizer

    batch = _PROCESSES * _BATCH_OF_PROCESS
    with target(f"cpu:{_PROCESSES}", calibration=measured):
        strategy = unison.MirroredStrategy()
        with strategy.scope():
            trained = model_of(TrainingWork("weak_scaling", model, _PROCESSES, batch, steps=1))
            trained.compile(
                optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            )
        images = jax.ShapeDtypeStruct((batch, workloads.WIDTHS[model][0]), "float32")
        return plan_fit(trained, images, jax.ShapeDtypeStruct((batch,), "int32"))


def _work(task: str, model: str, planned: StepTime, quick: bool, link: str = "") -> TrainingWork:
    """Returns a training whose rounds take about as long as `_ROUND_SECONDS`."""
    steps = 2 if quick else max(2, round(_ROUND_SECONDS / planned.seconds))
    count = planned.devices
    return TrainingWork(task, model, count, count * _BATCH_OF_PROCESS, steps, link)


def _seconds(work: TrainingWork, rounds: int, hosts: list[namespaces.Host] | None = None) -> float:
    """Returns what a step of Unison's custom loop takes: the median of the rounds."""
    [entry] = [entry for entry in ENTRIES if entry.name == "unison" and entry.takes_part_in(work)]
    result = measure(
        work,
        [(entry, sys.executable)],
        rounds,
        Limits(),
        lambda line: None,
        hosts or [THIS_MACHINE],
    )
    if result.failures:
        raise RuntimeError(f"{work.name} ended with {result.failures}")
    return 1 / statistics.median(done.value for done in result.rounds[entry.name])


if __name__ == "__main__":
    sys.exit(main())
