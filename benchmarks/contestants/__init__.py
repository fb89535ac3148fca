"""The programs that are measured. A module has functions `(work) -> Contestant`, most one: `build`.

This file only names them, for the driver: it imports none.
"""

from __future__ import annotations

import dataclasses

from benchmarks.workloads import (
    REPLICAS,
    AggregationWork,
    AllReduceWork,
    CheckpointWork,
    DataWork,
    DividedWork,
    FitWork,
    ImageInputWork,
    InputWork,
    RecoveryWork,
    RunWork,
    ServerWork,
    ServiceWork,
    SharesWork,
    TrainingWork,
    Work,
)

#: With fewer threads XLA gets stuck in loops of steps that are not waited for.
XLA_POOL = {"NPROC": str(2 * REPLICAS)}
_THREADS = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ONE_THREAD = dict.fromkeys(_THREADS, "1")
_TWO_JAX_DEVICES = {"JAX_NUM_CPU_DEVICES": str(REPLICAS), "KERAS_BACKEND": "jax"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contestant as the driver sees it.

    Attributes:
        name: Its name in the tables.
        family: Its name in `--contestants`.
        module: The module in this package that builds it.
        kinds: The workloads it takes part in.
        environment: The environment variables it needs.
        function: The function of the module that builds it.
        tasks: If given, the tasks of these workloads it takes part in.
        most_processes: If given, how many processes it has at most.
    """

    name: str
    family: str
    module: str
    kinds: tuple[type[Work], ...]
    environment: dict[str, str]
    function: str = "build"
    tasks: tuple[str, ...] = ()
    most_processes: int | None = None

    def takes_part_in(self, work: Work) -> bool:
        return isinstance(work, self.kinds) and (not self.tasks or work.task in self.tasks)


def _data(task: str, functions: dict[str, str]) -> list[Entry]:
    """Returns the contestants of a task, by name; the first word of it is the family."""
    entries = []
    for name, function in functions.items():
        library = name.split()[0]
        family = library.split(".")[0]
        module = f"data_{library.replace('.', '_')}"
        entries.append(Entry(name, family, module, (DataWork,), {}, function, (task,)))
    return entries


_DATA_ENTRIES = [
    *_data(
        "arrays",
        {
            "unison": "arrays",
            "unison prefetch": "arrays_ahead",
            "numpy": "arrays",
            "numpy take": "arrays_taken",
            "tf": "arrays",
            "tf gather": "arrays_gathered",
            "grain": "arrays",
            "grain 2 workers": "arrays_in_workers",
            "torch": "arrays",
            "torch 2 workers": "arrays_in_workers",
            "torch rows": "arrays_by_rows",
        },
    ),
    *_data(
        "map",
        {
            "unison": "mapped",
            "unison 2 threads": "mapped_in_threads",
            "unison 2 processes": "mapped_in_processes",
            "tf": "mapped",
            "tf autotune": "mapped_in_threads",
            "grain": "mapped",
            "grain 2 workers": "mapped_in_workers",
            "torch": "mapped",
            "torch 2 workers": "mapped_in_workers",
        },
    ),
    *_data(
        "map_batches",
        {
            "unison": "mapped_behind_batch",
            "unison vectorized": "mapped_as_blocks",
            "numpy": "mapped",
            "tf": "mapped_behind_batch",
            "grain": "mapped_behind_batch",
            "torch rows": "mapped_by_rows",
        },
    ),
    *_data(
        "records",
        {
            "unison": "records",
            "unison vectorized": "records_vectorized",
            "unison.tf": "records",
            "tf": "records",
        },
    ),
    *_data(
        "records_batched",
        {"unison": "records_batched", "unison.tf": "records_batched", "tf": "records_batched"},
    ),
    *_data("jpeg", {"unison.tf": "jpeg", "tf": "jpeg"}),
    *_data("jpeg_resized", {"unison.tf": "jpeg_resized", "tf": "jpeg_resized"}),
    *_data(
        "augment",
        {
            "unison": "augmented",
            "unison 2 processes": "augmented_in_processes",
            "unison after batch": "augmented_behind_batch",
            "unison vectorized": "augmented_as_blocks",
            "unison jitted": "augmented_jitted",
            "tf": "augmented",
        },
    ),
    *_data("generator", {"unison": "generator", "tf": "generator"}),
    *_data("lines", {"unison": "lines", "tf": "lines"}),
    *_data("padded_batch", {"unison": "padded", "tf": "padded"}),
    *_data("bucketing", {"unison": "bucketed", "tf": "bucketed"}),
]


def _training(
    name: str, module: str, function: str, tasks: tuple[str, ...], **environment: str
) -> Entry:
    of_all = _ONE_THREAD | environment
    return Entry(name, name.split()[0], module, (TrainingWork,), of_all, function, tasks)


_IMAGE_INPUT_ENTRIES = [
    Entry(library, library, f"image_input_{library}", (ImageInputWork,), of_library)
    for library, of_library in {
        "unison": {**_ONE_THREAD, "KERAS_BACKEND": "jax"},
        "tf": _ONE_THREAD,
        "torch": _ONE_THREAD,
    }.items()
]

_DIVIDED_ENTRIES = [
    *(
        Entry(
            f"unison {stage}",
            "unison",
            "divided_unison",
            (DividedWork,),
            {**_ONE_THREAD, "KERAS_BACKEND": "jax"},
            stage,
        )
        for stage in ("zero3", "zero2")
    ),
    Entry("torch zero3", "torch", "divided_torch", (DividedWork,), _ONE_THREAD, "zero3"),
    Entry("torch zero2", "torch", "divided_torch", (DividedWork,), _ONE_THREAD, "zero2"),
]

_SERVICE_ENTRIES = [
    Entry("unison", "unison", "service_unison", (ServiceWork,), {}),
    Entry("unison.tf", "unison", "service_unison", (ServiceWork,), {}, "drop_in"),
    Entry("tf", "tf", "service_tf", (ServiceWork,), {}),
    Entry("tf uncompressed", "tf", "service_tf", (ServiceWork,), {}, "uncompressed"),
]

_EVERYWHERE = ("workers", "weak_scaling", "network", "compression")
_TUNED = ("workers", "network", "compression")
_COMPRESSIONS = (
    "bfloat16",
    "float16",
    "int8",
    "int4",
    "sign",
    "topk",
    "powersgd",
    "local_sgd",  # `diloco` sends the same, half as often
)
_TRAINING_ENTRIES = [
    _training("unison", "training_unison", "custom_loop", _EVERYWHERE, KERAS_BACKEND="jax"),
    _training("unison fit", "training_unison", "fit", ("workers",), KERAS_BACKEND="jax"),
    _training("hand", "training_hand_written", "build", ("workers", "network")),
    _training("torch", "training_torch", "build", ("workers",)),
    _training("torch fused", "training_torch", "fused", _EVERYWHERE),
    *(
        _training(
            f"unison {name}", "training_compressed", name, ("compression",), KERAS_BACKEND="jax"
        )
        for name in _COMPRESSIONS
    ),
    _training("unison tuned", "training_tuned", "build", _TUNED, KERAS_BACKEND="jax"),
    _training(
        "unison tuned int8", "training_tuned", "compressed", ("compression",), KERAS_BACKEND="jax"
    ),
    _training("tf", "training_tf", "build", ("workers",), KERAS_BACKEND="tensorflow"),
    *(
        _training(f"{name}{kind}", module, function, ("protection",), KERAS_BACKEND="jax")
        for name, module in (("unison", "training_unison"), ("unison elastic", "training_elastic"))
        for kind, function in (("", "custom_loop"), (" fit", "fit"))
    ),
]


def _all_reduce(
    name: str,
    module: str,
    function: str = "build",
    tasks: tuple[str, ...] = ("all_reduce",),
    most_processes: int | None = None,
) -> Entry:
    family = "limits" if module == "all_reduce_limits" else name
    return Entry(
        name, family, module, (AllReduceWork,), _ONE_THREAD, function, tasks, most_processes
    )


_ALL_REDUCE_ENTRIES = [
    _all_reduce("unison", "all_reduce_unison", tasks=("all_reduce", "weak_scaling")),
    _all_reduce("hand", "all_reduce_psum"),
    _all_reduce("torch", "all_reduce_torch", tasks=("all_reduce", "weak_scaling")),
    _all_reduce("loopback TCP", "all_reduce_limits", "stream"),
    _all_reduce("memcpy", "all_reduce_limits", "copy", most_processes=1),
]


def _shares(name: str, function: str) -> Entry:
    of_process = _ONE_THREAD | {"KERAS_BACKEND": "jax"}
    return Entry(name, "unison", "shares_unison", (SharesWork,), of_process, function)


_SHARES_ENTRIES = [
    _shares("equal shares", "equal"),
    _shares("given shares", "given"),
    _shares("measured shares", "measured"),
    _shares("no slow worker", "no_slow_worker"),
]


def _checkpoint(name: str, family: str, function: str = "build") -> Entry:
    return Entry(name, family, f"checkpoint_{family}", (CheckpointWork,), {}, function)


_CHECKPOINT_ENTRIES = [
    _checkpoint("unison", "unison", "asynchronous"),
    _checkpoint("unison at once", "unison", "at_once"),
    _checkpoint("unison in parts", "unison", "in_parts"),
    _checkpoint("orbax", "orbax"),
    _checkpoint("tf", "tf"),
]


def _recovery(name: str, function: str, tasks: tuple[str, ...] = (), **environment: str) -> Entry:
    family = name.split()[0]
    return Entry(name, family, "recovery", (RecoveryWork,), environment, function, tasks)


_RECOVERY_ENTRIES = [
    _recovery("unison", "unison_loop", KERAS_BACKEND="jax"),
    _recovery("unison fit", "unison_fit", KERAS_BACKEND="jax"),
    _recovery("unison restarts", "restarts_loop", KERAS_BACKEND="jax"),
    _recovery("unison restarts fit", "restarts_fit", KERAS_BACKEND="jax"),
    _recovery("torch", "torch", ("small",)),
    _recovery("tf", "tf", ("small",), KERAS_BACKEND="tensorflow"),
]


def _servers(name: str, tasks: tuple[str, ...] = (), **environment: str) -> Entry:
    module = f"parameter_servers_{name}"
    return Entry(name, name, module, (ServerWork,), environment, tasks=tasks)


_SERVER_ENTRIES = [
    _servers("unison", **_ONE_THREAD),
    _servers("tf", ("parameter_servers",), KERAS_BACKEND="tensorflow"),
]

ENTRIES = (
    Entry("unison", "unison", "unison_fit", (FitWork,), {"KERAS_BACKEND": "jax"}),
    Entry("unison", "unison", "unison_run", (RunWork,), {}),
    Entry("hand", "hand", "hand_written_fit", (FitWork,), _TWO_JAX_DEVICES),
    Entry("hand", "hand", "hand_written_run", (RunWork,), _TWO_JAX_DEVICES | XLA_POOL),
    Entry("keras", "keras", "keras_data_parallel", (FitWork,), _TWO_JAX_DEVICES),
    Entry("tf", "tf", "tensorflow_fit", (FitWork,), {"KERAS_BACKEND": "tensorflow"}),
    Entry("torch", "torch", "torch_fit", (FitWork,), {}),
    Entry("unison", "unison", "aggregation_default", (AggregationWork,), {}),
    Entry("ADD_N", "unison", "aggregation_add_n", (AggregationWork,), {}),
    Entry("TREE", "unison", "aggregation_tree", (AggregationWork,), {}),
    Entry("ACCUMULATE_N", "unison", "aggregation_accumulate_n", (AggregationWork,), {}),
    Entry("hand", "hand", "aggregation_psum", (AggregationWork,), {}),
    Entry("tf function", "tf", "tensorflow_run_function", (RunWork,), {}),
    Entry("tf direct", "tf", "tensorflow_run_direct", (RunWork,), {}),
    *_DATA_ENTRIES,
    *_IMAGE_INPUT_ENTRIES,
    *_DIVIDED_ENTRIES,
    *_SERVICE_ENTRIES,
    Entry("unison", "unison", "input_unison", (InputWork,), {"KERAS_BACKEND": "jax"}),
    *_TRAINING_ENTRIES,
    *_ALL_REDUCE_ENTRIES,
    *_SHARES_ENTRIES,
    *_CHECKPOINT_ENTRIES,
    *_RECOVERY_ENTRIES,
    *_SERVER_ENTRIES,
)

#: The other libraries, each with the package that tells whether an interpreter has it.
PEERS = {"keras": "keras", "tf": "tensorflow", "grain": "grain", "torch": "torch", "orbax": "orbax"}

FAMILIES = tuple(dict.fromkeys(entry.family for entry in ENTRIES))
