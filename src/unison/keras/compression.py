"""The compression of a Keras optimizer: its state in variables, and a step with it.

The state is in the optimizer's variables, so it is saved wherever those are. The state of a single
replica is `ON_READ`: a checkpoint has the sum over the replicas, and restoring
divides it between them.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from unison.collectives import ReduceOp
from unison.compression import (
    Compression,
    CompressionState,
    LocalTraining,
    Report,
    report,
    residual_norm,
)
from unison.keras.aggregation import (
    aggregation_method_of,
    compression_of,
    mark_compressed,
    without_loss_scale,
)
from unison.keras.variables import ReplicatedVariable

logger = logging.getLogger("unison")

_VARIABLES = "_unison_compression_variables"


def give_compression(
    optimizer: keras.optimizers.Optimizer, compression: Compression | LocalTraining
) -> None:
    """Makes `optimizer` send the replicas' gradients by `compression`.

    Raises:
        TypeError: It is not a Keras optimizer.
        ValueError: It already has a compression.
    """
    mark_compressed(optimizer, compression)
    optimizer = without_loss_scale(optimizer)
    build = optimizer.build

    @functools.wraps(build)
    def build_with_state(variables: Sequence[keras.Variable]) -> None:
        build(variables)
        _add_state(optimizer)

    # Bypasses Keras' attribute tracking, for this object only.
    vars(optimizer)["build"] = build_with_state
    if optimizer.built:
        _add_state(optimizer)


def state_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that hold the compression's state, in the order of its leaves."""
    return vars(without_loss_scale(optimizer)).get(_VARIABLES, [])


def state_of(
    optimizer: keras.optimizers.Optimizer, values: Iterable[jax.Array]
) -> CompressionState:
    """Returns `values` of the state's variables in the state's structure."""
    inner = without_loss_scale(optimizer)
    compression = compression_of(inner)
    assert compression is not None
    shapes = jax.eval_shape(compression.init, _named(inner, _avals(inner)))
    return jax.tree.unflatten(jax.tree.structure(shapes), values)


def weights_by_name(
    optimizer: keras.optimizers.Optimizer,
) -> dict[str, keras.Variable]:
    """Returns the weights that a built optimizer updates, by their names in rules."""
    return dict(zip(_names(optimizer), _weights(optimizer), strict=True))


def report_of(optimizer: keras.optimizers.Optimizer) -> tuple[Report, float]:
    """Returns the bytes that a step of `optimizer` sends, and the norm of the residuals.

    Raises:
        ValueError: It has no compression, or no weights yet.
    """
    inner, compression = without_loss_scale(optimizer), compression_of(optimizer)
    weights = weights_by_name(inner)
    if compression is None or not weights:
        raise ValueError(
            f"Optimizer {optimizer.name!r} has {'no weights yet' if compression else ''}"
            f"{'' if compression else 'no compression'}. Expected one that unison.train."
            "with_compression has been given to and that has been built."
        )
    first = next(iter(weights.values()))
    count = first.cell.placement.num_replicas if isinstance(first, ReplicatedVariable) else 1
    state = state_of(optimizer, [variable.value for variable in state_variables(optimizer)])
    like = _named(inner, _avals(inner))
    return report(compression, like, count), float(residual_norm(state))


def compressed_sums(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[jax.Array | None],
    weights: Sequence[keras.Variable],
    values: Sequence[jax.Array],
    loss_scale: jax.Array | float,
) -> tuple[list[jax.Array | None], list[jax.Array]]:
    """Returns the sums of the gradients over the replicas, and the new values of the state.

    Args:
        optimizer: An optimizer with a compression.
        gradients: This replica's gradients, for the variables in `weights`; None for those
            that were not used.
        weights: Variables of the optimizer.
        values: The values of its `state_variables`.
        loss_scale: The factor of the gradients. The stored state does not depend on it.
    """
    inner, compression = without_loss_scale(optimizer), compression_of(optimizer)
    assert compression is not None
    state = state_of(optimizer, values)
    if isinstance(compression, LocalTraining):
        present = [gradient for gradient in gradients if gradient is not None]
        own = iter(compression.own_gradients(present))
        return [None if g is None else next(own) for g in gradients], list(values)
    of_weight = {id(w): g for w, g in zip(weights, gradients, strict=True) if g is not None}
    scale = jnp.asarray(loss_scale)
    name_of = {id(weight): name for name, weight in weights_by_name(inner).items()}
    given = collections.OrderedDict(
        (name, of_weight[key] / scale.astype(of_weight[key].dtype))
        for key, name in name_of.items()
        if key in of_weight
    )
    # A weight without a gradient keeps its residual: its sum would not be used.
    part, whole = compression.part_of_state(state, _named(inner, _avals(inner)), given)
    sums, part = compression.apply(given, part, ReduceOp.SUM, aggregation_method_of(optimizer))
    scaled = {name: total * scale.astype(total.dtype) for name, total in sums.items()}
    totals = [
        None if g is None else scaled[name_of[id(w)]]
        for w, g in zip(weights, gradients, strict=True)
    ]
    return totals, jax.tree.leaves(whole(part))


