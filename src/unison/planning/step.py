"""A step compiled for devices that are not available, and its properties.

For a TPU slice, XLA compiles the real program, and for GPUs if its GPU compiler is installed
(`gpu_compiler`). Otherwise it compiles the step for as many CPUs: its operations, bytes, memory and
collectives are taken as those of the devices. A model of these (`hardware`, `communication`,
`scaling`) estimates their time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from unison.planning import gpu_compiler
from unison.planning.calibration import Calibration
from unison.planning.clusters import (
    Cluster,
    cluster_named,
    cluster_of,
    described_devices,
)
from unison.planning.collectives import Collective, collectives_of
from unison.planning.communication import PART_OF_SUM, collective_seconds
from unison.planning.division import Division, division_by
from unison.planning.hardware import UnknownHardwareError
from unison.planning.kernels import bytes_of_custom_calls, kernels_of
from unison.planning.memory import DoesNotFitError, StepMemory, in_units, needed_and_available
from unison.planning.options import Choice, Step, choices, preferred
from unison.planning.overlap import Overlap, hidden_share, overlaps_of
from unison.planning.scaling import Exchange, StepTime, Workload, step_time
from unison.program.control_flow import value_wanted
from unison.runtime import devices
from unison.runtime.placement import OPTIMIZER, REPLICA_AXIS, WEIGHTS, Placement
from unison.runtime.planned import PlannedPlacement, PlannedProgram, ProgramPlanned, planning
from unison.runtime.private_jax import counted_costs
from unison.runtime.tpu.slices import SHAPES, describe_slice
from unison.strategies import Strategy


class NothingToPlanError(ValueError):
    """No step for devices that are not available was found."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The cost of a step on its target.

    Attributes:
        step: The name of the step: `"train_step of model 'mnist'"`.
        target: The devices for which it was compiled: `"v5e:2x4"`.
        num_chips: The number of chips.
        num_devices: The number of devices; in some generations, a chip is two devices.
        num_replicas: The number of replicas, which divide the batch.
        division: The sharding of a model's state.
        memory: The bytes on each device.
        flops: Floating-point operations of a device in a step, as counted by XLA.
        bytes_accessed: Bytes that a device's program reads and writes in a step, as counted by XLA.
        collectives: The communication in a step.
        kernels: The number of kernels that a device launches in a step, as XLA fuses operations on
            the platform for which it was compiled.
        compile_seconds: The time of the compilation.
        is_16_bit: Whether most of its products have 16-bit operands.
        cluster: The target's devices and links; None if their rates are unknown.
        examples: The number of examples in the global batch; None if no argument is a batch.
        is_estimate: Whether XLA compiled the step for CPUs in the place of the target's GPUs.
        hlo: The compiled program.
    """

    step: str
    target: str
    num_chips: int
    num_devices: int
    num_replicas: int
    division: Division
    memory: StepMemory
    flops: float
    bytes_accessed: float
    collectives: list[Collective]
    kernels: int
    compile_seconds: float
    is_16_bit: bool
    cluster: Cluster | None
    examples: int | None
    is_estimate: bool
    hlo: str = dataclasses.field(repr=False)

    def peak_seconds(self) -> dict[str, float]:
        """Returns the time of a device's work in a step, at its stated peak rates.

        One entry each for the arithmetic, the traffic to memory and the links; they overlap as far
        as the program allows. Empty if the rates are unknown.
        """
        cluster = self.cluster
        if cluster is None:
            return {}
        sent = sum(collective.sent_bytes for collective in self.collectives)
        rate = cluster.device.flops if self.is_16_bit else cluster.device.flops_32
        return {
            "arithmetic": self.flops / rate,
            "memory": self.bytes_accessed / cluster.device.memory_rate,
            "links": sent / cluster.slowest_rate,
        }

    @property
    def overlaps(self) -> list[Overlap]:
        """The collectives in the order of the schedule, with the kernels that run meanwhile."""
        return [] if self.is_estimate else overlaps_of(self.hlo)

    @property
    def hidden_share(self) -> float | None:
        """The share of the collectives' bytes that has work to hide behind; None if unknown."""
        return hidden_share(self.overlaps)

    @property
    def exchange(self) -> Exchange:
        """The number of collectives that sum the step's gradients, without very small ones."""
        of_replicas = [one for one in self.collectives if self._joins_replicas(one)]
        sums = [one for one in of_replicas if one.kind in ("all-reduce", "reduce-scatter")]
        largest = max((one.bytes for one in sums), default=0)
        count = sum(one.runs for one in sums if one.bytes > _SMALL * largest)
        return Exchange(bucket_bytes=largest if count > 1 else 0)

    @property
    def workload(self) -> Workload:
        """The work of a device in a step, by the model of `Device.compute_seconds`.

        Raises:
            ValueError: The rates of the target's devices are unknown.
        """
        return self.workload_on(self._stated_cluster())

    def workload_on(self, cluster: Cluster) -> Workload:
        """Returns the work of a device of another cluster for the same examples."""
        # Devices that share a core replace each other's data in its caches.
        in_use = self.memory.total * cluster.turns
        seconds = cluster.device.compute_seconds(
            self.flops, self.bytes_accessed, self.is_16_bit, in_use
        )
        joining = [one for one in self.collectives if self._joins_replicas(one)]
        summed = sum(one.bytes * one.runs * PART_OF_SUM[one.kind] for one in joining)
        # Activations and similar tensors, for which the step waits.
        others = [one for one in self.collectives if not self._joins_replicas(one)]
        waited = sum(collective_seconds(one, cluster) for one in others) / cluster.turns
        least = self.kernels * cluster.device.kernel_seconds
        seconds = max(seconds, least) + waited
        return Workload(seconds, summed, least=least, cores=self.division.cores)

    def _joins_replicas(self, collective: Collective) -> bool:
        """Whether it sums over replicas, or shards and gathers, as is done with gradients."""
        return collective.kind in PART_OF_SUM and collective.span > self.division.cores

    def scaling(self) -> list[StepTime]:
        """Returns the time of a step on 1 to all devices, with the same number of examples on each.

        Raises:
            ValueError: As for `workload`.
        """
        cluster = self._stated_cluster()
        cores = self.division.cores
        parts = [cluster.of(count) for count in cluster.sizes() if count % cores == 0]
        return [step_time(self.workload_on(part), part, self.exchange) for part in parts]

    def choices(self) -> list[Choice]:
        """Returns ways to run the step, and the cost of each.

        Raises:
            ValueError: As for `workload`.
        """
        step = Step(self.workload, self.memory, self.exchange, self.division)
        return choices(step, self._stated_cluster())

    def largest_batch(self) -> int | None:
        """Returns a global batch that fits, estimated from this one; None if its size is unknown.

        More may fit: parts that grow with the batch are not distinguished from others, such as
        gradients, which matter most if the planned batch is small.
        """
        if self.examples is None or self.cluster is None:
            return None
        memory = self.memory
        of_batch = memory.batch + memory.temporaries + memory.results
        room = self.cluster.device.memory - (memory.total - of_batch)
        times = room / max(of_batch, 1)
        return max(0, int(self.examples * times) // self.num_replicas * self.num_replicas)

    def _stated_cluster(self) -> Cluster:
        if self.cluster is None:
            raise ValueError(
                "Expected a target whose devices' rates are stated in hardware.toml. Received: "
                f"{self.target!r}, of which only memory and collectives are known."
            )
        return self.cluster

    def as_dict(self) -> dict[str, Any]:
        """Returns everything except the HLO as JSON types."""
        told = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("hlo", "cluster")
        }
        told["division"] = self.division._asdict()
        told["memory"] = dataclasses.asdict(self.memory) | {
            "activations": self.memory.activations,
            "total": self.memory.total,
        }
        told["collectives"] = [
            one._asdict() | {"sent_bytes": one.sent_bytes} for one in self.collectives
        ]
        overlaps = self.overlaps
        told["overlaps"] = [
            one.collective._asdict() | {"kernels": one.kernels, "work": one.work}
            for one in overlaps
        ]
        told["hidden_share"] = hidden_share(overlaps)
        told["peak_seconds"] = self.peak_seconds()
        if self.cluster is not None:
            ways = self.choices()
            told["device"] = self.cluster.device._asdict()
            told["links"] = [self.cluster.inside._asdict(), self.cluster.network._asdict()]
            told["scaling"] = [
                one._asdict()
                | {"sent": one.sent._asdict(), "seconds": one.seconds, "efficiency": one.efficiency}
                for one in self.scaling()
            ]
            told["choices"] = [way._asdict() for way in ways]
            told["preferred"] = preferred(ways).name
            told["largest_batch"] = self.largest_batch()
        return told

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)


