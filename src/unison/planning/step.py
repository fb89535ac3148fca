"""A step compiled for devices that are not here, and what that tells about it.

Of a TPU slice XLA compiles the real program. Of other clusters it compiles the step for as many
CPUs: its operations, its bytes, its memory and its collectives stand for those of the devices, and
a model of these (`hardware`, `communication`, `scaling`) says how long they take.
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
from typing import Any

import jax
import numpy as np

from unison.planning.calibration import Calibration
from unison.planning.clusters import (
    Cluster,
    cluster_named,
    cluster_of_target,
    described_devices,
)
from unison.planning.collectives import Collective, collectives_of
from unison.planning.hardware import UnknownHardwareError
from unison.planning.memory import DoesNotFitError, StepMemory, in_units, needed_and_available
from unison.planning.options import Choice, Step, choices, preferred
from unison.planning.scaling import Exchange, StepTime, Workload, scaling
from unison.program.control_flow import ControlFlowError
from unison.runtime import devices
from unison.runtime.placement import OPTIMIZER, REPLICA_AXIS, WEIGHTS
from unison.runtime.planned import PlannedPlacement, ProgramPlanned, planning
from unison.runtime.tpu.slices import SHAPES, describe_slice
from unison.strategies import Strategy
from unison.strategies.model_parallel import BATCH_AXIS


class NothingToPlanError(ValueError):
    """No step was to run on devices that are not here."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a step takes on its target.

    Attributes:
        step: What was compiled: `"train_step of model 'mnist'"`.
        target: The devices that it was compiled for: `"v5e:2x4"`.
        num_chips: How many chips that is.
        num_devices: How many devices; of some generations, a chip is two.
        num_replicas: Between how many replicas the batch is divided.
        memory: The bytes on each device.
        flops: Floating-point operations of a device in a step, as XLA counts them.
        bytes_accessed: Bytes that a device's program reads and writes in a step, likewise.
        collectives: The communication in a step.
        compile_seconds: How long compiling took here.
        is_16_bit: Whether most of its products are of 16-bit numbers.
        cluster: The target's devices and links; None where nobody has stated what they can do.
        examples: The examples of the global batch; None if nobody said.
        hlo: The compiled program.
    """

    step: str
    target: str
    num_chips: int
    num_devices: int
    num_replicas: int
    memory: StepMemory
    flops: float
    bytes_accessed: float
    collectives: list[Collective]
    compile_seconds: float
    is_16_bit: bool
    cluster: Cluster | None
    examples: int | None
    hlo: str = dataclasses.field(repr=False)

    def peak_seconds(self) -> dict[str, float]:
        """Returns how long a device needs for what it does in a step, at its stated peak rates.

        One entry each for the arithmetic, the traffic to memory and the links; they overlap as far
        as the program allows. Empty where nobody has stated the rates.
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
    def exchange(self) -> Exchange:
        """How the step sums its gradients: in how many collectives, but for very small ones."""
        sums = [one for one in self.collectives if one.kind in ("all-reduce", "reduce-scatter")]
        largest = max((one.bytes for one in sums), default=0)
        count = sum(one.runs for one in sums if one.bytes > _SMALL * largest)
        return Exchange(bucket_bytes=largest if count > 1 else 0)

    @property
    def workload(self) -> Workload:
        """What a device does in a step, by the model of `Device.compute_seconds`.

        Raises:
            ValueError: Nobody has stated what the target's devices can do.
        """
        device = self._stated_cluster().device
        seconds = device.compute_seconds(self.flops, self.bytes_accessed, self.is_16_bit)
        summed = sum(one.bytes * one.runs * _SUMS.get(one.kind, 0) for one in self.collectives)
        return Workload(seconds, summed)

    def scaling(self) -> list[StepTime]:
        """Returns what the step takes on 1 to all devices, each with as many examples as here.

        Raises:
            ValueError: As for `workload`.
        """
        return scaling(self.workload, self._stated_cluster(), self.exchange)

    def choices(self) -> list[Choice]:
        """Returns ways to run the step, and what each would take.

        Raises:
            ValueError: As for `workload`.
        """
        shards = any(one.kind == "reduce-scatter" for one in self.collectives)
        step = Step(self.workload, self.memory, self.exchange, shards)
        return choices(step, self._stated_cluster())

    def largest_batch(self) -> int | None:
        """Returns a global batch that fits, by what this one takes; None if nobody said its size.

        More may fit: what grows with the batch is not told from what does not, such as buffers of
        gradients, which weigh most where the planned batch is small.
        """
        if self.examples is None or self.cluster is None:
            return None
        memory = self.memory
        of_batch = memory.batch + memory.temporaries - memory.gradients + memory.results
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
        """Returns all but the HLO as what JSON can say."""
        told = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("hlo", "cluster")
        }
        told["memory"] = dataclasses.asdict(self.memory) | {"total": self.memory.total}
        told["collectives"] = [
            one._asdict() | {"sent_bytes": one.sent_bytes} for one in self.collectives
        ]
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
        model: A compiled model, made in the scope of a strategy whose devices are not here:
            `TPUStrategy(topology="v5e:2x4")`.
        x: The inputs of a global batch: arrays, or `jax.ShapeDtypeStruct`s for them.
        y: The targets, likewise.
        sample_weight: The weights, likewise.
        thorough: Whether to compile as for a run. It takes up to twenty times as long, and the
            temporaries change by some percent.

    Raises:
        NothingToPlanError: The model's strategy runs on devices that are here.
        DoesNotFitError: A device has too little memory; the message says what would help.
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
    """Compiles what `strategy.run(fn, args, kwargs)` would run; see there.

    Args:
        strategy: A strategy whose devices are not here: `TPUStrategy(topology="v5e:2x4")`.
        fn: The step of one replica.
        args: Its arguments; a `jax.ShapeDtypeStruct` stands for an array.
        kwargs: Likewise.
        thorough: As for `plan_fit`.

    Raises:
        NothingToPlanError: The strategy runs on devices that are here.
        DoesNotFitError: A device has too little memory; the message says what would help.
    """
    if not isinstance(strategy.placement, PlannedPlacement):
        raise NothingToPlanError(_RUNS_HERE.format(f"{strategy!r}"))
    args, kwargs = jax.tree.map(_example, (tuple(args), kwargs or {}))
    return plan_first_step(lambda: strategy.run(fn, args, kwargs), thorough)


