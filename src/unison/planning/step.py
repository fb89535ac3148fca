"""A step compiled for devices that are not here, and what that tells about it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from unison.planning.chips import device_of
from unison.planning.collectives import Collective, collectives_of
from unison.planning.memory import DoesNotFitError, StepMemory, in_units, needed_and_available
from unison.runtime.planned import PlannedPlacement, ProgramPlanned, planning
from unison.runtime.tpu.slices import describe_slice
from unison.strategies import Strategy


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
    hlo: str = dataclasses.field(repr=False)

    def peak_seconds(self) -> dict[str, float]:
        """Returns how long a device needs for what it does in a step, at its stated peak rates.

        One entry each for the arithmetic, the traffic to memory and the links to other chips; they
        overlap as far as the program allows. Empty where nobody has stated the rates.
        """
        device = device_of(self.target.partition(":")[0])
        if device is None:
            return {}
        sent = sum(collective.sent_bytes for collective in self.collectives)
        return {
            "arithmetic": self.flops / device.flops,
            "memory": self.bytes_accessed / device.memory_rate,
            "links": sent / device.link_rate,
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns all but the HLO as what JSON can say."""
        told = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "hlo"
        }
        told["memory"] = dataclasses.asdict(self.memory) | {"total": self.memory.total}
        told["collectives"] = [
            one._asdict() | {"sent_bytes": one.sent_bytes} for one in self.collectives
        ]
        told["peak_seconds"] = self.peak_seconds()
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
        DoesNotFitError: A device has too little memory; the message says what would help.
    """
    try:
        with planning():
            program()
    except ProgramPlanned as planned:
        return _compiled(planned, thorough)
    raise NothingToPlanError(_RUNS_HERE.format("a program that ended without one"))


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
    begin = time.perf_counter()
    try:
        compiled = program.lowered.compile(None if thorough else _QUICKLY)
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
    described = describe_slice(program.target)
    return StepPlan(
        step=program.name,
        target=program.target,
        num_chips=described.num_chips,
        num_devices=len(described.devices),
        num_replicas=program.num_replicas,
        memory=memory,
        flops=costs.get("flops", math.nan),
        bytes_accessed=costs.get("bytes accessed", math.nan),
        collectives=collectives_of(hlo),
        compile_seconds=seconds,
        hlo=hlo,
    )


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
        mends.append(f"about {math.ceil(times)} times as many chips, for the same global batch")
    else:
        mends.append("chips with more memory, or several cores per replica (DeviceAssignment)")
    slots = planned.state.get("optimizer_variables", 0)
    if slots:
        mends.append(
            f"a sharded update (sharded_update=True), which divides {in_units(slots)} of optimizer "
            "state between the devices"
        )
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
