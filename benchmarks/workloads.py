"""What is measured: the workloads, and the numbers of steps that make a round of 1 to 2 seconds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.namespaces import Link

#: Replicas of every workload on logical CPU devices but those of aggregation.
REPLICAS = 2

#: Where replicas compute: on logical CPU devices, or on all GPUs.
DEVICES = ("cpu", "gpu")

#: Steps a round for a model and a global batch; other batches take the steps of the nearest.
_STEPS = {
    "mlp": {64: 300, 256: 160, 1024: 58},
    "cnn": {64: 20, 256: 6, 1024: 2},
}
_MEMORY_STEPS = 8

#: The same for training with several processes.
_TRAINING_STEPS = {
    "mlp": {64: 400, 256: 200, 1024: 60},
    "large_mlp": {64: 24, 256: 16, 1024: 6},
}

#: The widths of the layers of the models that several processes train: dense, with ReLU between.
WIDTHS = {"mlp": (784, 512, 10), "large_mlp": (784, 2048, 2048, 10)}


class GPTSize(NamedTuple):
    """The size of a GPT.

    Attributes:
        layers: The number of blocks.
        width: That of a token's values.
        heads: That of attention heads.
        length: That of tokens in an example.
        words: That of different tokens.
    """

    layers: int
    width: int
    heads: int
    length: int
    words: int


#: The GPTs that `fit` trains, by device: on GPUs GPT-2's smallest, in bfloat16.
GPT_SIZES = {"gpu": GPTSize(12, 768, 12, 512, 32768), "cpu": GPTSize(2, 128, 4, 64, 512)}

#: The policy of their dtypes on GPUs, and what their normalization adds to a variance.
GPT_POLICY = "mixed_bfloat16"
GPT_EPSILON = 1e-5


class GraphSize(NamedTuple):
    """The numbers of nodes, of features of each, and of edges of a graph."""

    nodes: int
    features: int
    edges: int


#: The examples of the other networks that `fit` trains: images, time steps with features, graphs.
IMAGE_SHAPE = (32, 32, 3)
SEQUENCE_SHAPE = (64, 32)
GRAPH = GraphSize(32, 16, 96)
CLASSES = 10
ROWS_OF_EMBEDDING = 50_000

#: The networks of today, the batch of each, and the steps of a round.
ARCHITECTURES = {
    "gpt": (16, 24),
    "resnet": (32, 20),
    "lstm": (64, 24),
    "gru": (64, 24),
    "recommender": (256, 160),
    "unet": (16, 12),
    "graph": (64, 60),
}

#: The processes, and the batch of each, of weak scaling.
_SCALES = (1, 2, 4, 8)
_BATCH_OF_PROCESS = 128

#: Local training exchanges only every so many steps.
_LEAST_COMPRESSED_STEPS = 8

#: How long a round over a slow link takes.
_ROUND_SECONDS = 3

#: What is summed over the processes, in KiB, and how often in a round.
_REDUCTIONS = {4: 2000, 64: 1000, 1024: 120, 16 * 1024: 10, 64 * 1024: 3}
_SCALING_KIBIBYTES = (4, 64, 1024, 16 * 1024)

#: The sizes of states that are saved.
_MEGABYTES_SAVED = (1, 100, 1000)

#: What is trained on parameter servers: load, batch, and steps of a round.
_SERVER_LOADS = (("mlp", 64, 300), ("mlp", 256, 150), ("embedding", 64, 150))

#: How many servers, and workers, there are where these scale.
SERVERS_SCALED = (1, 2, 4)
WORKERS_SCALED = (1, 2, 4, 8)
#: What is trained there, and beside it, for the model of costs: load, batch, and steps of a round.
_SCALED_LOAD = ("mlp", 64, 200)
_LOADS_BESIDE = (("mlp", 256, 60), ("narrow_mlp", 64, 300), ("wide_mlp", 64, 50))

#: The arrays that input services send: KiB, and how many in a round.
_ARRAYS_SERVED = ((4, 4000), (64, 2000), (1024, 400))

#: The seconds that a job trains before one of its workers is killed. Standbys are ready then.
_SECONDS_BEFORE_LOSS = 40.0

#: How long a round of reading a dataset begins passes.
_SECONDS = 0.3


class _Size(NamedTuple):
    examples: int
    batch: int


#: What is read, and how much of it in a pass.
DATA_TASKS = {
    "arrays": _Size(60_000, 256),
    "map": _Size(20_000, 256),
    "map_batches": _Size(20_000, 256),
    "records": _Size(20_000, 256),
    "records_batched": _Size(20_000, 256),
    "jpeg": _Size(1024, 32),
    "jpeg_resized": _Size(512, 32),
    "augment": _Size(10_000, 256),
    "generator": _Size(20_000, 256),
    "lines": _Size(100_000, 256),
    "padded_batch": _Size(20_000, 64),
    "bucketing": _Size(20_000, 64),
}

#: The name, among those of the tasks, of the workloads `InputWork`.
INPUT_TASK = "input"
TASKS = (*DATA_TASKS, INPUT_TASK)


@dataclasses.dataclass(frozen=True)
class FitWork:
    """Training with shuffled epochs; a round is one epoch.

    Attributes:
        model: A key of `keras_models.MODELS`, or `gpt`.
        batch: The global batch.
        steps: The number of steps of an epoch.
        verbose: As for Keras' `fit`; standard output leads to /dev/null.
        data: The path of a file in the format of Keras' `mnist.npz`; None for synthetic images.
        weighs: Whether contestants look at the live arrays between the steps.
        device: Of `DEVICES`.
    """

    model: str
    batch: int
    steps: int
    verbose: int = 0
    data: str | None = None
    weighs: bool = False
    device: str = "cpu"

    unit = "examples/s"
    higher_is_better = True
    processes = 1

    @property
    def name(self) -> str:
        task = "memory" if self.weighs else "fit"
        return f"{task} {self.model}, batch {self.batch}{_where(self.device)}"

    @property
    def examples(self) -> int:
        return self.batch * self.steps


@dataclasses.dataclass(frozen=True)
class RunWork:
    """`strategy.run` of a function that adds a replica's value to variables (aggregation SUM).

    Attributes:
        variables: How many scalar variables the function updates.
        seconds: How long a round calls it.
        device: Of `DEVICES`.
    """

    variables: int
    seconds: float
    device: str = "cpu"

    unit = "us/call"
    higher_is_better = False
    processes = 1

    @property
    def name(self) -> str:
        variables = "1 variable" if self.variables == 1 else f"{self.variables} variables"
        return f"run, {variables}{_where(self.device)}"


@dataclasses.dataclass(frozen=True)
class AggregationWork:
    """Summing gradients over the replicas, and updating weights by the sums.

    Attributes:
        processes: How many processes the replicas are in.
        devices: Logical CPU devices of each, a replica on each.
        tensors: How many gradients there are.
        kibibytes: The size of each.
        steps: How many steps a round has.
    """

    processes: int
    devices: int
    tensors: int
    kibibytes: int
    steps: int

    unit = "us/step"
    higher_is_better = False

    @property
    def name(self) -> str:
        where = f"{self.devices} replicas"
        if self.processes > 1:
            where = f"{self.processes} processes of {self.devices}"
        return f"aggregation, {where}, {self.tensors} x {self.kibibytes} KiB"

    @property
    def replicas(self) -> int:
        return self.processes * self.devices


@dataclasses.dataclass(frozen=True)
class DataWork:
    """Reading a dataset; a round is as many passes as begin in `seconds`.

    Attributes:
        task: A key of `DATA_TASKS`.
        examples: How many a pass has.
        batch: How many a batch has.
        seconds: How long a round begins passes.
        folder: Where the files are.
    """

    task: str
    examples: int
    batch: int
    seconds: float
    folder: str

    unit = "examples/s"
    higher_is_better = True
    processes = 1

    @property
    def name(self) -> str:
        return f"data, {self.task.replace('_', ' ')}, batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class InputWork:
    """Training from a dataset, beside training from a batch that is on the devices already.

    Attributes:
        way: `fit`, or `run`: a loop around `strategy.run`.
        replicas: How many devices; on GPUs, those that are visible.
        batch: The global batch.
        steps: The number of steps between two looks at the clock.
        device: Of `DEVICES`.
        prefetches: Whether the dataset ends with `prefetch`.
    """

    way: str
    replicas: int
    batch: int
    steps: int
    device: str = "cpu"
    prefetches: bool = True

    unit = "us/step"
    higher_is_better = False
    processes = 1

    @property
    def name(self) -> str:
        replicas = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        how = "" if self.prefetches else ", without prefetch"
        return f"input of {self.way}, CNN, {replicas}, batch {self.batch}{how}{_where(self.device)}"


@dataclasses.dataclass(frozen=True)
class TrainingWork:
    """Training with Adam in several processes; a round passes over the examples once, in order.

    All begin with the same parameters and see the same batches, so that all are to end with the
    same.

    Attributes:
        task: `workers`, `weak_scaling`, `network`, `compression` or `protection`: it says who takes
            part.
        model: A key of `training_examples.WIDTHS`.
        processes: How many there are, of one replica each.
        batch: The global batch.
        steps: How many steps a round has.
        link: How the processes are linked, in words; none for those of this machine.
        device: Of `DEVICES`; each process has a GPU of its own.
    """

    task: str
    model: str
    processes: int
    batch: int
    steps: int
    link: str = ""
    device: str = "cpu"

    unit = "steps/s"
    higher_is_better = True

    @property
    def name(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        parts = [self.task.replace("_", " "), self.model, processes, f"batch {self.batch}"]
        return ", ".join([*parts, self.link] if self.link else parts) + _where(self.device)


@dataclasses.dataclass(frozen=True)
class ImageInputWork:
    """Training on JPEG images that are decoded and augmented, in processes of one core each.

    A round passes over the images once, in a random order, and trains a model that is small beside
    its input.

    Attributes:
        processes: How many there are, of one replica each.
        batch: The global batch.
        images: How many there are.
    """

    processes: int
    batch: int
    images: int

    unit = "images/s"
    higher_is_better = True

    @property
    def name(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return f"image input, {processes}, batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class DividedWork:
    """Training a GPT whose parameters and optimizer state the processes divide, as FSDP does.

    Attributes:
        size: That of the GPT.
        processes: How many there are, of one replica each.
        batch: The global batch.
        steps: How many steps a round has.
    """

    size: GPTSize
    processes: int
    batch: int
    steps: int

    unit = "steps/s"
    higher_is_better = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", GPTSize(*self.size))  # a list, when read from JSON

    @property
    def name(self) -> str:
        blocks = f"{self.size.layers} blocks of {self.size.width}"
        return f"fsdp, GPT of {blocks}, {self.processes} processes, batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class AllReduceWork:
    """The sum over several processes of an array of float32 that each has already.

    Attributes:
        task: `all_reduce` or `weak_scaling`: it says who takes part.
        processes: How many there are.
        kibibytes: The size of the array.
        calls: How many sums a round has.
    """

    task: str
    processes: int
    kibibytes: int
    calls: int

    unit = "us/call"
    higher_is_better = False

    @property
    def name(self) -> str:
        return f"all_reduce, {self.processes} processes, {self.kibibytes} KiB"


@dataclasses.dataclass(frozen=True)
class SharesWork:
    """Training with two workers, of which one computes each example several times.

    Attributes:
        batch: The global batch.
        steps: How many steps a round has.
        slowness: How often the slow worker computes an example.
    """

    batch: int
    steps: int
    slowness: int

    unit = "ms/step"
    higher_is_better = False
    processes = REPLICAS

    @property
    def name(self) -> str:
        return f"shares, batch {self.batch}, one worker {self.slowness} times as slow"


@dataclasses.dataclass(frozen=True)
class CheckpointWork:
    """Saving the state of a training between its steps.

    Attributes:
        megabytes: The size of the state, in 10^6 bytes.
        folder: Where it is written.
        device: Of `DEVICES`: where the state is.
    """

    megabytes: int
    folder: str
    device: str = "cpu"

    unit = "ms stalled"
    higher_is_better = False
    processes = 1

    @property
    def name(self) -> str:
        return f"checkpoint of {self.megabytes} MB{_where(self.device)}"


@dataclasses.dataclass(frozen=True)
class RecoveryWork:
    """Training of which one worker is killed; a round is a job, until all workers train again.

    Attributes:
        workers: How many there are, of one replica each.
        seconds_before: How long they train before.
        model: A key of `WIDTHS`.
        batch: The global batch.
        checkpoint_every: After how many steps those save who go on from a checkpoint.
        steps_after_checkpoint: How many steps a worker has done since when it is killed.
        lost_worker: Which one is killed.
        seconds: How long a job may take.
        megabytes: Further state, that steps do not use.
    """

    workers: int
    seconds_before: float
    model: str = "mlp"
    batch: int = 96
    checkpoint_every: int = 10
    steps_after_checkpoint: int = 7
    lost_worker: int = 1
    seconds: float = 150.0
    megabytes: int = 0

    unit = "ms to next step"
    higher_is_better = False
    processes = 1

    @property
    def task(self) -> str:
        return "large" if self.megabytes else "small"

    @property
    def name(self) -> str:
        further = f" and {self.megabytes} MB" if self.megabytes else ""
        return f"recovery of {self.model}{further}, {self.workers} workers of which one is killed"


@dataclasses.dataclass(frozen=True)
class ServerWork:
    """Training on parameter servers: scheduled steps, each on a worker that has time.

    Attributes:
        load: A key of `server_loads.LOADS`.
        batch: The batch of a step.
        workers: How many workers there are.
        servers: How many servers.
        steps: How many steps a round has.
        task: `parameter_servers` or `scaling`: it says who takes part.
    """

    load: str
    batch: int
    workers: int
    servers: int
    steps: int
    task: str = "parameter_servers"

    unit = "steps/s"
    higher_is_better = True
    processes = 1

    @property
    def name(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        servers = "1 server" if self.servers == 1 else f"{self.servers} servers"
        return (
            f"{self.task.replace('_', ' ')}, {self.load}, {workers}, {servers}, batch {self.batch}"
        )


@dataclasses.dataclass(frozen=True)
class ServiceWork:
    """Reading what the processes of an input service compute; a round is a number of elements.

    Attributes:
        load: `arrays`: the same random bytes again and again; `jpeg`: batches of decoded images.
        kibibytes: The size of an array.
        examples: How many a round has: arrays, or images.
        workers: The number of workers.
    """

    load: str
    kibibytes: int
    examples: int
    workers: int
    task: str = "data_service"

    unit = "examples/s"
    higher_is_better = True
    processes = 1

    @property
    def name(self) -> str:
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        what = f"arrays of {self.kibibytes} KiB" if self.load == "arrays" else "JPEG, batch 32"
        return f"input service, {what}, {workers}"


Work = (
    FitWork
    | RunWork
    | AggregationWork
    | DataWork
    | InputWork
    | TrainingWork
    | ImageInputWork
    | DividedWork
    | AllReduceWork
    | SharesWork
    | CheckpointWork
    | RecoveryWork
    | ServerWork
    | ServiceWork
)


def fit_workloads(
    models: Iterable[str],
    batches: Iterable[int],
    data: str | None,
    verbose: int,
    device: str,
    quick: bool,
) -> list[Work]:
    return [
        FitWork(model, batch, 2 if quick else _steps(model, batch), verbose, data, device=device)
        for model in models
        for batch in batches
    ]


def architecture_workloads(names: Iterable[str], device: str, quick: bool) -> list[Work]:
    """Networks of today, each with a batch of its kind."""
    sizes = {name: ARCHITECTURES[name] for name in names}
    return [
        FitWork(name, batch, 2 if quick else steps, device=device)
        for name, (batch, steps) in sizes.items()
    ]


def run_workloads(device: str, quick: bool) -> list[Work]:
    return [RunWork(count, 0.05 if quick else 0.7, device) for count in (1, 20)]


def memory_workloads(data: str | None, device: str, quick: bool) -> list[Work]:
    """A model whose parameters (80 MB) and optimizer state outweigh all the rest."""
    if quick:
        return [FitWork("mlp", 64, 2, data=data, weighs=True, device=device)]
    return [FitWork("wide_mlp", 256, _MEMORY_STEPS, data=data, weighs=True, device=device)]


def aggregation_workloads(quick: bool) -> list[Work]:
    """Many small gradients, as many larger ones, and a few very large ones."""
    if quick:
        return [AggregationWork(1, 2, 20, 2, 2), AggregationWork(2, 1, 20, 2, 2)]
    return [
        AggregationWork(processes, devices, tensors, kibibytes, steps)
        for processes, devices in ((1, 2), (1, 4), (1, 8), (2, 1), (2, 2))
        for tensors, kibibytes, steps in ((20, 2, 300), (40, 100, 60), (8, 4096, 6))
    ]


def data_workloads(tasks: Iterable[str], folder: str, quick: bool) -> list[Work]:
    works: list[Work] = []
    for task in tasks:
        if task == INPUT_TASK:
            works += _input_workloads(quick)
        else:
            size = DATA_TASKS[task]
            count = 2 * size.batch + 1 if quick else size.examples
            works.append(DataWork(task, count, size.batch, 0.0 if quick else _SECONDS, folder))
    return works


def _input_workloads(quick: bool) -> list[Work]:
    if quick:
        return [InputWork("fit", 1, 8, 2), InputWork("run", 2, 8, 2)]
    return [InputWork(way, replicas, 256, 10) for way in ("fit", "run") for replicas in (1, 2)]


def shares_workloads(quick: bool) -> list[Work]:
    # A measurement comes after some steps.
    return [SharesWork(16, 6, 3)] if quick else [SharesWork(256, 12, factor) for factor in (2, 4)]


def checkpoint_workloads(folder: str, quick: bool) -> list[Work]:
    return [CheckpointWork(size, folder) for size in ((1,) if quick else _MEGABYTES_SAVED)]


def recovery_workloads(models: Iterable[str], batches: Iterable[int], quick: bool) -> list[Work]:
    """A loss, and what it costs to be prepared for one."""
    seconds = 0.0 if quick else _SECONDS_BEFORE_LOSS
    works: list[Work] = [RecoveryWork(2 if quick else 3, seconds)]
    if not quick:
        works.append(RecoveryWork(3, seconds, megabytes=1000))
    return works + [
        _training("protection", model, REPLICAS, batch, quick)
        for model in models
        for batch in batches
    ]


def server_workloads(quick: bool) -> list[Work]:
    return [
        ServerWork(load, batch, 2, 1, 4 if quick else steps) for load, batch, steps in _SERVER_LOADS
    ]


def server_scaling_workloads(quick: bool) -> list[Work]:
    """More workers and servers; and other loads, which tell apart what a step is made of."""
    counts = [(w, s) for s in SERVERS_SCALED for w in WORKERS_SCALED]
    loads = [(*_SCALED_LOAD, *each) for each in (counts[:1] if quick else counts)]
    loads += [(*each, 1, 1) for each in _LOADS_BESIDE]
    return [
        ServerWork(load, batch, workers, servers, 4 if quick else steps, "scaling")
        for load, batch, steps, workers, servers in loads
    ]


def workers_workloads(models: Iterable[str], batches: Iterable[int], quick: bool) -> list[Work]:
    return [
        _training("workers", model, REPLICAS, batch, quick) for model in models for batch in batches
    ]


def divided_workloads(quick: bool) -> list[Work]:
    """A GPT whose state (4 bytes a parameter, 8 for Adam) outweighs its activations."""
    if quick:
        return [DividedWork(GPTSize(2, 32, 2, 16, 64), REPLICAS, 4, 2)]
    return [DividedWork(GPTSize(8, 768, 12, 128, 8192), REPLICAS, 4, 3)]


def image_input_workloads(cores: int, quick: bool) -> list[Work]:
    if quick:
        return [ImageInputWork(count, 8, 16) for count in (1, 2)]
    counts = [count for count in (1, 2, 4, 8) if count <= cores]
    return [ImageInputWork(count, 64, 2048) for count in counts]


def service_workloads(quick: bool) -> list[Work]:
    loads = [("arrays", size, count) for size, count in _ARRAYS_SERVED] + [("jpeg", 0, 768)]
    if quick:
        return [ServiceWork(load, size, 64, 1) for load, size, _ in loads[:1] + loads[-1:]]
    return [ServiceWork(*load, 1) for load in loads]


def weak_scaling_workloads(models: Iterable[str], quick: bool) -> list[Work]:
    """More processes and as many more examples; and the sums that a model of costs is fitted to."""
    scales = _SCALES[:2] if quick else _SCALES
    works: list[Work] = [
        _training("weak_scaling", model, count, count * _BATCH_OF_PROCESS, quick)
        for model in models
        for count in scales
    ]
    return works + _all_reduces("weak_scaling", scales[1:], _SCALING_KIBIBYTES, quick)


def network_workloads(
    task: str, models: Iterable[str], batches: Iterable[int], link: Link, quick: bool
) -> list[Work]:
    """Training over a link, by `network` or `compression`: with few steps, where one takes long."""
    works: list[Work] = []
    for model in models:
        for batch in batches:
            work = _training(task, model, REPLICAS, batch, quick)
            seconds_a_step = gradient_bytes(model) * 8e-6 / (link.megabits or math.inf)
            most = _ROUND_SECONDS / seconds_a_step if seconds_a_step else math.inf
            least = _LEAST_COMPRESSED_STEPS if task == "compression" else 2
            steps = int(max(least, min(work.steps, most)))
            works.append(dataclasses.replace(work, steps=steps, link=str(link)))
    return works


def all_reduce_workloads(quick: bool) -> list[Work]:
    return _all_reduces("all_reduce", (REPLICAS, 2 * REPLICAS), _REDUCTIONS, quick)


def gradient_bytes(model: str) -> int:
    """Returns the size of the gradients of a model of `WIDTHS`."""
    layers = itertools.pairwise(WIDTHS[model])
    return 4 * sum((inputs + 1) * outputs for inputs, outputs in layers)


def _all_reduces(
    task: str, processes: Iterable[int], kibibytes: Iterable[int], quick: bool
) -> list[Work]:
    if quick:
        return [AllReduceWork(task, REPLICAS, size, 2) for size in (4, 64)]
    return [
        # Where there are more processes than cores, they take turns.
        AllReduceWork(task, count, size, max(2, _REDUCTIONS[size] * REPLICAS // count))
        for count in processes
        for size in kibibytes
    ]


def _training(task: str, model: str, processes: int, batch: int, quick: bool) -> TrainingWork:
    steps = 2 if quick else _steps(model, batch, _TRAINING_STEPS)
    return TrainingWork(task, model, processes, batch, steps)


def _steps(model: str, batch: int, known: Mapping[str, Mapping[int, int]] = _STEPS) -> int:
    steps = known[model]
    nearest = min(steps, key=lambda known: abs(known - batch))
    return max(1, steps[nearest] * nearest // batch) if batch > nearest else steps[nearest]


def _where(device: str) -> str:
    return "" if device == "cpu" else ", GPUs"


def to_json(work: Work) -> dict[str, Any]:
    return {"kind": type(work).__name__, **dataclasses.asdict(work)}


def from_json(fields: dict[str, Any]) -> Work:
    fields = dict(fields)
    kinds = {kind.__name__: kind for kind in typing.get_args(Work)}
    return kinds[fields.pop("kind")](**fields)


def parse_batches(text: str) -> Sequence[int]:
    """Reads `64,256,1024`; every batch must divide by the replicas."""
    batches = [int(part) for part in text.split(",")]
    if any(batch < REPLICAS or batch % REPLICAS for batch in batches):
        raise ValueError(f"Expected positive batches that {REPLICAS} divides. Received: {text}")
    return batches