def synchronized_weights(
    optimizer: keras.optimizers.Optimizer,
    before: Sequence[jax.Array],
    after: Sequence[jax.Array],
    values: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the weights after a step of `LocalTraining`, and the new values of its state.

    Args:
        optimizer: An optimizer that trains locally.
        before: The weights before the step.
        after: The weights after the replica's own update.
        values: The values of the `state_variables` before the step.
    """
    compression = compression_of(optimizer)
    assert isinstance(compression, LocalTraining)
    weights, state = compression.synchronized(
        _named(optimizer, before),
        _named(optimizer, after),
        state_of(optimizer, values),
        aggregation_method_of(optimizer),
    )
    return [weights[name] for name in _names(optimizer)], jax.tree.leaves(state)


def _add_state(optimizer: keras.optimizers.Optimizer) -> None:
    compression = compression_of(optimizer)
    assert compression is not None
    weights = _weights(optimizer)
    with jax.ensure_compile_time_eval():
        state = compression.init(_named(optimizer, [weight.value for weight in weights]))
    own = set(map(id, jax.tree.leaves(state.of_replica)))
    variables = []
    for path, leaf in jax.tree.leaves_with_path(state):
        is_own = id(leaf) in own
        variable = keras.Variable(
            leaf,
            trainable=False,
            dtype=str(leaf.dtype),
            synchronization="on_read" if is_own else "auto",
            aggregation="sum" if is_own else "none",
            name="compression_" + jax.tree_util.keystr(path, simple=True, separator="_"),
        )
        optimizer._track_variable(variable)
        variables.append(variable)
    vars(optimizer)[_VARIABLES] = variables
    _warn_of_options(optimizer, state)
    if isinstance(compression, LocalTraining):
        _localize(optimizer, variables)


def _warn_of_options(optimizer: keras.optimizers.Optimizer, state: CompressionState) -> None:
    """Logs which options of the optimizer behave differently with the compression."""
    clips = [
        name
        for name in ("clipnorm", "clipvalue", "global_clipnorm")
        if getattr(optimizer, name, None) is not None
    ]
    if clips and "residual" in state.of_replica:
        logger.warning(
            "Optimizer %r loses what %s clips from the decompressed sum, delayed residuals "
            "included. topk and sign take clipnorm, by which each replica clips its gradients "
            "first.",
            optimizer.name,
            clips[0],
        )
    if optimizer.gradient_accumulation_steps:
        logger.warning(
            "Optimizer %r accumulates the gradients of %d steps. Compression runs before that: "
            "each of these steps communicates, and counts for its momentum, every and "
            "warmup_steps.",
            optimizer.name,
            optimizer.gradient_accumulation_steps,
        )


def _localize(optimizer: keras.optimizers.Optimizer, alike: Sequence[keras.Variable]) -> None:
    """Gives each replica its own weights and slots; outside of replicas, their means are read."""
    kept = set(map(id, [*alike, optimizer.iterations, optimizer._learning_rate]))
    for variable in [*_weights(optimizer), *optimizer.variables]:
        if (
            isinstance(variable, ReplicatedVariable)
            and variable.cell.placement.num_replicas > 1
            and id(variable) not in kept
        ):
            variable.cell.localize()


def _weights(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    return optimizer._trainable_variables


def _avals(optimizer: keras.optimizers.Optimizer) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(w.shape, jnp.dtype(w.dtype)) for w in _weights(optimizer)]


def _named(optimizer: keras.optimizers.Optimizer, values: Sequence[Any]) -> dict[str, Any]:
    """Returns `values`, one for each weight, by the weights' names.

    In the weights' order: JAX would sort a plain dictionary by the names, which Keras numbers
    (`dense_9`, `dense_10`), so that the state of the same weights would have another order.
    """
    return collections.OrderedDict(zip(_names(optimizer), values, strict=True))


def _names(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Returns the weights' paths, with a number appended to duplicates."""
    paths = [weight.path for weight in _weights(optimizer)]
    return [
        path if path not in paths[:index] else f"{path}/{index}" for index, path in enumerate(paths)
    ]
