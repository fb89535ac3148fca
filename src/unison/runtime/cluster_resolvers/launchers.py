"""Detection of launchers that have started this process as one of several.

The resolvers describe a cluster that a strategy joins. This module only detects that there are
other processes, also for launchers that have no resolver: a strategy that ignored them would train
a separate copy of the model in each.

Only unambiguous evidence counts. Slurm also sets `SLURM_NTASKS` in a batch script and in the shell
of `salloc`, where the program runs once; its job steps have separate variables, which the detection
of JAX and PyTorch Lightning uses, too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launcher's description of a process as one of several.

    Attributes:
        launcher: The launcher that started the processes, or whatever describes them.
        variables: The environment variables that show it.
        count: The number of processes; None if unknown.
        place: The index of this process, from 0; None if unknown.
    """

    launcher: str
    variables: Mapping[str, str]
    count: int | None = None
    place: int | None = None

    def __str__(self) -> str:
        which = "one" if self.place is None else f"process {self.place}"
        of = "several" if self.count is None else str(self.count)
        found = ", ".join(f"{name}={_short(value)}" for name, value in self.variables.items())
        return f"{which} of {of}, according to {self.launcher}" + (f" ({found})" if found else "")


def launched_among_others(environment: Mapping[str, str]) -> Launch | None:
    """Returns how a process was started as one of several; None if there is no sign that it was.

    Args:
        environment: The environment variables of the process.

    Examples:
        >>> variables = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}
        >>> print(launched_among_others(variables))
        process 1 of 4, according to torchrun (RANK=1, WORLD_SIZE=4, MASTER_ADDR=10.0.0.1)
        >>> launched_among_others({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})  # a batch script
    """
    found = (launch for recognize in _RECOGNIZERS for launch in recognize(environment))
    return next(found, None)


@dataclasses.dataclass(frozen=True)
class _Counted:
    """A launcher that sets the number of processes that it starts.

    Attributes:
        launcher: Its name.
        count: The variable with their number.
        place: The variable with this process's index.
        beside: Other variables, at least one of which must be set: the names above are too generic.
    """

    launcher: str
    count: str
    place: str
    beside: tuple[str, ...] = ()

    def __call__(self, environment: Mapping[str, str]) -> Iterator[Launch]:
        count, place = (_number(environment.get(name)) for name in (self.count, self.place))
        beside = [name for name in self.beside if name in environment]
        lacks_others = bool(self.beside) and not beside
        if count is None or count < 2 or place is None or lacks_others:
            return
        names = (self.place, self.count, *beside)
        yield Launch(self.launcher, {name: environment[name] for name in names}, count, place)


def is_interactive_step(environment: Mapping[str, str]) -> bool:
    """Returns whether the step of a Slurm job is a shell, in which a program runs once."""
    return (
        environment.get("SLURM_STEP_ID") == _INTERACTIVE_STEP
        or environment.get("SLURM_JOB_NAME") in _SHELLS
    )


