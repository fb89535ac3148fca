"""Gradients are summed over the replicas when an optimizer applies them.

This is TensorFlow's rule, and it holds for every use of an optimizer: `fit`, an overridden
`train_step`, and `optimizer.apply` in a custom loop. If losses are already scaled, by the user
or by Keras, gradients are summed unchanged. In Keras' own step on JAX, a replica's mean loss is
multiplied by its share of the global batch's examples; in JAX-style steps of the user's, which may
differentiate what they like, each gradient is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from unison.branches import switch
from unison.collectives import aggregate
from unison.collectives.presence import present_anywhere
from unison.compression import LocalTraining
from unison.interrupts import without_signals
from unison.keras.aggregation import aggregation_method_of, compression_of
from unison.keras.compression import compressed_sums, state_variables, synchronized_weights
from unison.keras.sharded_update import sharded_apply, updates_parts
from unison.keras.variables import ReplicatedVariable, adopt, placed_as, scopes_ask_lifts
from unison.lifting import current_lift
from unison.profiling.regions import UPDATE
from unison.runtime.private_jax import dtype_before_cast
from unison.strategies import get_replica_context
from unison.strategies.context import has_filler
from unison.strategies.replica_share import ScaledBy, current_share
from unison.thread_local import ThreadLocal

_are_summed = ThreadLocal(False)
_known_equal: ThreadLocal[list[Any] | None] = ThreadLocal(None)


def adopt_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes `optimizer` sum gradients over the replicas when it is used in a replica program."""
    if "apply" in vars(optimizer):
        return
    apply, stateless_apply = optimizer.apply, optimizer.stateless_apply
    scaling = keras.optimizers.LossScaleOptimizer
    if getattr(type(optimizer), "stateless_apply", None) is scaling.stateless_apply:
        stateless_apply = functools.partial(_apply_if_finite, optimizer, stateless_apply)
    scale_loss = optimizer.scale_loss
    add_slot = optimizer.add_variable_from_reference

    @functools.wraps(add_slot)
    def add_placed_slot(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with placed_as(reference_variable):
            slot = add_slot(reference_variable, *args, **kwargs)
            if isinstance(reference_variable, ReplicatedVariable):  # whatever the current scope is
                with jax.ensure_compile_time_eval():  # a step may be traced now
                    adopt(slot, reference_variable.cell.placement)
            return slot

    @functools.wraps(apply)
    @jax.named_scope(UPDATE)
    def apply_global(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        lift = current_lift()
        if lift is not None and _compresses(optimizer):
            with lift.equal_writes():
                return apply_statelessly(
                    optimizer, stateless_apply_global, grads, trainable_variables
                )
        weights = trainable_variables or getattr(optimizer, "_trainable_variables", ())
        with _global_gradients(grads, weights, optimizer) as summed:
            scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            if scales and current_lift() and are_of_keras(weights):
                return apply_statelessly(optimizer, stateless_apply, summed, trainable_variables)
            return apply(summed, trainable_variables)

    @functools.wraps(optimizer.stateless_apply)
    @jax.named_scope(UPDATE)
    def stateless_apply_global(
        optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        if current_share() is not None and updates_parts(optimizer):
            local = _weighted(grads)
            new = sharded_apply(optimizer, optimizer_variables, local, trainable_variables)
        elif _compresses(optimizer):
            new = _apply_compressed(
                optimizer, stateless_apply, optimizer_variables, grads, trainable_variables
            )
        else:
            with _global_gradients(grads, trainable_variables, optimizer) as summed:
                new = stateless_apply(optimizer_variables, summed, trainable_variables)
        if _known_equal.value is not None:
            for values in new:
                _known_equal.value.extend(values)
        return new

    finalize = without_signals(optimizer.finalize_variable_values)

    @functools.wraps(finalize)
    def finalize_if_averaged(weights: Sequence[Any]) -> None:
        if _has_averages(optimizer):
            finalize(weights)

    @functools.wraps(scale_loss)
    def scale_weighted_loss(loss: Any) -> Any:
        share = current_share(ScaledBy.LOSS)
        return scale_loss(loss if share is None else loss * share)

    # Bypasses Keras' attribute tracking, for this object only: its class stays Keras' own.
    vars(optimizer).update(
        build=without_signals(optimizer.build),
        finalize_variable_values=finalize_if_averaged,
        add_variable_from_reference=add_placed_slot,
        apply=apply_global,
        stateless_apply=stateless_apply_global,
        scale_loss=scale_weighted_loss,
    )


def _has_averages(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the moving averages of weights, if an optimizer keeps them, are those of a step.

    They are zeros before. Keras replaces the weights by them at the end of every `fit`, also of one
    that an error ends before its first step.
    """
    applied = getattr(optimizer, "inner_optimizer", optimizer)
    return not applied.use_ema or int(applied._iterations) > 0


def scaled_in_keras_steps(model: keras.Model) -> ScaledBy:
    """Returns what the JAX-style steps of `model` multiply by a replica's share.

    Keras' own step has its optimizer scale the loss, where the share costs one product. A step of
    the user's need not, unless it has a `LossScaleOptimizer`.
    """
    optimizer = getattr(model, "optimizer", None)
    scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    is_own = all(
        getattr(type(model), name) is getattr(keras.Model, name)
        for name in ("train_step", "compute_loss_and_updates")
    )
    return ScaledBy.LOSS if scales_loss or is_own else ScaledBy.GRADIENTS


@contextlib.contextmanager
def values_known_equal() -> Iterator[list[Any]]:
    """Yields a list to which optimizers add values that are equal on all replicas."""
    known: list[Any] = []
    with _known_equal.bound_to(known):
        yield known


def apply_statelessly(
    optimizer: keras.optimizers.Optimizer,
    stateless_apply: Callable[..., Any],
    grads: Sequence[Any],
    trainable_variables: Sequence[keras.Variable] | None,
) -> None:
    """Applies an optimizer that assigns its variables inside a conditional.

    A program only sees what is assigned there if the conditional returns it.
    """
    if not optimizer.built:
        optimizer.build(list(trainable_variables or ()))
    # In the order in which the optimizer was built.
    weights = trainable_variables or optimizer._trainable_variables
    of_variable = {id(variable): grad for variable, grad in zip(weights, grads, strict=True)}
    weights = optimizer._trainable_variables
    with scopes_ask_lifts.bound_to(True):  # for a variable that it does not list
        new_weights, new_variables = stateless_apply(
            [variable.value for variable in optimizer.variables],
            [of_variable.get(id(variable)) for variable in weights],
            [variable.value for variable in weights],
        )
    for variable, value in zip(weights, new_weights, strict=True):
        variable.assign(value)
    for variable, value in zip(optimizer.variables, new_variables, strict=True):
        variable.assign(value)


def _apply_if_finite(
    optimizer: keras.optimizers.LossScaleOptimizer,
    stateless_apply: Callable[..., Any],
    optimizer_variables: Sequence[Any],
    grads: Sequence[Any],
    trainable_variables: Sequence[Any],
) -> Any:
    """`optimizer.stateless_apply`, also if the inner one assigns a variable that it does not list.

    Nadam has one. What is assigned in a `jax.lax.cond`, which Keras takes, exists only there.
    """
    if current_lift() is None or not optimizer.built:
        return stateless_apply(optimizer_variables, grads, trainable_variables)
    state, weights = optimizer_variables, trainable_variables
    return switch(
        optimizer.check_finite(grads),
        [
            lambda: optimizer._stateless_handle_non_finite_grads(state, weights),
            lambda: optimizer._stateless_handle_finite_grads(state, grads, weights),
        ],
    )


def _compresses(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether gradients have not been summed yet, and a compression should sum them."""
    return (
        compression_of(optimizer) is not None
        and not _are_summed.value
        and get_replica_context() is not None
    )


def _apply_compressed(
    optimizer: keras.optimizers.Optimizer,
    stateless_apply: Callable[..., Any],
    optimizer_variables: Sequence[Any],
    grads: Sequence[Any],
    trainable_variables: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """`optimizer.stateless_apply` with gradients that are summed by the optimizer's compression.

    If the replicas train apart, gradients are the replica's own, and weights may be averaged.
    """
    places = {id(variable): place for place, variable in enumerate(optimizer.variables)}
    own = [places[id(variable)] for variable in state_variables(optimizer)]
    state = [optimizer_variables[place] for place in own]
    loss_scale = 1.0
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        loss_scale = optimizer_variables[places[id(optimizer.dynamic_scale)]]
    summed, new_state = compressed_sums(
        optimizer, _weighted(grads), optimizer._trainable_variables, state, loss_scale
    )
    with _no_further_sums():
        weights, variables = stateless_apply(optimizer_variables, summed, trainable_variables)
    if isinstance(compression_of(optimizer), LocalTraining):
        weights, new_state = synchronized_weights(optimizer, trainable_variables, weights, state)
    variables = list(variables)
    for place, value in zip(own, new_state, strict=True):
        variables[place] = value
    return list(weights), variables


@contextlib.contextmanager
def _no_further_sums() -> Iterator[None]:
    """Inside, optimizers do not sum gradients."""
    with _are_summed.bound_to(True):
        yield


@contextlib.contextmanager
def _global_gradients(
    grads: Sequence[Any], weights: Sequence[Any], optimizer: keras.optimizers.Optimizer
) -> Iterator[Sequence[Any]]:
    """Yields the sums of `grads` over the replicas; inside, further calls leave them unchanged."""
    context = get_replica_context()
    if _are_summed.value or context is None or context.num_replicas_in_sync == 1:
        yield grads
        return
    local = _weighted(grads)
    is_present = present_anywhere([grad is not None for grad in local])
    present = [index for index, is_there in enumerate(is_present) if is_there]
    for index in present:
        if local[index] is None:  # on this replica, which may have no examples
            local[index] = jnp.zeros(weights[index].shape, weights[index].dtype)
    summed = list(local)
    totals = aggregate([local[index] for index in present], aggregation_method_of(optimizer))
    scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    for index, total in zip(present, totals, strict=True):
        narrow = dtype_before_cast(grads[index]) if scales_loss else None
        summed[index] = total if narrow is None else _overflowing(total, narrow)
    lift = current_lift()
    with (
        _no_further_sums(),
        lift.equal_writes() if lift is not None else contextlib.nullcontext(),
    ):
        yield summed


def _without_examples(grad: jax.Array, counts: bool) -> jax.Array:
    """Returns the gradient of a replica that has no examples.

    Of a step that computed with no rows and scales its losses itself, it is that of the replica's
    part of a penalty. NaN and infinity (from divisions by no examples) do not count, nor does what
    comes of filler.
    """
    zeros = jnp.zeros_like(grad)
    return jnp.where(jnp.isfinite(grad), grad, zeros) if counts else zeros


def are_of_keras(variables: Iterable[Any]) -> bool:
    """Whether all variables are Keras' own, which its stateless methods require."""
    return all(isinstance(variable, keras.Variable) for variable in variables)


def _overflowing(total: jax.Array, narrow: Any) -> jax.Array:
    """Returns a sum of gradients, infinite where it exceeds the dtype that each was computed in.

    There, the gradient of one device is infinite, by which loss scaling detects that the step must
    be skipped. The replicas' parts may be finite.
    """
    if not jnp.issubdtype(narrow, jnp.floating) or jnp.finfo(narrow).bits >= 32:
        return total
    return jnp.where(jnp.isfinite(total.astype(narrow)), total, total * jnp.inf)


def _weighted(grads: Sequence[Any]) -> list[Any]:
    """Returns the part of a replica's gradients that is added to those of the others."""
    if current_share() == 0:
        counts = current_share(ScaledBy.LOSSES) is not None and not has_filler()
        return [None if grad is None else _without_examples(grad, counts) for grad in grads]
    share = current_share(ScaledBy.GRADIENTS)
    if share is None:
        return list(grads)
    return [None if grad is None else grad * jnp.asarray(share, grad.dtype) for grad in grads]
