"""Schedules of a pipeline: which micro-batch each device computes at which time.

One is GPipe's schedule (Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks
using Pipeline Parallelism"): in tick t, stage s computes micro-batch t - s and sends the result to
the next stage. With M micro-batches and S devices there are M + S - 1 ticks, of which a device is
idle in S - 1: the bubble, a fraction of (S - 1) / (M + S - 1). The gradient runs the same ticks
backwards; each stage keeps only its inputs, and recomputes the rest.

The other is 1F1B's ("one forward, one backward": Narayanan et al. 2019, "PipeDream: Generalized
Pipeline Parallelism for DNN Training"): in every tick a device computes one micro-batch, and the
gradient of one whose input it has kept. A device keeps the inputs of at most 2 S - 1 micro-batches,
however many there are: one tick for each stage forward, and one for each back. A pipeline that
computes the loss itself needs one such run: the last device begins with the gradient of a
micro-batch as soon as its result is available. A pipeline that is only a part of a model gets the
gradient of its results after all micro-batches have passed through it, so they pass through it a
second time.
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

#: The name of the mesh axis of the stages.
STAGE_AXIS = "stage"

#: The schedules, which differ in the order in which the devices compute.
SCHEDULES = ("gpipe", "1f1b")

#: Maps the parameters of a stage, a micro-batch, and the latter's seed or index, to its result.
Stage = Callable[[Any, jax.Array, jax.Array], jax.Array]

#: Maps the result of a micro-batch and its targets to a scalar.
Loss = Callable[[jax.Array, Any], jax.Array]

#: The loop state of 1F1B's gradient: the data from the previous device and from
#: the next one, the stored inputs, and the gradient of the device's rows so far.
_Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def bubble(microbatches: int, devices: int) -> float:
    """Returns the fraction of ticks in which a device of a pipeline is idle.

    Examples:
        >>> bubble(microbatches=12, devices=4)
        0.2
    """
    return (devices - 1) / (microbatches + devices - 1)


def check_schedule(schedule: str) -> None:
    """Raises a ValueError if there is no such schedule."""
    if schedule not in SCHEDULES:
        raise ValueError(f"Expected a schedule of {SCHEDULES}. Received: {schedule!r}")


class Schedule:
    """The computation of each device along the stage axis on the micro-batches.

    Args:
        stages: The functions of the devices, one for each; two or more.
        packed: The packed parameters of all stages.
        parts: The micro-batches, along the first axis.
        seeds: The seed of each micro-batch, likewise.

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
        #: The shape and dtype of each device's input, and of the last one's result.
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
        #: Whether the micro-batches are differentiable.
        self._has_gradient = jnp.issubdtype(parts.dtype, jnp.inexact)
        #: The number of elements that are sent from device to device.
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
        """Returns a function that also takes targets, along the first axis, and returns the mean
        loss and the results. The gradient of that loss is computed together with it, by 1F1B.
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
        """Returns `function` of a device's index, its rows and shared arguments, on all devices.

        The devices' results are concatenated along the first axis.
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
        """Returns the results, with a leading axis of size 1; only the last device's are used."""
        count = len(self._stages)
        last = self._values[-1]
        size = math.prod(last.shape)
        width = max(self._width, size)
        branches = [self._flat(place, width) for place in range(count)]
        branches.append(lambda rows, part, wire, seed: jnp.zeros(width, self._dtype))

        def tick(wire: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
            index, is_busy = _due(time - device[0], len(parts))
            # An idle device computes nothing: a gradient of its placeholder input might be NaN.
            choice = jnp.where(is_busy, device[0], count)
            result = lax.switch(choice, branches, rows, parts[index], wire, seeds[index])
            sent = lax.ppermute(result[: self._width], STAGE_AXIS, _to_next(count))
            return sent, result[:size]

        start = jnp.zeros(self._width, self._dtype)
        # Each tick keeps what arrived. (If the stages were checkpointed, it would keep their
        # weights.)
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
        """Returns the gradient of a device's rows, and, with a leading axis of size 1, that of the
        micro-batches, of which only the first device's is used, and the outputs of the last device.

        In tick t, device s computes micro-batch t - s, and the gradient of t - 2 (S - 1) + s: on
        the last device, that is the micro-batch that has just arrived.

        Args:
            device: The device's index.
            rows: The device's rows of the parameters.
            parts: The micro-batches.
            seeds: The seeds of the micro-batches.
            ends: For each micro-batch, its targets; without a `loss`, the gradient of its result.
            loss: The loss of a micro-batch. If given, the last device outputs the losses and the
                results, along the second axis; otherwise it outputs nothing.
        """
        count = len(self._stages)
        delay = 2 * (count - 1)
        # The last device does its forward computation together with the gradient.
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
        # The first device's gradients are in the last ticks, the last device's losses in those in
        # which results arrive there.
        of_last = jax.tree.map(lambda leaf: leaf[None, count - 1 :][:, : len(parts)], told)
        return total, of_parts[None, delay:], of_last

    def _nothing_told(self, ends: Any, loss: Loss | None) -> Any:
        """Returns the outputs of a device that is not the last one or is idle."""
        if loss is None:
            return ()
        end = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ends)
        result = self._values[-1]
        value = jax.eval_shape(loss, result, end)
        return tuple(jnp.zeros(each.shape, each.dtype) for each in (value, result))

    def _no_gradient(self, part: jax.Array) -> jax.Array:
        """Returns a placeholder for a micro-batch's gradient where there is none."""
        return jnp.zeros_like(part) if self._has_gradient else jnp.zeros(())

    def _pullback(self, place: int, nothing: Any) -> Callable[..., Any]:
        """Returns the pullback of a device other than the last: it maps the flat gradient of its
        result to those of its rows, of what arrived (also flat) and of the micro-batch, and outputs
        `nothing`.
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
        """Returns the pullback of the last device: of the gradient of its result or, if there is a
        `loss`, of its loss, weighted by `weight`.
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
        """Returns the computation of one device, with its input and result flat and padded."""
        compute = self._computed(place)

        def flat(*given: jax.Array) -> jax.Array:
            result = compute(*given).reshape(-1)
            return jnp.pad(result, (0, width - result.size))

        return flat

    def _computed(self, place: int) -> Callable[..., jax.Array]:
        """Returns the computation of one device, with its input flat and padded."""
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
    """Returns which of `count` micro-batches is due, and whether there is one."""
    return jnp.clip(index, 0, count - 1), (index >= 0) & (index < count)
