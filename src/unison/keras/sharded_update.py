"""Each replica updates a part of the weights: the update is sharded, not repeated.

With an all-reduce every replica has the whole gradient, and all of them do the same update. Here
the gradient of a large weight is reduce-scattered, each replica updates its part (the optimizer's
slots of other parts it does not even store), and the new parts are all-gathered: the same bytes on
the wire, a replica's part of the arithmetic and memory traffic, and a part of the optimizer's
memory (Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
Training"; Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"). Where the weights themselves are sharded, a step gets them whole, and each is gathered
where it is used (`unison.lowering.gathering`).

It is used where it was measured to win: on logical CPU devices of one process, which share one
memory bus. Between processes, gathering the weights takes longer than updating all of them. On
accelerators, where it saves memory but no time (`docs/performance.md`), it is used where it is
asked for (`ModelParallelStrategy(zero=1)`, `TPUStrategy(sharded_update=True)`).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.sharding import PartitionSpec

from unison.cells import Cell, Layout
from unison.collectives import AggregationMethod, all_reduce_packed
from unison.keras.aggregation import aggregation_method_of, compression_of
from unison.keras.variables import ReplicatedVariable
from unison.lifting import all_parts, own_part, part_of_sum
from unison.profiling.regions import AGGREGATE
from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.thread_local import ThreadLocal

logger = logging.getLogger("unison")

#: By the id of a whole value, the value and this replica's part of it.
_parts: ThreadLocal[dict[int, tuple[Any, Any]]] = ThreadLocal(default_factory=dict)

#: Smaller weights are cheaper to update everywhere than to gather.
_SMALLEST_SHARDED_SIZE = 2**16

_UPDATES_WHOLE_WEIGHTS = (
    "%s optimizer %r: its update of a weight's part needs the whole weight (by its class, "
    "constraints, averages, accumulated gradients, an aggregation method or compression). Every "
    "replica updates all."
)

#: Optimizers that update every element by itself, so that any part of a weight can be updated
#: alone. Subclasses may do otherwise.
_ELEMENTWISE = frozenset(
    {
        keras.optimizers.SGD,
        keras.optimizers.Adam,
        keras.optimizers.AdamW,
        keras.optimizers.RMSprop,
        keras.optimizers.Adagrad,
        keras.optimizers.Adadelta,
        keras.optimizers.Adamax,
        keras.optimizers.Nadam,
        keras.optimizers.Lion,
    }
)


def shard_slots(optimizer: keras.optimizers.Optimizer, placement: Placement) -> None:
    """Shards the optimizer's slots of large weights, where that wins.

    Args:
        optimizer: A built optimizer, whose variables have been adopted.
        placement: The replicas' devices.
    """
    if placement.zero:
        if not _can_be_sharded(optimizer):
            does = f"zero={placement.zero} divides the state, but not the update, of"
            logger.warning(_UPDATES_WHOLE_WEIGHTS, does, type(optimizer).__name__)
        return  # the slots have been sharded when they were made
    if not _is_worth_sharding(placement):
        return
    if not _can_be_sharded(optimizer):
        if placement.shards_update:
            does = "sharded_update=True has no effect on"
            logger.warning(_UPDATES_WHOLE_WEIGHTS, does, type(optimizer).__name__)
        return
    axes: dict[Any, int] = {}
    for weight in optimizer._trainable_variables:
        if math.prod(weight.shape) >= _SMALLEST_SHARDED_SIZE:
            axis = placement.axis_for_replicas(weight.cell.placed_as, weight.shape)
            if axis is not None:
                axes[_key(weight)] = axis
    for variable in optimizer.variables:
        if _key(variable) in axes:
            variable.cell.shard(axes[_key(variable)])


@contextlib.contextmanager
def whole_state(cells: Sequence[Cell], state: Sequence[jax.Array]) -> Iterator[list[jax.Array]]:
    """Yields `state` with whole values in place of this replica's parts.

    A step may look at any variable. Those that only `sharded_apply` looks at are not gathered:
    it finds the parts again, and XLA eliminates unused values.
    """
    whole = [
        all_parts(value, cell.division) if cell.layout is Layout.SHARDED else value
        for cell, value in zip(cells, state, strict=False)
    ]
    pairs = zip(whole, state, strict=False)
    with _parts.bound_to({id(value): (value, part) for value, part in pairs if value is not part}):
        yield whole


def own_state(
    cells: Sequence[Cell], before: Sequence[jax.Array], after: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the state `after` a step with parts in place of whole values, as it was `before`."""
    return [
        _part_of(new, cell.division)
        if cell.layout is Layout.SHARDED and new.shape != old.shape
        else new
        for cell, old, new in zip(cells, before, after, strict=False)
    ]


def _part_of(whole: jax.Array, division: PartitionSpec) -> jax.Array:
    _, known = _parts.value.get(id(whole), (None, None))
    return own_part(whole, division) if known is None else known


def _whole_of(part: jax.Array, division: PartitionSpec) -> jax.Array:
    """Returns the whole of a new value, of which `_part_of` knows the part."""
    whole = all_parts(part, division)
    # Held together with the whole: the id of what is gone may be another's.
    _parts.value[id(whole)] = (whole, part)
    return whole