def plan_first_step(program: Callable[[], Any], thorough: bool = False) -> StepPlan:
    """Calls `program` until it would run a step on devices that are not here; compiles that step.

    Args:
        program: Trains, evaluates or predicts under a strategy whose devices are not here.
        thorough: As for `plan_fit`.

    Raises:
        NothingToPlanError: It ended without one.
        ControlFlowError: The step asks for values of arrays, which are only described.
        DoesNotFitError: A device has too little memory; the message says what would help.
    """
    try:
        with planning():
            program()
    except ProgramPlanned as planned:
        return _compiled(planned, thorough)
    except _NEEDS_VALUES as error:
        raise ControlFlowError(error) from error
    raise NothingToPlanError(_RUNS_HERE.format("a program that ended without one"))


@contextlib.contextmanager
def target(
    name: str, network: str | None = None, calibration: Calibration | None = None
) -> Iterator[Cluster | None]:
    """Inside, a strategy gets the devices of a target that is not here, whichever it asks for.

    Args:
        name: A TPU slice or a cluster: `"v5e:2x4"`, `"h100:4x8"`; see `cluster_named`.
        network: As for `cluster_named`.
        calibration: Likewise.

    Raises:
        UnknownHardwareError: There is no such target.
        UnknownSliceError: There is no such TPU slice.
        MissingTPULibraryError: It is a TPU slice, and libtpu is not installed.

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
    with devices.planned_for(described_target(name, network, calibration)):
        yield _cluster_of(name)


def described_target(
    name: str, network: str | None = None, calibration: Calibration | None = None
) -> Sequence[jax.Device]:
    """Returns the devices of a target, to compile for; see `target`."""
    if name.partition(":")[0] in SHAPES:
        return describe_slice(name).devices
    return described_devices(cluster_named(name, network, calibration))


#: What asks for the values of a traced array.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

#: A collective of a smaller part of the largest one's bytes is no bucket: biases, a loss.
_SMALL = 0.05

#: The collectives that sum gradients, and what part of an all-reduce each is.
_SUMS = {"all-reduce": 1.0, "reduce-scatter": 0.5, "all-gather": 0.5}

#: A product or convolution in the text of a lowered program.
_PRODUCT = re.compile(r"stablehlo\.(?:dot_general|convolution)\b.*?: \(tensor<(?:\d+x)*(\w+)>")

#: Lets XLA choose the first schedule that it finds rather than the best.
_QUICKLY: dict[str, Any] = {"exec_time_optimization_effort": -1.0}

_RUNS_HERE = (
    "Expected a step under a strategy whose devices are not here, such as "
    'TPUStrategy(topology="v5e:2x4"). Received: {}. Make the strategy with a topology (`unison '
    "plan` gives one to any strategy), and the model in its scope, or call strategy.run."
)


def _example(leaf: Any) -> Any:
    """Returns an array for a description of one; it takes no memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return leaf