def plan_fit(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None, *, thorough: bool = False
) -> StepPlan:
    """Compiles the training step of a Keras model for the devices of its strategy.

    Args:
        model: A compiled model, created in the scope of a strategy whose devices are not available:
            `TPUStrategy(topology="v5e:2x4")`.
        x: The inputs of a global batch: arrays, or `jax.ShapeDtypeStruct`s for them.
        y: The targets, likewise.
        sample_weight: The weights, likewise.
        thorough: Whether to compile as for a run. It takes up to twenty times as long, and the
            temporaries change by some percent.

    Raises:
        NothingToPlanError: The model's strategy runs on devices that are available.
        DoesNotFitError: A device has too little memory; the message suggests options.
    """
    x, y, sample_weight = jax.tree.map(_example, (x, y, sample_weight))
    run = functools.partial(model.train_on_batch, x, y, sample_weight=sample_weight)
    return plan_first_step(run, thorough)


def plan_run(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: tuple | list = (),
    kwargs: dict[str, Any] | None = None,
    thorough: bool = False,
) -> StepPlan:
    """Compiles the step that `strategy.run(fn, args, kwargs)` would run; see there.

    Args:
        strategy: A strategy whose devices are not available: `TPUStrategy(topology="v5e:2x4")`.
        fn: The step of one replica.
        args: Its arguments; a `jax.ShapeDtypeStruct` may replace an array.
        kwargs: Likewise.
        thorough: As for `plan_fit`.

    Raises:
        NothingToPlanError: The strategy runs on devices that are available.
        DoesNotFitError: A device has too little memory; the message suggests options.
    """
    if not isinstance(strategy.placement, PlannedPlacement):
        raise NothingToPlanError(_RUNS_HERE.format(f"{strategy!r}"))
    args, kwargs = jax.tree.map(_example, (tuple(args), kwargs or {}))
    return plan_first_step(lambda: strategy.run(fn, args, kwargs), thorough)