def _torchrun(environment: Mapping[str, str]) -> Iterator[Launch]:
    beside = ("MASTER_ADDR", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    yield from _Counted("torchrun", "WORLD_SIZE", "RANK", beside)(environment)
    if "RANK" not in environment:  # Kubeflow's pods, where torchrun was not used
        pods = _Counted("torchrun", "PET_NNODES", "PET_NODE_RANK", ("PET_MASTER_ADDR",))
        yield from pods(environment)


def _slurm(environment: Mapping[str, str]) -> Iterator[Launch]:
    """Yields the launch of a job step's tasks, except for an interactive shell."""
    if not is_interactive_step(environment):
        yield from _Counted("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")(environment)


def _jax(environment: Mapping[str, str]) -> Iterator[Launch]:
    """Yields the launch that JAX's own variables describe."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    variables = {name: environment[name] for name in names if environment.get(name)}
    count, place = (_number(variables.get(name)) for name in names[1:])
    is_one_of_several = count is not None and count > 1
    # Without a count, `jax.distributed.initialize` gets it from other sources.
    if is_one_of_several or (count is None and names[0] in variables):
        yield Launch("JAX's variables", variables, count, place)


def _pmix(environment: Mapping[str, str]) -> Iterator[Launch]:
    """Yields the launch by a launcher that sets the rank of each process, but not their number."""
    place = _number(environment.get("PMIX_RANK"))
    if place:
        yield Launch("MPI (PMIx)", {"PMIX_RANK": environment["PMIX_RANK"]}, None, place)


def _tf_config(environment: Mapping[str, str]) -> Iterator[Launch]:
    """Yields the launch of `TF_CONFIG`'s tasks that train together: an evaluator runs alone."""
    described = _json(environment.get("TF_CONFIG"))
    cluster, task = (_dictionary(described, part) for part in ("cluster", "task"))
    chiefs, workers = (_length(cluster.get(job)) for job in ("chief", "worker"))
    if chiefs + workers < 2 or task.get("type") == "evaluator":
        return
    first = {"chief": 0, "worker": chiefs}.get(str(task.get("type")))
    index = _number(str(task.get("index")))
    place = None if first is None or index is None else first + index
    variables = {"TF_CONFIG": environment["TF_CONFIG"]}
    yield Launch("TF_CONFIG", variables, chiefs + workers, place)


def _sagemaker(environment: Mapping[str, str]) -> Iterator[Launch]:
    hosts = _json(environment.get("SM_HOSTS"))
    if isinstance(hosts, list) and len(hosts) > 1:
        current = environment.get("SM_CURRENT_HOST")
        place = hosts.index(current) if current in hosts else None
        yield Launch("SageMaker", {"SM_HOSTS": environment["SM_HOSTS"]}, len(hosts), place)


def _vertex(environment: Mapping[str, str]) -> Iterator[Launch]:
    cluster = _dictionary(_json(environment.get("CLUSTER_SPEC")), "cluster")
    count = sum(map(_length, cluster.values()))
    if count > 1:
        variables = {"CLUSTER_SPEC": environment["CLUSTER_SPEC"]}
        yield Launch("Vertex AI", variables, count)


def _cloud_tpu(environment: Mapping[str, str]) -> Iterator[Launch]:
    place = _number(environment.get("TPU_WORKER_ID"))
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        count = len(environment.get(name, "").split(","))
        is_one_of_several = count > 1 or environment.get("MEGASCALE_NUM_SLICES", "1") != "1"
        if place is not None and name in environment and is_one_of_several:
            variables = {other: environment[other] for other in ("TPU_WORKER_ID", name)}
            slices, own = (_number(environment.get(f"MEGASCALE_{about}")) for about in _SLICES)
            if slices is not None and slices > 1 and own is not None:
                count, place = count * slices, place + own * count
            yield Launch("a Cloud TPU slice", variables, count, place)


def _kubernetes(environment: Mapping[str, str]) -> Iterator[Launch]:
    """Yields the launch of an indexed job's pods, except the first, which may be the only one."""
    place = _number(environment.get("JOB_COMPLETION_INDEX"))
    if place:
        name = "JOB_COMPLETION_INDEX"
        yield Launch("an indexed Kubernetes job", {name: environment[name]}, None, place)


#: The variables of the slices of a job, after their prefix: how many, and which is this one's.
_SLICES = ("NUM_SLICES", "SLICE_ID")

#: The step id of `salloc`'s shell, if Slurm is configured to run it as a step.
_INTERACTIVE_STEP = str(0xFFFFFFFA)

#: The names of jobs that are shells: `srun --pty bash`.
_SHELLS = ("bash", "fish", "interactive", "sh", "zsh")

#: A launcher that another one may start is listed first, such as `mpirun` in a Slurm job.
_RECOGNIZERS: tuple[Callable[[Mapping[str, str]], Iterator[Launch]], ...] = (
    _tf_config,
    _jax,
    _Counted("Kubeflow's JAXJob", "NUM_PROCESSES", "PROCESS_ID", ("COORDINATOR_ADDRESS",)),
    _Counted("Horovod", "HOROVOD_SIZE", "HOROVOD_RANK"),
    _torchrun,
    _Counted("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    _Counted("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    _Counted("MPI (MPICH, Intel MPI)", "PMI_SIZE", "PMI_RANK"),
    _pmix,
    _Counted("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    _Counted("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    _slurm,
    _sagemaker,
    _vertex,
    _cloud_tpu,
    _kubernetes,
)

#: The number of characters of a value that a message shows.
_SHOWN = 80


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def _json(text: str | None) -> Any:
    """Returns the parsed JSON; None if it is invalid, which is reported where the value is used."""
    try:
        return json.loads(text or "null")
    except ValueError:
        return None


def _dictionary(described: Any, part: str) -> dict[str, Any]:
    found = described.get(part) if isinstance(described, dict) else None
    return found if isinstance(found, dict) else {}


def _length(tasks: Any) -> int:
    return len(tasks) if isinstance(tasks, list | dict) else 0
