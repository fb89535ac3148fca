"""`Sweep`: runs the program once for every point and round."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence

from unison.benching.measured import Order
from unison.benching.points import Point
from unison.benching.records import Record
from unison.runtime.cluster_resolvers.gpus import VISIBLE_GPUS, gpus_of_jax
from unison.runtime.cores import available_cores
from unison.runtime.launching import (
    Failure,
    Job,
    ProcessWorker,
    Program,
    RayNodes,
    Room,
    cluster_on_this_machine,
    worker_environments,
)

#: The program of the workers.
_MEASURED = "unison.benching.measured"
_MODELS = "unison.benching.models"

#: With fewer steps, results are meaningless.
_LEAST_STEPS = 5


class MeasurementError(RuntimeError):
    """A program that could not be measured.

    Attributes:
        exit_code: How its process ended.
        last_lines: What it has printed last.
    """

    def __init__(self, message: str, exit_code: int = 1, last_lines: Sequence[str] = ()):
        super().__init__(message)
        self.exit_code = exit_code
        self.last_lines = last_lines


@dataclasses.dataclass(frozen=True)
class Target:
    """The program to measure.

    Attributes:
        script: A file, or a module's name.
        is_module: Which of them it is.
        arguments: Its arguments, in which `{batch}`, `{examples}`, `{replicas}`, `{workers}` and
            `{devices}` stand for numbers.
        name: What it is called.
    """

    script: str
    is_module: bool
    arguments: Sequence[str]
    name: str

    @classmethod
    def model(cls, name: str) -> Target:
        """Returns one of the models in `models`."""
        arguments = [name, "--batch", "{batch}", "--examples", "{examples}"]
        return cls(_MODELS, True, arguments, name)

    @property
    def is_model(self) -> bool:
        """Whether it is one of the models in `models`."""
        return self.script == _MODELS

    def is_told(self, size: str) -> bool:
        """Whether the program has an option for a size: `batch` or `examples`."""
        return any(f"{{{size}}}" in argument for argument in self.arguments)

    def arguments_for(self, point: Point) -> list[str]:
        """Returns the arguments with the point's numbers in them."""
        numbers = {**dataclasses.asdict(point), "replicas": point.replicas}
        told = []
        for argument in self.arguments:
            for name, number in numbers.items():
                if number is not None:
                    argument = argument.replace(f"{{{name}}}", str(number))
            told.append(argument)
        return told


@dataclasses.dataclass(frozen=True)
class Place:
    """The machine, or the Ray cluster, on which workers run.

    Attributes:
        address: A Ray cluster. None: this machine.
        cpus_per_worker: The number of Ray's CPUs of each.
        gpus_per_worker: The same for GPUs.
    """

    address: str | None = None
    cpus_per_worker: int | None = None
    gpus_per_worker: int | None = None


