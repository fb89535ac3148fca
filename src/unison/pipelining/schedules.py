"""Which micro-batch each device of a pipeline computes at which time.

It is GPipe's schedule (Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism"): in tick t, stage s computes micro-batch t - s and hands the result on. Of M
micro-batches and S devices, M + S - 1 ticks, a device is idle in S - 1: the bubble, a share of
(S - 1) / (M + S - 1). The gradient runs the same ticks backwards; each stage keeps its inputs only,
and computes the rest again.

Or it is 1F1B's ("one forward, one backward": Narayanan et al. 2019, "PipeDream: Generalized
Pipeline Parallelism for DNN Training"): in every tick a device computes one micro-batch, and the
gradient of one whose input it has kept. The inputs of 2 S - 1 micro-batches at most wait on a
device, however many there are: a tick for each stage forward, and one for each back. A pipeline
that knows the loss runs so once: the last device begins with the gradient of a micro-batch when its
result is there. One that is a part of a model learns the gradient of its results only when all
micro-batches have gone through it: they go through it once more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.sharding import PartitionSpec

#: The name of the mesh axis along which the stages lie.
STAGE_AXIS = "stage"

#: In which order the devices compute.
SCHEDULES = ("gpipe", "1f1b")

#: Maps the parameters of a stage, a micro-batch, and the latter's seed or index, to its result.
Stage = Callable[[Any, jax.Array, jax.Array], jax.Array]

#: Maps the result of a micro-batch and its targets to a scalar.
Loss = Callable[[jax.Array, Any], jax.Array]

#: What goes from tick to tick in the gradient by 1F1B: what arrives from the device before, and
#: from the one behind; the inputs that wait; and the gradient of the device's rows so far.
_Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def bubble(microbatches: int, devices: int) -> float:
    """Returns the share of ticks in which a device of a pipeline is idle.

    Examples:
        >>> bubble(microbatches=12, devices=4)
        0.2
    """
    return (devices - 1) / (microbatches + devices - 1)


def check_schedule(schedule: str) -> None:
    """Raises a ValueError where there is no such schedule."""
    if schedule not in SCHEDULES:
        raise ValueError(f"Expected a schedule of {SCHEDULES}. Received: {schedule!r}")


class Schedule:
    """What each device along the stage axis does with the micro-batches.

    Args:
        stages: What each device computes; two or more.
        packed: The parameters of all.
        parts: The micro-batches, along the first axis.
        seeds: What the stages get for each, likewise.

    Raises:
        ValueError: The stages' results differ in their dtypes.
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
        #: How many elements go from device to device.
        self._width = max(math.prod(value.shape) for value in sent[:-1])
        self._dtype = sent[0].dtype

    def results(self, packed: jax.Array, parts: jax.Array, seeds: jax.Array) -> jax.Array:
        """Returns the last device's results, along the first axis."""
        return self._on_all(self._forward)(packed, parts, seeds)[-1]

    def in_turns(self) -> Callable[..., jax.Array]:
        """Returns `results` with a gradient by 1F1B."""

        def forward(*given: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            return self.results(*given), given

        def backward(given: tuple[jax.Array, ...], cotangents: jax.Array) -> tuple[Any, Any, None]:
            of_packed, of_parts, _ = self._on_all(self._gradients)(*given, cotangents)
            return of_packed, of_parts[0] if self._has_gradient else None, None

        pipelined = jax.custom_vjp(self.results)
        pipelined.defvjp(forward, backward)
        return pipelined

    def with_loss(self, loss: Loss) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Returns what also takes targets, along the first axis, and returns the mean loss before
        the results. The gradient of that loss is found with it, by 1F1B.
        """

        def evaluated(
            packed: jax.Array, parts: jax.Array, seeds: jax.Array, targets: Any
        ) -> tuple[jax.Array, jax.Array]:
            results = self.results(packed, parts, seeds)
            return lax.map(lambda given: loss(*given), (results, targets)).mean(), results

        def forward(*arguments: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
            given = custom_vjp_primal_tree_values(arguments)
            run = self._on_all(functools.partial(self._gradients, loss=loss))
            of_packed, of_parts, (losses, results) = run(*given)
            return (losses[-1].mean(), results[-1]), (given[:3], of_packed, of_parts[0])

        def backward(kept: Any, cotangents: Any) -> tuple[Any, Any, None, None]:
            given, *gradients = kept
            of_loss, of_results = cotangents
            if isinstance(of_loss, SymbolicZero):
                gradients = [jnp.zeros_like(gradient) for gradient in gradients]
            else:
                gradients = [gradient * of_loss.astype(gradient.dtype) for gradient in gradients]
            if not isinstance(of_results, SymbolicZero):
                further = self._on_all(self._gradients)(*given, of_results)
                gradients = [gradients[0] + further[0], gradients[1] + further[1][0]]
            return gradients[0], gradients[1] if self._has_gradient else None, None, None

        pipelined = jax.custom_vjp(evaluated)
        pipelined.defvjp(forward, backward, symbolic_zeros=True)
        return pipelined

    def _on_all(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` of a device's number, its rows and what all have, on all devices.

        What the devices return lies along the first axis.
        """
        of_stages = PartitionSpec(STAGE_AXIS)

        def run(packed: jax.Array, *of_all: Any) -> Any:
            return jax.shard_map(
                function,
                in_specs=(of_stages, of_stages, *(PartitionSpec(),) * len(of_all)),
                out_specs=of_stages,
                axis_names={STAGE_AXIS},
                check_vma=False,
            )(jnp.arange(len(self._stages)), packed, *of_all)

        return run

    def _forward(
        self, device: jax.Array, rows: jax.Array, parts: jax.Array, seeds: jax.Array
    ) -> jax.Array:
        """Returns the results, behind an axis of size 1: those of the last device count."""
        count = len(self._stages)
        last = self._values[-1]
        size = math.prod(last.shape)
        width = max(self._width, size)
        branches = [self._flat(place, width) for place in range(count)]
        branches.append(lambda rows, part, wire, seed: jnp.zeros(width, self._dtype))

        def tick(wire: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
            index, is_busy = _due(time - device[0], len(parts))
            # A device that is idle computes nothing: of nothing, a gradient may be no number.
            choice = jnp.where(is_busy, device[0], count)
            result = lax.switch(choice, branches, rows, parts[index], wire, seeds[index])
            sent = lax.ppermute(result[: self._width], STAGE_AXIS, _to_next(count))
            return sent, result[:size]

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
        ends: Any,
        loss: Loss | None = None,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Returns the gradient of a device's rows, and, behind an axis of size 1, that of the
        micro-batches, of which the first device's counts, and what the last device tells.

        In tick t, device s computes micro-batch t - s, and the gradient of t - 2 (S - 1) + s: the
        last one of the micro-batch that has just arrived.

        Args:
            device: Its number.
            rows: Its rows.
            parts: The micro-batches.
            seeds: As ever.
            ends: For each micro-batch, its targets; without a `loss`, the gradient of its result.
            loss: Of a micro-batch. The last device then tells the losses and the results, along the
                axis behind; otherwise nothing.
        """
        count = len(self._stages)
        delay = 2 * (count - 1)
        # What the last device computes forward, it computes with the gradient.
        ahead = [self._flat(place, self._width) for place in range(count - 1)]
        ahead.append(lambda rows, part, wire, seed: jnp.zeros_like(wire))
        nothing = self._nothing_told(ends, loss)
        behind = [self._pullback(place, nothing) for place in range(count - 1)]
        behind.append(self._pullback_of_last(1 / len(parts), loss))
        behind.append(
            lambda rows, part, kept, seed, end, back: (
                jnp.zeros_like(rows),
                jnp.zeros_like(back),
                self._no_gradient(part),
                nothing,
            )
        )

        def tick(carry: _Carry, time: jax.Array) -> tuple[_Carry, Any]:
            wire, back, waiting, total = carry
            index, is_busy = _due(time - device[0], len(parts))
            place = index % len(waiting)
            waiting = waiting.at[place].set(jnp.where(is_busy, wire, waiting[place]))
            choice = jnp.where(is_busy, device[0], count - 1)
            sent = lax.switch(choice, ahead, rows, parts[index], wire, seeds[index])

            index, is_busy = _due(time - delay + device[0], len(parts))
            of_rows, of_arrived, of_part, now = lax.switch(
                jnp.where(is_busy, device[0], count),
                behind,
                rows,
                parts[index],
                waiting[index % len(waiting)],
                seeds[index],
                jax.tree.map(lambda leaf: leaf[index], ends),
                back,
            )
            wire = lax.ppermute(sent, STAGE_AXIS, _to_next(count))
            back = lax.ppermute(of_arrived, STAGE_AXIS, _to_previous(count))
            return (wire, back, waiting, total + of_rows), (of_part, now)

        wire = jnp.zeros(self._width, self._dtype)
        start = wire, wire, jnp.zeros((delay + 1, self._width), self._dtype), jnp.zeros_like(rows)
        times = jnp.arange(len(parts) + delay)
        (*_, total), (of_parts, told) = lax.scan(tick, start, times)
        # The first device's gradients come last, the last one's losses when results arrive there.
        of_last = jax.tree.map(lambda leaf: leaf[None, count - 1 :][:, : len(parts)], told)
        return total, of_parts[None, delay:], of_last

    def _nothing_told(self, ends: Any, loss: Loss | None) -> Any:
        """Returns what a device tells of a micro-batch that is not the last one or is idle."""
        if loss is None:
            return ()
        end = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ends)
        result = self._values[-1]
        value = jax.eval_shape(loss, result, end)
        return tuple(jnp.zeros(each.shape, each.dtype) for each in (value, result))

    def _no_gradient(self, part: jax.Array) -> jax.Array:
        """Returns what stands for a micro-batch's gradient where there is none."""
        return jnp.zeros_like(part) if self._has_gradient else jnp.zeros(())

    def _pullback(self, place: int, nothing: Any) -> Callable[..., Any]:
        """Returns what a device but the last makes of the gradient of its result, which is flat:
        those of its rows, of what arrived (likewise), and of the micro-batch; it tells nothing.
        """
        compute = self._flat(place, self._width)

        def pull(
            rows: jax.Array,
            part: jax.Array,
            kept: jax.Array,
            seed: jax.Array,
            end: Any,
            back: jax.Array,
        ) -> tuple[Any, ...]:
            if place or not self._has_gradient:
                _, pullback = jax.vjp(lambda *of: compute(of[0], part, of[1], seed), rows, kept)
                return *pullback(back), self._no_gradient(part), nothing
            _, pullback = jax.vjp(lambda *of: compute(*of, kept, seed), rows, part)
            of_rows, of_part = pullback(back)
            return of_rows, jnp.zeros_like(back), of_part, nothing

        return pull

    def _pullback_of_last(self, weight: float, loss: Loss | None) -> Callable[..., Any]:
        """Returns the same of the last device: of the gradient of its result; or, with targets, of
        its loss, which counts by `weight`.
        """
        compute = self._computed(len(self._stages) - 1)

        def pull(
            rows: jax.Array,
            part: jax.Array,
            kept: jax.Array,
            seed: jax.Array,
            end: Any,
            back: jax.Array,
        ) -> tuple[Any, ...]:
            def forward(rows: jax.Array, kept: jax.Array) -> tuple[jax.Array, Any]:
                result = compute(rows, part, kept, seed)
                if loss is None:
                    return result, ()
                value = loss(result, end)
                return value, (value, result)

            value, pullback, told = jax.vjp(forward, rows, kept, has_aux=True)
            gradients = pullback(end if loss is None else jnp.full_like(value, weight))
            return *gradients, self._no_gradient(part), told

        return pull

    def _flat(self, place: int, width: int) -> Callable[..., jax.Array]:
        """Returns what one device computes of what arrives: both flat and padded."""
        compute = self._computed(place)

        def flat(*given: jax.Array) -> jax.Array:
            result = compute(*given).reshape(-1)
            return jnp.pad(result, (0, width - result.size))

        return flat

    def _computed(self, place: int) -> Callable[..., jax.Array]:
        """Returns what one device computes of what arrives, which is flat and padded."""
        arriving = self._values[place]

        def compute(
            rows: jax.Array, part: jax.Array, wire: jax.Array, seed: jax.Array
        ) -> jax.Array:
            if place:
                part = wire[: math.prod(arriving.shape)].reshape(arriving.shape)
            return self._stages[place](rows, part, seed)

        return compute


def _to_next(count: int) -> list[tuple[int, int]]:
    return [(place, place + 1) for place in range(count - 1)]


def _to_previous(count: int) -> list[tuple[int, int]]:
    return [(place + 1, place) for place in range(count - 1)]


def _due(index: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the micro-batch that is due, of so many, and whether there is one."""
    return jnp.clip(index, 0, count - 1), (index >= 0) & (index < count)