def plan_first_step(program: Callable[[], Any], thorough: bool = False) -> StepPlan:
    """Calls `program` until it would run a step on unavailable devices; compiles that step.

    Args:
        program: Trains, evaluates or predicts under a strategy whose devices are not available.
        thorough: As for `plan_fit`.

    Raises:
        NothingToPlanError: It ended without such a step.
        ControlFlowError: The step needs the values of arrays, of which only specs exist.
        DoesNotFitError: A device has too little memory; the message suggests options.
    """
    try:
        with planning():
            program()
    except ProgramPlanned as planned:
        return _compiled(planned, thorough)
    except _NEEDS_VALUES as error:
        raise value_wanted(error) from error
    raise NothingToPlanError(_RUNS_HERE.format("a program that ended without one"))


@contextlib.contextmanager
def target(
    name: str, network: str | None = None, calibration: Calibration | None = None
) -> Iterator[Cluster | None]:
    """Inside, every strategy gets the devices of an unavailable target.

    Args:
        name: A TPU slice or a cluster: `"v5e:2x4"`, `"h100:4x8"`; see `cluster_named`.
        network: As for `cluster_named`.
        calibration: Likewise.

    Raises:
        UnknownHardwareError: The target is unknown.
        UnknownSliceError: The TPU slice does not exist.
        MissingTPULibraryError: It is a TPU slice, and libtpu is not installed.
        GPUCompilerError: It has GPUs, and `UNISON_GPU_COMPILER` names a folder without a compiler.

    Examples:
        >>> import jax, unison
        >>> from unison.planning import plan_run, target
        >>> with target("h100:2x8"):
        ...     strategy = unison.MirroredStrategy()
        >>> strategy.num_replicas_in_sync
        16
        >>> plan_run(strategy, lambda x: x @ x.T, [jax.ShapeDtypeStruct((8, 4), "float32")]).flops
        512.0
    """
    described = described_target(name, network, calibration)
    with devices.planned_for(described):
        yield _cluster_of(described[0])


def described_target(
    name: str, network: str | None = None, calibration: Calibration | None = None
) -> Sequence[jax.Device]:
    """Returns the devices of a target, to compile for; see `target`."""
    if name.partition(":")[0] in SHAPES:
        return describe_slice(name).devices
    return described_devices(cluster_named(name, network, calibration))