def sharded_apply(
    optimizer: keras.optimizers.Optimizer,
    optimizer_variables: Sequence[jax.Array],
    gradients: Sequence[jax.Array | None],
    trainable_variables: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """`optimizer.stateless_apply` with weights or slots that are sharded.

    Args:
        optimizer: The optimizer.
        optimizer_variables: Its variables' values, whole.
        gradients: This replica's gradients, one for each trainable variable (None: it was not
            used); they are summed over the replicas here.
        trainable_variables: The whole weights.

    Returns:
        The new weights, whole, and the new values of the optimizer's variables: of sharded ones,
        this replica's part.
    """
    num_replicas = lax.axis_size(REPLICA_AXIS)
    weights = optimizer._trainable_variables
    division_of = _divisions(optimizer)
    divisions = [division_of.get(_key(weight)) for weight in weights]
    present = {index: grad for index, grad in enumerate(gradients) if grad is not None}
    summed: list[jax.Array | None] = [None] * len(weights)
    whole = {index: grad for index, grad in present.items() if not divisions[index]}
    with jax.named_scope(AGGREGATE):
        totals = all_reduce_packed(list(whole.values()))
        for index, grad in present.items():
            if division := divisions[index]:
                summed[index] = part_of_sum(grad, division)
    for index, total in zip(whole, totals, strict=True):
        summed[index] = total
    scope = keras.StatelessScope()
    for variable, value, of_weight in zip(weights, trainable_variables, divisions, strict=True):
        scope.add_update((variable, _part_of(value, of_weight) if of_weight else value))
    for variable, value in zip(optimizer.variables, optimizer_variables, strict=True):
        is_sharded_slot = variable.cell.layout is Layout.SHARDED
        scope.add_update(
            (variable, _part_of(value, variable.cell.division) if is_sharded_slot else value)
        )
    everything = {id(variable): variable for variable in (*weights, *optimizer.variables)}
    parts = [
        (variable, division_of[_key(variable)].index(REPLICA_AXIS))
        for variable in everything.values()
        if _key(variable) in division_of
    ]
    are_parts = [divisions[index] is not None for index in sorted(present)]
    with scope, _declared_as_parts(parts, num_replicas), _clipping(optimizer, are_parts):
        type(optimizer).apply(optimizer, summed)
    updated = [scope.get_current_value(variable) for variable in weights]
    return (
        [
            _whole_of(value, division) if division else value
            for value, division in zip(updated, divisions, strict=True)
        ],
        [scope.get_current_value(variable) for variable in optimizer.variables],
    )


def updates_parts(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether each replica updates a part of some weights: `sharded_apply` does it."""
    return bool(_divisions(optimizer)) and _can_be_sharded(optimizer)


def _divisions(optimizer: keras.optimizers.Optimizer) -> dict[Any, PartitionSpec]:
    """Returns how weights are divided that are sharded, or whose slots are."""
    variables = [*optimizer.variables, *getattr(optimizer, "_trainable_variables", ())]
    return {
        _key(variable): variable.cell.division
        for variable in variables
        if isinstance(variable, ReplicatedVariable) and variable.cell.layout is Layout.SHARDED
    }


def _key(variable: Any) -> tuple[str, tuple[int, ...]]:
    """Returns what a weight and its slots have in common."""
    return variable.cell.placed_as, tuple(variable.shape)


@contextlib.contextmanager
def _clipping(optimizer: keras.optimizers.Optimizer, are_parts: Sequence[bool]) -> Iterator[None]:
    """Inside, `optimizer` clips gradients, of which it has parts, by the norms of the wholes."""

    def squares(gradients: Sequence[jax.Array]) -> list[jax.Array]:
        own = [jnp.sum(jnp.square(gradient)) for gradient in gradients]
        of_parts = [square for square, is_part in zip(own, are_parts, strict=True) if is_part]
        totals = iter(lax.psum(of_parts, REPLICA_AXIS))
        return [
            next(totals) if is_part else square
            for square, is_part in zip(own, are_parts, strict=True)
        ]

    def clip(gradients: Sequence[jax.Array]) -> list[jax.Array]:
        if optimizer.clipnorm:
            most = optimizer.clipnorm
            norms = [jnp.sqrt(square) for square in squares(gradients)]
            return [g * most / jnp.maximum(n, most) for g, n in zip(gradients, norms, strict=True)]
        if optimizer.global_clipnorm:
            most = optimizer.global_clipnorm
            norm = jnp.sqrt(sum(squares(gradients)))
            # As Keras does: where the norm is no finite number, neither are the results.
            scale = most * jnp.minimum(1 / norm, 1 / most) + (norm - norm)
            return [gradient * scale for gradient in gradients]
        return type(optimizer)._clip_gradients(optimizer, gradients)

    vars(optimizer)["_clip_gradients"] = clip
    try:
        yield
    finally:
        del vars(optimizer)["_clip_gradients"]


def _is_worth_sharding(placement: Placement) -> bool:
    if placement.num_replicas == 1:
        return False
    if placement.shards_update is not None:
        return placement.shards_update
    return placement.platform == "cpu" and not placement.spans_processes


def _can_be_sharded(optimizer: keras.optimizers.Optimizer) -> bool:
    return (
        type(optimizer) in _ELEMENTWISE
        and aggregation_method_of(optimizer) is AggregationMethod.DEFAULT
        and compression_of(optimizer) is None
        and not optimizer.use_ema
        and not optimizer.gradient_accumulation_steps
        and not any(
            weight.constraint is not None or weight.overwrite_with_gradient
            for weight in optimizer._trainable_variables
        )
    )


@contextlib.contextmanager
def _declared_as_parts(variables: Sequence[tuple[Any, int]], num_replicas: int) -> Iterator[None]:
    """Inside, Keras takes variables to have the shapes of one replica's parts along an axis."""
    before = [(variable, variable._shape) for variable, _ in variables]
    for (variable, shape), (_, axis) in zip(before, variables, strict=True):
        variable._shape = (*shape[:axis], shape[axis] // num_replicas, *shape[axis + 1 :])
    try:
        yield
    finally:
        for variable, shape in before:
            variable._shape = shape
