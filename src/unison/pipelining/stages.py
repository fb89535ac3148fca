"""Applies stages to a batch in micro-batches, and computes the loss of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unison.pipelining.packing import unpack_stage
from unison.pipelining.schedules import STAGE_AXIS, Loss, Schedule, Stage, check_schedule


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
    """Applies the stages, one after the other, to a replica's batch.

    In a function that `ModelParallelStrategy.run` calls, with a mesh axis `"stage"`, the devices
    along it compute an equal number of stages each; elsewhere, all stages are computed in turn.

    Args:
        stages: The stages; each maps (its parameters, a micro-batch, the micro-batch's seed) to a
            result with the examples along the first axis. Results have one dtype. A stage must not
            close over traced values.
        packed: Their parameters, from `pack_stages`, of which each device along the axis has its
            rows.
        batch: The replica's batch.
        like: For each stage, a tree of arrays (or `jax.ShapeDtypeStruct`s) like its parameters.
        microbatches: The number of parts into which the batch is divided.
        seeds: The seed of each micro-batch, along the first axis. Default: its index. Seeds are not
            differentiated.
        schedule: `"gpipe"`, which keeps the inputs of all micro-batches for the gradient; or
            `"1f1b"`, which keeps those of at most twice as many as there are devices, at the cost
            of another forward pass, which `pipeline_loss` avoids. The results are the same.

    Raises:
        ValueError: The batch, or the stages, cannot be divided evenly; or there is no such
            schedule.

    Examples:
        >>> import jax.numpy as jnp
        >>> from unison.pipelining import pack_stages
        >>> double, add = lambda w, x, _: w * x, lambda w, x, _: w + x
        >>> packed = pack_stages([jnp.array(2.0), jnp.array(1.0)])
        >>> like = [jnp.array(0.0)] * 2
        >>> pipeline([double, add], packed, jnp.arange(4.0), like=like, microbatches=2).tolist()
        [1.0, 3.0, 5.0, 7.0]
    """
    check_schedule(schedule)
    parts = _parts(batch, microbatches)
    seeds = jnp.arange(microbatches) if seeds is None else seeds
    together = _on_devices(stages, like)
    if len(together) == 1:
        results = lax.map(lambda given: together[0](packed, *given), (parts, seeds))
    else:
        run = Schedule(together, packed, parts, seeds)
        results = (run.results if schedule == "gpipe" else run.in_turns())(packed, parts, seeds)
    return results.reshape(-1, *results.shape[2:])


def pipeline_loss(
    stages: Sequence[Stage],
    packed: jax.Array,
    batch: jax.Array,
    loss: Loss,
    targets: Any,
    *,
    like: Sequence[Any],
    microbatches: int,
    seeds: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss of the micro-batches, and the result of the stages on the batch.

    The gradient of the loss is computed by 1F1B together with the loss: the last device computes a
    micro-batch's loss as soon as its result is available, and begins with the gradient immediately.
    Nothing is computed twice, except that each device but the last recomputes its results from the
    inputs it keeps, as in GPipe's schedule. If the results are used otherwise, their gradient is
    exact, but takes another run. See `pipeline` for the devices.

    Args:
        stages: As for `pipeline`.
        packed: Likewise.
        batch: Likewise.
        loss: Maps (the result of a micro-batch, its targets) to a scalar: the mean over its
            examples, if the mean over the batch is to be returned. It must not close over traced
            values. It is differentiated unchanged, and the gradient is then multiplied by whatever
            the caller multiplies the loss by: a scale against underflow belongs inside `loss`.
        targets: A tree of arrays with the examples along the first axis. They are not
            differentiated.
        like: As for `pipeline`.
        microbatches: Likewise.
        seeds: Likewise.

    Raises:
        ValueError: As for `pipeline`; or the targets have a different number of examples; or a
            micro-batch's loss is not a scalar.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from unison.pipelining import pack_stages
        >>> double, add = lambda w, x, _: w * x, lambda w, x, _: w + x
        >>> like = [jnp.array(0.0)] * 2
        >>> def loss(packed):
        ...     error = lambda result, target: ((result - target) ** 2).mean()
        ...     examples, targets = jnp.arange(4.0), jnp.ones(4)
        ...     return pipeline_loss(
        ...         [double, add], packed, examples, error, targets, like=like, microbatches=2
        ...     )[0]
        >>> value, gradient = jax.value_and_grad(loss)(pack_stages([jnp.array(2.0)] * 2))
        >>> float(value), gradient[:, 0].tolist()
        (21.0, [17.0, 8.0])
    """
    parts = _parts(batch, microbatches)
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(targets)}
    if sizes - {batch.shape[:1]}:
        raise ValueError(
            f"Expected targets of {batch.shape[0]} examples, along the first axis. Received: "
            f"arrays of the shapes {[jnp.shape(leaf) for leaf in jax.tree.leaves(targets)]}"
        )
    of_parts = jax.tree.map(lambda leaf: _parts(jnp.asarray(leaf), microbatches), targets)
    seeds = jnp.arange(microbatches) if seeds is None else seeds
    together = _on_devices(stages, like)

    def scalar(result: jax.Array, target: Any) -> jax.Array:
        value = jnp.asarray(loss(result, target))
        if value.shape:
            raise ValueError(
                "Expected a loss that is a scalar for each micro-batch, such as a mean over its "
                f"examples. Received: one of shape {value.shape}"
            )
        return value

    if len(together) == 1:

        def compute(given: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
            part, seed, target = given
            result = together[0](packed, part, seed)
            return scalar(result, target), result

        losses, results = lax.map(compute, (parts, seeds, of_parts))
        value = losses.mean()
    else:
        run = Schedule(together, packed, parts, seeds)
        value, results = run.with_loss(scalar)(packed, parts, seeds, of_parts)
    return value, results.reshape(-1, *results.shape[2:])


def _parts(batch: jax.Array, microbatches: int) -> jax.Array:
    """Returns the micro-batches of a batch along the first axis."""
    if microbatches < 1 or batch.shape[0] % microbatches:
        raise ValueError(
            f"Expected a replica's batch that {microbatches} micro-batches divide. Received: "
            f"{batch.shape[0]} examples. Choose another batch size (of a dataset: drop_remainder) "
            "or number of micro-batches."
        )
    return batch.reshape(microbatches, -1, *batch.shape[1:])


def _on_devices(stages: Sequence[Stage], like: Sequence[Any]) -> list[Stage]:
    """Returns the function of each device on the stage axis: an equal number of stages in turn."""
    devices = dict(jax.sharding.get_abstract_mesh().shape).get(STAGE_AXIS, 1)
    if len(stages) % devices:
        raise ValueError(
            f"Expected a number of stages that the {devices} devices along mesh axis "
            f"{STAGE_AXIS!r} divide. Received: {len(stages)} stages."
        )
    per_device = len(stages) // devices

    def on_device(device: int) -> Callable[..., jax.Array]:
        def compute(rows: jax.Array, part: jax.Array, seed: jax.Array) -> jax.Array:
            for place in range(per_device):
                stage = device * per_device + place
                part = stages[stage](unpack_stage(rows[place], like[stage]), part, seed)
            return part

        return compute

    return [on_device(device) for device in range(devices)]