#: The errors of reading a traced array's value.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

#: A collective with a smaller fraction of the largest one's bytes is not a bucket: biases, a loss.
_SMALL = 0.05

#: A product or convolution in the text of a lowered program.
_PRODUCT = re.compile(r"stablehlo\.(?:dot_general|convolution)\b.*?: \(tensor<(?:\d+x)*(\w+)>")

#: Makes XLA use the first schedule that it finds rather than search the best: `O1` of JAX's levels.
_QUICKLY: dict[str, Any] = {"optimization_level": 19}

_RUNS_HERE = (
    "Expected a step under a strategy whose devices are not here, such as "
    'TPUStrategy(topology="v5e:2x4"). Received: {}. Make the strategy with a topology (`unison '
    "plan` gives one to any strategy), and the model in its scope, or call strategy.run."
)


def _example(leaf: Any) -> Any:
    """Returns an array for a spec; it takes no memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


def _compiled(planned: ProgramPlanned, thorough: bool) -> StepPlan:
    program = planned.program
    placement = program.placement
    cluster = _cluster_of(placement.devices[0])
    is_slice = placement.platform == "tpu"
    begin = time.perf_counter()
    try:
        compiled = program.lowered.compile(_options_for(placement, thorough))
    except jax.errors.JaxRuntimeError as error:
        sizes = needed_and_available(str(error))
        if sizes is None:
            raise
        raise _does_not_fit(planned, *sizes) from error
    seconds = time.perf_counter() - begin
    sizes_of: Any = compiled.memory_analysis()
    state = _state_of(planned)
    memory = StepMemory(
        state=state,
        # Unused parts are not arguments of the compiled step.
        batch=_bytes_on_each_device(program.arguments[2:]),
        gradients=_gradients_of(planned),
        temporaries=sizes_of.temp_size_in_bytes,
        results=sizes_of.output_size_in_bytes - sizes_of.alias_size_in_bytes,
        code=sizes_of.generated_code_size_in_bytes,
    )
    costs = _costs_of(program, compiled)
    hlo = compiled.as_text() or ""
    if is_slice:
        described = describe_slice(program.target)
        num_chips, num_devices = described.num_chips, len(described.devices)
    else:
        num_chips = num_devices = cluster_of(placement.devices[0]).num_devices
    if cluster is not None and not is_slice and memory.total > cluster.device.memory:
        raise _does_not_fit(planned, memory.total, round(cluster.device.memory))
    return StepPlan(
        step=program.name,
        target=program.target,
        num_chips=num_chips,
        num_devices=num_devices,
        num_replicas=program.num_replicas,
        division=division_by(placement),
        memory=memory,
        flops=costs.flops,
        bytes_accessed=costs.bytes_accessed,
        collectives=collectives_of(hlo),
        kernels=kernels_of(hlo),
        compile_seconds=seconds,
        is_16_bit=_is_16_bit(program.lowered),
        cluster=cluster,
        examples=_examples_of(planned),
        is_estimate=placement.platform == "gpu" and not _has_described_gpus(placement),
        hlo=hlo,
    )


def _options_for(placement: Placement, thorough: bool) -> dict[str, Any] | None:
    """Returns XLA's options for compiling a step for the devices of a placement."""
    if placement.platform == "tpu":
        return None if thorough else _QUICKLY
    return gpu_compiler.options() if _has_described_gpus(placement) else None


def _has_described_gpus(placement: Placement) -> bool:
    """Whether XLA compiles for GPUs, rather than for CPUs in their place."""
    return placement.devices[0].platform == "gpu"


class _Costs(NamedTuple):
    flops: float
    bytes_accessed: float


def _costs_of(program: PlannedProgram, compiled: jax.stages.Compiled) -> _Costs:
    """Returns the operations of a device, and the bytes that it reads and writes.

    A GPU's program may call cuBLAS and cuDNN, of which XLA counts neither operations nor bytes: the
    operations are counted before it is compiled, as those of all cores of a replica divided by
    their number.
    """
    if not _has_described_gpus(program.placement):
        stated = compiled.cost_analysis() or {}
        return _Costs(stated.get("flops", math.nan), stated.get("bytes accessed", math.nan))
    before: Any = program.lowered.compiler_ir("hlo")
    executable: Any = compiled.runtime_executable()
    (after,) = executable.hlo_modules()
    flops = counted_costs(before.as_hlo_module()).get("flops", 0.0)
    accessed = counted_costs(after).get("bytes accessed", 0.0)
    calls = bytes_of_custom_calls(compiled.as_text() or "")
    return _Costs(flops / division_by(program.placement).cores, accessed + calls)