def _compiled(planned: ProgramPlanned, thorough: bool) -> StepPlan:
    program = planned.program
    cluster = _cluster_of(program.target)
    is_slice = program.target.partition(":")[0] in SHAPES
    begin = time.perf_counter()
    try:
        compiled = program.lowered.compile(_QUICKLY if is_slice and not thorough else None)
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
        # What the step does not look at is no argument of it.
        batch=_bytes_on_each_device(program.arguments[2:]),
        gradients=_gradients_of(planned),
        temporaries=sizes_of.temp_size_in_bytes,
        results=sizes_of.output_size_in_bytes - sizes_of.alias_size_in_bytes,
        code=sizes_of.generated_code_size_in_bytes,
    )
    costs = compiled.cost_analysis() or {}
    hlo = compiled.as_text() or ""
    if is_slice:
        described = describe_slice(program.target)
        num_chips, num_devices = described.num_chips, len(described.devices)
    else:
        num_chips = num_devices = cluster_of_target(program.target).num_devices
    if cluster is not None and not is_slice and memory.total > cluster.device.memory:
        raise _does_not_fit(planned, memory.total, round(cluster.device.memory))
    return StepPlan(
        step=program.name,
        target=program.target,
        num_chips=num_chips,
        num_devices=num_devices,
        num_replicas=program.num_replicas,
        memory=memory,
        flops=costs.get("flops", math.nan),
        bytes_accessed=costs.get("bytes accessed", math.nan),
        collectives=collectives_of(hlo),
        compile_seconds=seconds,
        is_16_bit=_is_16_bit(program.lowered),
        cluster=cluster,
        examples=planned.examples,
        hlo=hlo,
    )


def _cluster_of(target: str) -> Cluster | None:
    """Returns the devices and links of a target; None where nobody has stated them."""
    try:
        return cluster_of_target(target)
    except UnknownHardwareError:
        return None


def _is_16_bit(lowered: jax.stages.Lowered) -> bool:
    dtypes = _PRODUCT.findall(lowered.as_text())
    return 2 * sum(dtype in ("bf16", "f16") for dtype in dtypes) > len(dtypes)


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


def _divides_less(planned: ProgramPlanned) -> bool:
    """Whether the replicas could divide more of what a model keeps than they do."""
    program = planned.program
    is_model = "optimizer_variables" in planned.state
    return is_model and program.num_replicas > 1 and program.placement.zero < WEIGHTS


def _dividing(planned: ProgramPlanned, needed: int, available: int) -> str:
    """Returns how the replicas may divide what they keep: no more of it than has to be."""
    placement = planned.program.placement
    axes = dict(placement.mesh.shape)
    mesh = {BATCH_AXIS: axes.pop(REPLICA_AXIS), **axes}
    rules = "" if placement.rules is None else "rules=rules, "
    slots = 0 if placement.shards_update else planned.state["optimizer_variables"]
    divided = {OPTIMIZER: slots, WEIGHTS: slots + planned.state["trainable_variables"]}
    part_of_others = 1 - 1 / placement.num_replicas
    saved = {zero: round(size * part_of_others) for zero, size in divided.items()}
    zero = OPTIMIZER if slots and needed - saved[OPTIMIZER] <= available else WEIGHTS
    return (
        f"{in_units(saved[zero])} less by ModelParallelStrategy(mesh={mesh}, {rules}zero={zero}), "
        "of which each replica keeps a part of the optimizer's state"
        + (" and of the weights" if zero == WEIGHTS else "")
    )


def _does_not_fit(planned: ProgramPlanned, needed: int, available: int) -> DoesNotFitError:
    program = planned.program
    state = sum(_state_of(planned).values())
    mends = []
    if state < available:
        times = (needed - state) / (available - state)
        if planned.examples is not None:
            fitting = int(planned.examples / times) // program.num_replicas * program.num_replicas
            if fitting:
                mends.append(f"a global batch of about {fitting} examples")
            parts = math.ceil(times)
            mends.append(
                f"a batch {parts} times smaller with gradient_accumulation_steps={parts}, for the "
                "same updates"
            )
        mends.append(f"about {math.ceil(times)} times as many chips, for the same global batch")
    else:
        mends.append("chips with more memory, or several cores per replica (DeviceAssignment)")
    mends += [_dividing(planned, needed, available)] * _divides_less(planned)
    mends.append('16-bit activations (keras.config.set_dtype_policy("mixed_bfloat16"))')
    examples = "" if planned.examples is None else f", a global batch of {planned.examples}"
    return DoesNotFitError(
        f"Expected {program.name} to fit into the {in_units(available)} of a device of "
        f"{program.target}. Received: a step that takes {in_units(needed)}, "
        f"{in_units(needed - available)} too much, of which {in_units(state)} are variables "
        f"({program.num_replicas} "
        f"replicas{examples}). What would make it fit: {'; or '.join(mends)}.",
        needed,
        available,
    )
