"""Gradients are summed over the replicas where an optimizer applies them.

That is TensorFlow's rule, and it holds for every way to an optimizer: `fit`, an overridden
`train_step`, and `optimizer.apply` in a custom loop. In a custom loop the user scales the loss
(by the global batch), and gradients are summed as they are. In `fit` a replica's gradient is that
of its own mean loss, and counts by its share of the global batch's examples.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import keras

from unison.collectives import AggregationMethod, aggregate
from unison.keras.aggregation import aggregation_method_of
from unison.keras.sharded_update import is_sharded, sharded_apply
from unison.keras.share import current_share, share_of_gradients
from unison.lifting import current_lift
from unison.strategies import get_replica_context

_thread = threading.local()


def adopt_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes `optimizer` sum gradients over the replicas when it is used in a replica program."""
    if "apply" in vars(optimizer):
        return
    apply, stateless_apply = optimizer.apply, optimizer.stateless_apply
    scale_loss = optimizer.scale_loss

    @functools.wraps(apply)
    def apply_global(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        with _global_gradients(grads, aggregation_method_of(optimizer)) as summed:
            if current_lift() and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                return _apply_statelessly(optimizer, stateless_apply, summed, trainable_variables)
            return apply(summed, trainable_variables)

    @functools.wraps(stateless_apply)
    def stateless_apply_global(
        optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        if current_share() is not None and is_sharded(optimizer):
            local = _weighted(grads)
            new = sharded_apply(optimizer, optimizer_variables, local, trainable_variables)
        else:
            with _global_gradients(grads, aggregation_method_of(optimizer)) as summed:
                new = stateless_apply(optimizer_variables, summed, trainable_variables)
        for values in new:
            _known_equal().extend(values)
        return new

    @functools.wraps(scale_loss)
    def scale_weighted_loss(loss: Any) -> Any:
        if weighs_loss(optimizer) and current_share() is not None:
            loss = loss * current_share()
        return scale_loss(loss)

    # Past Keras' attribute tracking, and on this object only: its class stays Keras' own.
    vars(optimizer).update(
        apply=apply_global, stateless_apply=stateless_apply_global, scale_loss=scale_weighted_loss
    )


def weighs_loss(optimizer: keras.optimizers.Optimizer | None) -> bool:
    """Whether a replica's loss, and not its gradients, is multiplied by its share.

    In low precision it matters when: the scaled loss of a replica must overflow where that of one
    device would.
    """
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


@contextlib.contextmanager
def values_known_equal() -> Iterator[list[Any]]:
    """Yields a list of what optimizers return inside: values that are equal on all replicas."""
    _thread.known_equal = []
    try:
        yield _thread.known_equal
    finally:
        _thread.known_equal = None


def _known_equal() -> list[Any]:
    known = getattr(_thread, "known_equal", None)
    return [] if known is None else known


def _apply_statelessly(
    optimizer: keras.optimizers.Optimizer,
    stateless_apply: Callable[..., Any],
    grads: Sequence[Any],
    trainable_variables: Sequence[keras.Variable] | None,
) -> None:
    """Applies an optimizer that assigns its variables inside a conditional.

    A program sees what is assigned there only if the conditional returns it.
    """
    if not optimizer.built:
        optimizer.build(trainable_variables)
    # In the order in which the optimizer was built.
    weights = trainable_variables or optimizer._trainable_variables
    of_variable = {id(variable): grad for variable, grad in zip(weights, grads, strict=True)}
    weights = optimizer._trainable_variables
    new_weights, new_variables = stateless_apply(
        [variable.value for variable in optimizer.variables],
        [of_variable.get(id(variable)) for variable in weights],
        [variable.value for variable in weights],
    )
    for variable, value in zip(weights, new_weights, strict=True):
        variable.assign(value)
    for variable, value in zip(optimizer.variables, new_variables, strict=True):
        variable.assign(value)


@contextlib.contextmanager
def _global_gradients(grads: Sequence[Any], method: AggregationMethod) -> Iterator[Sequence[Any]]:
    """Yields the sums of `grads` over the replicas; inside, further calls leave them alone."""
    context = get_replica_context()
    if getattr(_thread, "summed", False) or context is None or context.num_replicas_in_sync == 1:
        yield grads
        return
    local = _weighted(grads)
    present = [index for index, grad in enumerate(local) if grad is not None]
    summed = list(local)
    totals = aggregate([local[index] for index in present], method)
    for index, total in zip(present, totals, strict=True):
        summed[index] = total
    _thread.summed = True
    lift = current_lift()
    try:
        with lift.equal_writes() if lift is not None else contextlib.nullcontext():
            yield summed
    finally:
        _thread.summed = False


def _weighted(grads: Sequence[Any]) -> list[Any]:
    """Returns the gradients times the replica's share, if it has one."""
    if current_share() == 0:
        # The replica has no example: what it computed (perhaps NaN) must not count.
        return [None if grad is None else jnp.zeros_like(grad) for grad in grads]
    share = share_of_gradients()
    if share is None:
        return list(grads)
    return [None if grad is None else grad * jnp.asarray(share, grad.dtype) for grad in grads]
