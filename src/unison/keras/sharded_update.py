"""Each replica updates a part of the weights: the update is sharded, not repeated.

With an all-reduce every replica has the whole gradient, and all of them do the same update. Here
the gradient of a large weight is reduce-scattered, each replica updates its rows (the optimizer's
slots of other rows it does not even store), and the new rows are all-gathered: the same bytes on
the wire, a replica's part of the arithmetic and memory traffic, and a part of the optimizer's
memory (Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
Training"; ZeRO stage 1).

It is used where it was measured to win: on logical CPU devices of one process, which share one
memory bus. Between processes, gathering the weights takes longer than updating all of them. On a
TPU it is used where it is asked for (`TPUStrategy(sharded_update=True)`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
from jax import lax

from unison.cells import Cell, Layout
from unison.collectives import AggregationMethod, all_reduce_packed
from unison.keras.aggregation import aggregation_method_of, compression_of
from unison.keras.variables import ReplicatedVariable
from unison.lifting import own_rows
from unison.runtime.placement import REPLICA_AXIS, Placement

logger = logging.getLogger("unison")

_thread = threading.local()

#: Smaller weights are cheaper to update everywhere than to gather.
_SMALLEST_SHARDED_SIZE = 2**16

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
    if not _is_worth_sharding(placement):
        return
    if not _can_be_sharded(optimizer):
        if placement.shards_update:
            logger.warning(
                "sharded_update=True has no effect on optimizer %r: its update of a weight's part "
                "needs the whole weight (by its class, clipping by norm, averages, accumulated "
                "gradients, an aggregation method or compression). Every replica updates all.",
                type(optimizer).__name__,
            )
        return
    shapes = _sharded_shapes(optimizer._trainable_variables, placement.num_replicas)
    for variable in optimizer.variables:
        if variable.shape in shapes:
            variable.cell.shard()


@contextlib.contextmanager
def whole_state(cells: Sequence[Cell], state: Sequence[jax.Array]) -> Iterator[list[jax.Array]]:
    """Yields `state` with whole values in place of this replica's rows.

    A step may look at any variable. Those that only `sharded_apply` looks at are not gathered:
    it finds the rows again, and XLA drops what nobody uses.
    """
    whole = [
        lax.all_gather(value, REPLICA_AXIS, tiled=True) if cell.layout is Layout.SHARDED else value
        for cell, value in zip(cells, state, strict=False)
    ]
    _thread.rows = {id(value): rows for value, rows in zip(whole, state, strict=False)}
    try:
        yield whole
    finally:
        _thread.rows = {}


def own_state(
    cells: Sequence[Cell], before: Sequence[jax.Array], after: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the state `after` a step with rows in place of whole values, as it was `before`."""
    return [
        _rows_of(new) if cell.layout is Layout.SHARDED and new.shape != old.shape else new
        for cell, old, new in zip(cells, before, after, strict=False)
    ]


def _rows_of(whole: jax.Array) -> jax.Array:
    known = getattr(_thread, "rows", {}).get(id(whole))
    return own_rows(whole) if known is None else known


def sharded_apply(
    optimizer: keras.optimizers.Optimizer,
    optimizer_variables: Sequence[jax.Array],
    gradients: Sequence[jax.Array | None],
    trainable_variables: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """`optimizer.stateless_apply` with slots that `shard_slots` has sharded.

    Args:
        optimizer: The optimizer.
        optimizer_variables: Its variables' values, whole.
        gradients: This replica's gradients, one for each trainable variable (None: it was not
            used); they are summed over the replicas here.
        trainable_variables: The whole weights.

    Returns:
        The new weights, whole, and the new values of the optimizer's variables: of sharded ones,
        this replica's rows.
    """
    num_replicas = lax.axis_size(REPLICA_AXIS)
    weights = optimizer._trainable_variables
    shapes = {v.shape for v in optimizer.variables if v.cell.layout is Layout.SHARDED}
    split = [variable.shape in shapes for variable in weights]
    summed: list[jax.Array | None] = [None] * len(weights)
    present = {index: grad for index, grad in enumerate(gradients) if grad is not None}
    whole = {index: grad for index, grad in present.items() if not split[index]}
    for index, total in zip(whole, all_reduce_packed(list(whole.values())), strict=True):
        summed[index] = total
    for index in sorted(present.keys() - whole.keys()):
        summed[index] = lax.psum_scatter(present[index], REPLICA_AXIS, tiled=True)
    scope = keras.StatelessScope()
    for variable, value, is_split in zip(weights, trainable_variables, split, strict=True):
        scope.add_update((variable, own_rows(value) if is_split else value))
    for variable, value in zip(optimizer.variables, optimizer_variables, strict=True):
        is_sharded_slot = variable.cell.layout is Layout.SHARDED
        scope.add_update((variable, _rows_of(value) if is_sharded_slot else value))
    parts = [v for v in (*weights, *optimizer.variables) if v.shape in shapes]
    with scope, _declared_as_rows(parts, num_replicas):
        type(optimizer).apply(optimizer, summed)
    updated = [scope.get_current_value(variable) for variable in weights]
    return (
        [
            lax.all_gather(value, REPLICA_AXIS, tiled=True) if is_split else value
            for value, is_split in zip(updated, split, strict=True)
        ],
        [scope.get_current_value(variable) for variable in optimizer.variables],
    )


def is_sharded(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether some of the optimizer's slots are sharded."""
    return any(
        isinstance(variable, ReplicatedVariable) and variable.cell.layout is Layout.SHARDED
        for variable in optimizer.variables
    )


def _is_worth_sharding(placement: Placement) -> bool:
    if placement.num_replicas == 1:
        return False
    if placement.shards_update is not None:
        return placement.shards_update
    return placement.devices[0].platform == "cpu" and not placement.spans_processes


def _can_be_sharded(optimizer: keras.optimizers.Optimizer) -> bool:
    return (
        type(optimizer) in _ELEMENTWISE
        and aggregation_method_of(optimizer) is AggregationMethod.DEFAULT
        and compression_of(optimizer) is None
        and optimizer.clipnorm is None
        and optimizer.global_clipnorm is None
        and not optimizer.use_ema
        and not optimizer.gradient_accumulation_steps
    )


def _sharded_shapes(weights: Sequence[Any], num_replicas: int) -> set[tuple[int, ...]]:
    """Returns the shapes whose weights are split; all weights of a shape are, or none."""

    def can_be_split(weight: Any) -> bool:
        return (
            weight.ndim > 0
            and weight.shape[0] % num_replicas == 0
            and math.prod(weight.shape) >= _SMALLEST_SHARDED_SIZE
            and weight.constraint is None
            and not weight.overwrite_with_gradient
        )

    excluded = {weight.shape for weight in weights if not can_be_split(weight)}
    return {weight.shape for weight in weights} - excluded


@contextlib.contextmanager
def _declared_as_rows(variables: Sequence[Any], num_replicas: int) -> Iterator[None]:
    """Inside, Keras takes `variables` to have the shapes of one replica's rows."""
    shapes = [variable._shape for variable in variables]
    for variable, shape in zip(variables, shapes, strict=True):
        variable._shape = (shape[0] // num_replicas, *shape[1:])
    try:
        yield
    finally:
        for variable, shape in zip(variables, shapes, strict=True):
            variable._shape = shape