def _cluster_of(device: jax.Device) -> Cluster | None:
    """Returns the devices and links of a device's target; None if their rates are unknown."""
    try:
        return cluster_of(device)
    except UnknownHardwareError:
        return None


def _is_16_bit(lowered: jax.stages.Lowered) -> bool:
    dtypes = _PRODUCT.findall(lowered.as_text())
    return 2 * sum(dtype in ("bf16", "f16") for dtype in dtypes) > len(dtypes)


def _examples_of(planned: ProgramPlanned) -> int | None:
    """Returns the number of examples in the global batch: in a custom loop, in its first batch."""
    if planned.examples is not None:
        return planned.examples
    for leaf in jax.tree.leaves(planned.program.arguments[2:]):
        if leaf.ndim > 1 and tuple(leaf.sharding.spec)[:1] == (REPLICA_AXIS,):
            return leaf.shape[0] * leaf.shape[1]
    return None


def _state_of(planned: ProgramPlanned) -> dict[str, int]:
    variables = _bytes_on_each_device(planned.program.arguments[:2])
    return planned.state or {"variables": variables}


def _gradients_of(planned: ProgramPlanned) -> int:
    """Returns the bytes of the gradients, which have their weights' shapes and dtypes."""
    trains = "optimizer_variables" in planned.state
    return planned.state["trainable_variables"] if trains else 0


def _bytes_on_each_device(arguments: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arguments)
    )


def _dividing(planned: ProgramPlanned, needed: int, available: int) -> list[str]:
    """Returns the ways in which the replicas may shard their state, without unnecessary ones."""
    division, state = division_by(planned.program.placement), planned.state
    if not division.saved(state, WEIGHTS):
        return []
    stage = OPTIMIZER if needed - division.saved(state, OPTIMIZER) <= available else WEIGHTS
    return [
        f"{in_units(division.saved(state, stage))} less by {division.strategy(stage)}, "
        "of which each replica keeps a part of the optimizer's state"
        + (" and of the weights" if stage == WEIGHTS else "")
    ]


def _smaller_batches(planned: ProgramPlanned, needed: int, available: int) -> list[str]:
    """Returns ways to reduce the number of examples at a time; none if one is too many."""
    count, state = planned.program.num_replicas, sum(_state_of(planned).values())
    if state >= available:
        return []
    times = (needed - state) / (available - state)
    more_chips = f"about {math.ceil(times)} times as many chips, for the same global batch"
    examples = _examples_of(planned)
    if examples is None:
        return [more_chips]
    fitting = int(examples / times) // count * count
    if not fitting:
        return []
    mends = [f"a global batch of about {fitting} examples"]
    # Accumulated gradients take as much memory as gradients, in every part.
    room = available - state - _gradients_of(planned)
    parts = math.ceil((needed - state) / room) if room > 0 else math.inf
    if _gradients_of(planned) and examples >= parts * count:
        mends.append(
            f"a batch {parts} times smaller with gradient_accumulation_steps={parts}, for the "
            "same updates"
        )
    return [*mends, more_chips]


def _does_not_fit(planned: ProgramPlanned, needed: int, available: int) -> DoesNotFitError:
    program = planned.program
    state = sum(_state_of(planned).values())
    mends = _smaller_batches(planned, needed, available)
    if not mends:
        mends.append("chips with more memory, or several cores per replica (DeviceAssignment)")
    mends += _dividing(planned, needed, available)
    mends.append('16-bit activations (keras.config.set_dtype_policy("mixed_bfloat16"))')
    count = _examples_of(planned)
    examples = "" if count is None else f", a global batch of {count}"
    return DoesNotFitError(
        f"Expected {program.name} to fit into the {in_units(available)} of a device of "
        f"{program.target}. Received: a step that takes {in_units(needed)}, "
        f"{in_units(needed - available)} too much, of which {in_units(state)} are variables "
        f"({program.num_replicas} "
        f"replicas{examples}). What would make it fit: {'; or '.join(mends)}.",
        needed,
        available,
    )