class Sweep:
    """The runs of a program.

    On this machine, every replica has cores of its own, as many whatever their number, so that more
    replicas have more cores. Where there are fewer cores than replicas, they share all of them.

    Args:
        target: The program.
        points: The sizes.
        place: Where the workers run.
        warmup: The number of steps before measuring begins.
        steps: The minimum number of steps for the pace.
        timeout: The timeout of a run in seconds.

    Attributes:
        notes: Remarks about the measurement.
    """

    def __init__(
        self,
        target: Target,
        points: Sequence[Point],
        place: Place,
        warmup: int,
        steps: int,
        timeout: float,
    ):
        self._target = target
        self._points = points
        self._place = place
        self._warmup = warmup
        self._steps = steps
        self._timeout = timeout
        self._gpus = [] if place.address else gpus_of_jax()
        self.notes: list[str] = []
        most = max(point.replicas for point in points)
        if self._gpus and most > len(self._gpus):
            raise MeasurementError(
                f"{most} replicas need as many GPUs. There are {len(self._gpus)}. Ask for fewer, "
                "or set JAX_PLATFORMS=cpu."
            )
        #: The number of cores of a replica; None: all.
        self._cores = None
        if place.address is None and not self._gpus and hasattr(os, "sched_setaffinity"):
            self._cores = available_cores() // most or None
            if self._cores is None:
                self.notes.append(
                    f"{most} replicas share {available_cores()} cores: more of them cannot be "
                    "faster here."
                )

    def run(self, rounds: int, begun: Callable[[int, Point], None]) -> dict[Point, list[Record]]:
        """Measures all points in turn, several times.

        Args:
            rounds: The number of rounds.
            begun: Called with the round's number and the point before each run.

        Raises:
            MeasurementError: A run has failed.
            UnavailableError: The Ray cluster cannot be reached, or has no room.
            ImportError: Ray is not installed, and there is an address.
        """
        found: dict[Point, list[Record]] = {point: [] for point in self._points}
        for number in range(rounds):
            for point in self._points:
                begun(number, point)
                found[point].append(self._measure(point))
        return found

    def _measure(self, point: Point) -> Record:
        with self._programs(point) as (programs, start), Job(programs, start=start) as job:
            try:
                failure = job.wait(self._timeout)
            except TimeoutError as error:
                raise MeasurementError(
                    f"{self._target.name} with {point}: {error} Give a larger --timeout, or fewer "
                    "--steps.",
                    exit_code=124,
                ) from error
            if failure is not None:
                raise self._failed(point, failure)
            said = [json.loads(result) for result in job.results() if result]
        return self._checked(point, [Record.of(each) for each in said if each is not None])

    def _failed(self, point: Point, failure: Failure) -> MeasurementError:
        message = f"{self._target.name} with {point}: {failure}"
        return MeasurementError(message, failure.exit_code, failure.last_lines)

    def _checked(self, point: Point, records: Sequence[Record]) -> Record:
        about = f"{self._target.name} with {point}"
        if len(records) < point.workers:
            raise MeasurementError(
                f"{about} ended without a step. Steps are those of Keras' fit for a model that was "
                "made in a strategy's scope, and the calls of strategy.run."
            )
        first = records[0]
        if first.replicas != point.replicas:
            raise MeasurementError(
                f"{about}: expected {point.replicas} replicas. Received: {first.replicas}. Let the "
                "program make its strategy on all devices that there are, and one for several "
                "workers where there are several."
            )
        if first.paced_steps < _LEAST_STEPS:
            raise MeasurementError(
                f"{about} ended after {first.steps} steps, of which {self._warmup} warm it up and "
                f"at least {_LEAST_STEPS} must follow. Let it train longer, or give fewer --warmup."
            )
        return dataclasses.replace(
            first,
            # The measurement of the worker that starts a step last: the others may have waited for
            # it because its input was late.
            single=[*map(min, zip(*(record.single for record in records), strict=False))],
            memory=_largest([record.memory for record in records]),
            device_memory=_largest([record.device_memory for record in records]),
        )

    @contextlib.contextmanager
    def _programs(self, point: Point) -> Iterator[tuple[list[Program], Callable]]:
        script = self._target.script
        if self._place.address is None:
            cluster = cluster_on_this_machine(point.workers)
            cores = None if self._cores is None else self._cores * point.devices
            yield self._of(point, script, worker_environments(cluster, None, cores)), ProcessWorker
            return
        folder = None if self._target.is_model else os.getcwd()  # what is sent there
        if not self._target.is_module:
            folder, script = os.path.split(os.path.abspath(script))
        room = Room(point.workers, self._place.cpus_per_worker, self._place.gpus_per_worker)
        with RayNodes(self._place.address, room, folder) as nodes:
            environments = worker_environments(nodes.cluster, point.devices, nodes.cores)
            yield self._of(point, script, environments), nodes.start

    def _of(
        self, point: Point, script: str, environments: Sequence[dict[str, str]]
    ) -> list[Program]:
        programs = []
        for worker, environment in enumerate(environments):
            order = Order(
                script,
                self._target.is_module,
                self._target.arguments_for(point),
                self._warmup,
                self._steps,
                self._own_cores(point, worker),
            )
            own = {**environment, **self._own_devices(point, worker)}
            programs.append(Program(["-u", "-m", _MEASURED], own, order.as_bytes()))
        return programs

    def _own_cores(self, point: Point, worker: int) -> list[int] | None:
        if self._cores is None:
            return None
        count = self._cores * point.devices
        return sorted(os.sched_getaffinity(0))[worker * count : (worker + 1) * count]

    def _own_devices(self, point: Point, worker: int) -> dict[str, str]:
        if self._place.address is not None:
            return {}
        if self._gpus:
            own = self._gpus[worker * point.devices : (worker + 1) * point.devices]
            return {VISIBLE_GPUS: ",".join(own)}
        return {"UNISON_CPU_DEVICES": str(point.devices)}


def _largest(sizes: Sequence[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
