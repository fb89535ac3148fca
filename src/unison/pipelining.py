"""A pipeline of stages: devices compute one stage each, on one micro-batch after the other.

It is GPipe's schedule (Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism"): in tick t, stage s computes micro-batch t - s and hands the result on. Of M
micro-batches and S devices, M + S - 1 ticks, a device is idle in S - 1: the bubble, a share of
(S - 1) / (M + S - 1). The gradient runs the same ticks backwards; each stage keeps its inputs only,
and computes the rest again.

Or it is 1F1B's ("one forward, one backward": Narayanan et al. 2019, "PipeDream: Generalized
Pipeline Parallelism for DNN Training"): the inputs of 2 S - 1 micro-batches at most wait on a
device, however many there are. A pipeline is a part of a model, and learns the gradient of its
results only when all micro-batches have gone through it. So they go through it once more, and in
every tick a device computes one micro-batch, and the gradient of one whose input it has kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

#: The name of the mesh axis along which the stages lie.
STAGE_AXIS = "stage"

#: In which order the devices compute.
SCHEDULES = ("gpipe", "1f1b")

#: The name of a variable with the packed parameters of stages.
PACKED = "pipeline_stages"

#: Rows of packed parameters have a multiple of so many elements, so that others can divide them.
_MULTIPLE = 64

#: Maps the parameters of a stage, a micro-batch, and the latter's seed or index, to its result.
Stage = Callable[[Any, jax.Array, jax.Array], jax.Array]


def bubble(microbatches: int, devices: int) -> float:
    """Returns the share of ticks in which a device of a pipeline is idle.

    Examples:
        >>> bubble(microbatches=12, devices=4)
        0.2
    """
    return (devices - 1) / (microbatches + devices - 1)


def pack_stages(parameters: Sequence[Any]) -> jax.Array:
    """Returns the parameters of stages as the rows of one array, which a mesh axis can divide.

    Args:
        parameters: A pytree of arrays of one dtype for each stage.

    Returns:
        An array of shape (stages, elements of the largest one); the others' rows end in zeros.

    Raises:
        ValueError: The dtypes differ.

    Examples:
        >>> import jax.numpy as jnp
        >>> pack_stages([{"w": jnp.ones((2, 3))}, {"w": jnp.ones(100)}]).shape
        (2, 128)
    """
    leaves = [jax.tree.leaves(of_stage) for of_stage in parameters]
    dtypes = {jnp.result_type(leaf) for of_stage in leaves for leaf in of_stage}
    if len(dtypes) != 1:
        raise ValueError(
            "Expected the parameters of all stages in one dtype. Received: "
            f"{sorted(map(str, dtypes))}"
        )
    rows = [jnp.concatenate([jnp.ravel(leaf) for leaf in own] or [jnp.zeros(0)]) for own in leaves]
    width = -(-max(row.size for row in rows) // _MULTIPLE) * _MULTIPLE
    return jnp.stack([jnp.pad(row, (0, width - row.size)) for row in rows]).astype(dtypes.pop())


def unpack_stage(row: jax.Array, like: Any) -> Any:
    """Returns the parameters in a row of `pack_stages`, as a tree of arrays of the shapes `like`.

    Examples:
        >>> import jax.numpy as jnp
        >>> unpack_stage(jnp.arange(64.0), {"w": jnp.ones((2, 1))})["w"].tolist()
        [[0.0], [1.0]]
    """
    leaves, structure = jax.tree.flatten(like)
    start = 0
    parts = []
    for leaf in leaves:
        size = math.prod(leaf.shape)
        parts.append(lax.slice(row, (start,), (start + size,)).reshape(leaf.shape))
        start += size
    return jax.tree.unflatten(structure, parts)


def pipeline(
    stages: Sequence[Stage],
    packed: jax.Array,
    batch: jax.Array,
    *,
    like: Sequence[Any],
    microbatches: int,
    seeds: jax.Array | None = None,
    schedule: str = "gpipe",
) -> jax.Array:
    """Returns what the stages, one after the other, make of a replica's batch.

    In a function that `ModelParallelStrategy.run` calls, with a mesh axis `"stage"`, the devices
    along it compute an equal number of stages each; elsewhere, all stages are computed in turn.

    Args:
        stages: The stages; each maps (its parameters, a micro-batch, the micro-batch's seed) to a
            result with the examples along the first axis. Results have one dtype. A stage must not
            close over traced values.
        packed: Their parameters: `pack_stages`, of which each device along the axis has its rows.
        batch: The replica's batch.
        like: For each stage, a tree of arrays (or `jax.ShapeDtypeStruct`s) like its parameters.
        microbatches: Into how many parts the batch is divided.
        seeds: For each micro-batch what its stages get, along the first axis. Default: its index.
            There is no gradient of them.
        schedule: `"gpipe"`, under which the inputs of all micro-batches wait for the gradient; or
            `"1f1b"`, under which those of twice as many as devices do, for the price of another
            forward pass. The results are the same.

    Raises:
        ValueError: The batch, or the stages, cannot be divided so; or there is no such schedule.

    Examples:
        >>> import jax.numpy as jnp
        >>> double, add = lambda w, x, _: w * x, lambda w, x, _: w + x
        >>> packed = pack_stages([jnp.array(2.0), jnp.array(1.0)])
        >>> like = [jnp.array(0.0)] * 2
        >>> pipeline([double, add], packed, jnp.arange(4.0), like=like, microbatches=2).tolist()
        [1.0, 3.0, 5.0, 7.0]
    """
    check_schedule(schedule)
    if microbatches < 1 or batch.shape[0] % microbatches:
        raise ValueError(
            f"Expected a replica's batch that {microbatches} micro-batches divide. Received: "
            f"{batch.shape[0]} examples. Choose another batch size (of a dataset: drop_remainder) "
            "or number of micro-batches."
        )
    parts = batch.reshape(microbatches, -1, *batch.shape[1:])
    seeds = jnp.arange(microbatches) if seeds is None else seeds
    mesh = jax.sharding.get_abstract_mesh()
    devices = dict(mesh.shape).get(STAGE_AXIS, 1)
    if len(stages) % devices:
        raise ValueError(
            f"Expected a number of stages that the {devices} devices along mesh axis "
            f"{STAGE_AXIS!r} divide. Received: {len(stages)} stages."
        )
    per_device = len(stages) // devices

    def on_device(device: int) -> Stage:
        """Returns what a device computes: its stages in turn."""

        def compute(rows: jax.Array, part: jax.Array, seed: jax.Array) -> jax.Array:
            for place in range(per_device):
                stage = device * per_device + place
                part = stages[stage](unpack_stage(rows[place], like[stage]), part, seed)
            return part

        return compute

    together = [on_device(device) for device in range(devices)]
    if devices == 1:
        results = lax.map(lambda given: together[0](packed, *given), (parts, seeds))
    else:
        run = _Schedule(together, packed, parts, seeds)
        results = (run.results if schedule == "gpipe" else run.in_turns())(packed, parts, seeds)
    return results.reshape(-1, *results.shape[2:])


def check_schedule(schedule: str) -> None:
    """Raises a ValueError where there is no such schedule."""
    if schedule not in SCHEDULES:
        raise ValueError(f"Expected a schedule of {SCHEDULES}. Received: {schedule!r}")


#: What goes from tick to tick in the gradient by 1F1B: what arrives from the device before, and
#: from the one behind; the inputs that wait; and the gradient of the device's rows so far.
_Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class _Schedule:
    """What each device along the stage axis does with the micro-batches.

    Args:
        stages: What each device computes.
        packed: The parameters of all.
        parts: The micro-batches, along the first axis.
        seeds: What the stages get for each, likewise.
    """

    def __init__(
        self, stages: Sequence[Stage], packed: jax.Array, parts: jax.Array, seeds: jax.Array
    ):
        rows = jax.ShapeDtypeStruct(
            (packed.shape[0] // len(stages), *packed.shape[1:]), packed.dtype
        )
        seed = jax.ShapeDtypeStruct(seeds.shape[1:], seeds.dtype)
        #: The micro-batch that each device gets, and the last one's result.
        self._values = [jax.ShapeDtypeStruct(parts.shape[1:], parts.dtype)]
        for stage in stages:
            self._values.append(jax.eval_shape(stage, rows, self._values[-1], seed))
        sent = self._values[1:]
        if len({value.dtype for value in sent}) > 1:
            raise ValueError(
                "Expected stages whose results have one dtype. Received: "
                f"{[str(value.dtype) for value in sent]}"
            )
        self._stages = stages
        #: Whether the micro-batches are such that a gradient of them exists.
        self._has_gradient = jnp.issubdtype(parts.dtype, jnp.inexact)
        self._width = max(math.prod(value.shape) for value in sent)
        self._dtype = sent[0].dtype

    def results(self, packed: jax.Array, parts: jax.Array, seeds: jax.Array) -> jax.Array:
        """Returns the last device's results, along the first axis."""
        forward = self._on_all(self._forward, PartitionSpec(STAGE_AXIS))
        return forward(jnp.arange(len(self._stages)), packed, parts, seeds)[-1]

    def in_turns(self) -> Callable[..., jax.Array]:
        """Returns `results` with a gradient by 1F1B."""

        def forward(*given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            return self.results(*given), given

        def backward(given: tuple[jax.Array, ...], cotangents: jax.Array) -> tuple[Any, Any, None]:
            of_stages = PartitionSpec(STAGE_AXIS)
            gradients = self._on_all(self._gradients, (of_stages, of_stages))
            of_packed, of_parts = gradients(jnp.arange(len(self._stages)), *given, cotangents)
            return of_packed, of_parts[0] if self._has_gradient else None, None

        pipelined = jax.custom_vjp(self.results)
        pipelined.defvjp(forward, backward)
        return pipelined

    def _on_all(self, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        """Returns `function` of a device's number, its rows and what all have, on all devices."""

        def run(devices: jax.Array, packed: jax.Array, *of_all: jax.Array) -> Any:
            return jax.shard_map(
                function,
                in_specs=(*(PartitionSpec(STAGE_AXIS),) * 2, *(PartitionSpec(),) * len(of_all)),
                out_specs=out_specs,
                axis_names={STAGE_AXIS},
                check_vma=False,
            )(devices, packed, *of_all)

        return run

    def _forward(
        self, device: jax.Array, rows: jax.Array, parts: jax.Array, seeds: jax.Array
    ) -> jax.Array:
        """Returns the results, behind an axis of size 1: those of the last device count."""
        count = len(self._stages)
        branches = [self._branch(place) for place in range(count)]
        branches.append(lambda rows, part, wire, seed: jnp.zeros_like(wire))
        last = self._values[-1]
        size = math.prod(last.shape)

        def tick(wire: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
            index, is_busy = _due(time - device[0], len(parts))
            # A device that is idle computes nothing: of nothing, a gradient may be no number.
            choice = jnp.where(is_busy, device[0], count)
            result = lax.switch(choice, branches, rows, parts[index], wire, seeds[index])
            return lax.ppermute(result, STAGE_AXIS, _to_next(count)), result[:size]

        start = jnp.zeros(self._width, self._dtype)
        # Of a tick, what arrived is kept. (Of stages that are checkpoints, their weights would be.)
        in_turn = jax.checkpoint(tick, prevent_cse=False)
        _, results = lax.scan(in_turn, start, jnp.arange(len(parts) + count - 1))
        return results[count - 1 :].reshape(1, len(parts), *last.shape)

    def _gradients(
        self,
        device: jax.Array,
        rows: jax.Array,
        parts: jax.Array,
        seeds: jax.Array,
        cotangents: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the gradient of a device's rows, and, behind an axis of size 1, that of the
        micro-batches: the first device's counts.

        In tick t, device s computes micro-batch t - s, and the gradient of t - 2 (S - 1) + s: the
        last one of the micro-batch that has just arrived.
        """
        count = len(self._stages)
        delay = 2 * (count - 1)
        # Of the last device, nobody needs the results.
        ahead = [self._branch(place) for place in range(count - 1)]
        ahead.append(lambda rows, part, wire, seed: jnp.zeros_like(wire))
        behind = [self._pullback(place) for place in range(count)]
        behind.append(
            lambda rows, part, kept, seed, cotangent, back: (
                jnp.zeros_like(rows),
                jnp.zeros_like(back),
                self._no_gradient(part),
            )
        )

        def tick(carry: _Carry, time: jax.Array) -> tuple[_Carry, jax.Array]:
            wire, back, waiting, total = carry
            index, is_busy = _due(time - device[0], len(parts))
            place = index % len(waiting)
            waiting = waiting.at[place].set(jnp.where(is_busy, wire, waiting[place]))
            choice = jnp.where(is_busy, device[0], count - 1)
            sent = lax.switch(choice, ahead, rows, parts[index], wire, seeds[index])

            index, is_busy = _due(time - delay + device[0], len(parts))
            of_rows, of_arrived, of_part = lax.switch(
                jnp.where(is_busy, device[0], count),
                behind,
                rows,
                parts[index],
                waiting[index % len(waiting)],
                seeds[index],
                cotangents[index],
                back,
            )
            wire = lax.ppermute(sent, STAGE_AXIS, _to_next(count))
            back = lax.ppermute(of_arrived, STAGE_AXIS, _to_previous(count))
            return (wire, back, waiting, total + of_rows), of_part

        wire = jnp.zeros(self._width, self._dtype)
        start = wire, wire, jnp.zeros((delay + 1, self._width), self._dtype), jnp.zeros_like(rows)
        (*_, total), of_parts = lax.scan(tick, start, jnp.arange(len(parts) + delay))
        return total, of_parts[None, delay:]

    def _no_gradient(self, part: jax.Array) -> jax.Array:
        """Returns what stands for a micro-batch's gradient where there is none."""
        return jnp.zeros_like(part) if self._has_gradient else jnp.zeros(())

    def _pullback(self, place: int) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
        """Returns what one device makes of the gradient of its result: those of its rows, of what
        arrived (flat and padded), and of the micro-batch.
        """
        compute = self._branch(place)

        def pull(
            rows: jax.Array,
            part: jax.Array,
            kept: jax.Array,
            seed: jax.Array,
            cotangent: jax.Array,
            back: jax.Array,
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            if place == len(self._stages) - 1:
                flat = cotangent.reshape(-1)
                back = jnp.pad(flat, (0, self._width - flat.size))
            if place or not self._has_gradient:
                _, pullback = jax.vjp(lambda *of: compute(of[0], part, of[1], seed), rows, kept)
                return *pullback(back), self._no_gradient(part)
            _, pullback = jax.vjp(lambda *of: compute(*of, kept, seed), rows, part)
            of_rows, of_part = pullback(back)
            return of_rows, jnp.zeros_like(back), of_part

        return pull

    def _branch(self, place: int) -> Callable[..., jax.Array]:
        """Returns what one device computes of what arrives, which is flat and padded."""
        arriving = self._values[place]

        def compute(
            rows: jax.Array, part: jax.Array, wire: jax.Array, seed: jax.Array
        ) -> jax.Array:
            if place:
                part = wire[: math.prod(arriving.shape)].reshape(arriving.shape)
            result = self._stages[place](rows, part, seed).reshape(-1)
            return jnp.pad(result, (0, self._width - result.size))

        return compute


def _to_next(count: int) -> list[tuple[int, int]]:
    return [(place, place + 1) for place in range(count - 1)]


def _to_previous(count: int) -> list[tuple[int, int]]:
    return [(place + 1, place) for place in range(count - 1)]


def _due(index: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the micro-batch that is due, of so many, and whether there is one."""
    return jnp.clip(index, 0, count - 1), (index >= 0) & (index < count)
