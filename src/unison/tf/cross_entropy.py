"""The losses of `tf.nn`: one number an example, and their average over the global batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from unison.errors import InvalidArgumentError
from unison.strategies import get_strategy, has_strategy, in_cross_replica_context
from unison.strategies.replica_share import current_share
from unison.tf.tensors import convert_to_tensor, invalid_arguments, operands


def sparse_softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, name: str | None = None
) -> jax.Array:
    """Returns the loss of every example.

    Args:
        labels: Class indices, of shape `[...]`. An invalid index gives NaN.
        logits: Of shape `[..., classes]`.
        name: Without effect.

    Raises:
        ValueError: The shapes do not fit.

    TF: `tf.nn.sparse_softmax_cross_entropy_with_logits`.
    """
    labels, logits = convert_to_tensor(labels), convert_to_tensor(logits)
    if logits.ndim != labels.ndim + 1:
        raise ValueError(
            "`labels.shape.rank` must equal `logits.shape.rank - 1`. Received: labels of the "
            f"shape {labels.shape}, logits of the shape {logits.shape}."
        )
    log_probabilities = jax.nn.log_softmax(logits)
    flat = log_probabilities.reshape(-1, logits.shape[-1])
    places = flat.at[jnp.arange(len(flat)), labels.ravel()]
    # A negative label would count from the last class.
    return -places.get(mode="fill", wrap_negative_indices=False).reshape(labels.shape)


def softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, axis: int = -1, name: str | None = None
) -> jax.Array:
    """Returns the loss of every example, for labels that are probabilities of the classes.

    TF: `tf.nn.softmax_cross_entropy_with_logits`.
    """
    logits, labels = _logits_and_labels(logits, labels)
    with invalid_arguments("tf.nn.softmax_cross_entropy_with_logits"):
        return -jnp.sum(labels * jax.nn.log_softmax(logits, axis), axis)


def sigmoid_cross_entropy_with_logits(
    labels: Any = None, logits: Any = None, name: str | None = None
) -> jax.Array:
    """Returns `-labels * log(sigmoid(logits)) - (1 - labels) * log(1 - sigmoid(logits))`.

    Raises:
        ValueError: The shapes differ.

    TF: `tf.nn.sigmoid_cross_entropy_with_logits`.
    """
    logits, labels = _logits_and_labels(logits, labels)
    _check_same_shape(logits, labels)
    return jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))


def weighted_cross_entropy_with_logits(
    labels: Any, logits: Any, pos_weight: Any, name: str | None = None
) -> jax.Array:
    """Returns the sigmoid cross-entropy with the positive labels' part times `pos_weight`.

    TF: `tf.nn.weighted_cross_entropy_with_logits`.
    """
    logits, labels = _logits_and_labels(logits, labels)
    _check_same_shape(logits, labels)
    weight = 1 + (operands(logits, pos_weight)[1] - 1) * labels
    return (1 - labels) * logits + weight * jax.nn.softplus(-logits)


def log_poisson_loss(
    targets: Any, log_input: Any, compute_full_loss: bool = False, name: str | None = None
) -> jax.Array:
    """Returns `exp(log_input) - log_input * targets`, if asked with Stirling's approximation of
    the term that depends on the targets alone.

    TF: `tf.nn.log_poisson_loss`.
    """
    log_input, targets = _logits_and_labels(log_input, targets)
    loss = jnp.exp(log_input) - log_input * targets
    if not compute_full_loss:
        return loss
    large = jnp.where(targets > 1, targets, 1)
    stirling = large * jnp.log(large) - large + 0.5 * jnp.log(2 * jnp.pi * large)
    return loss + jnp.where((targets >= 0) & (targets <= 1), 0, stirling)


def _logits_and_labels(logits: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both in the dtype of the logits."""
    logits = convert_to_tensor(logits)
    return logits, convert_to_tensor(labels).astype(logits.dtype)


def _check_same_shape(logits: jax.Array, labels: jax.Array) -> None:
    if logits.shape != labels.shape:
        raise ValueError(
            "`logits` and `labels` must have the same shape. Received: logits of the shape "
            f"{logits.shape}, labels of the shape {labels.shape}."
        )


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> jax.Array:
    """Returns this replica's part of the mean loss: `sum(losses) / global_batch_size`.

    The replicas' parts add up to the mean over the global batch. Only the first axis counts as
    the batch: losses `[[1, 2], [3, 4]]` give 5.0.

    Args:
        per_example_loss: This replica's losses, of shape `[examples, ...]`.
        sample_weight: Weights that can be multiplied with them.
        global_batch_size: Default: in `fit`, the size of the global batch; in `strategy.run`, this
            replica's examples times the replicas. State it there where the replicas' batches may
            differ in size.

    Raises:
        ValueError: `per_example_loss` is a scalar, or `global_batch_size` is not, or is negative.
        TypeError: `global_batch_size` is not an integer.
        RuntimeError: In cross-replica context, without `global_batch_size`.

    TF: `tf.nn.compute_average_loss`.
    """
    losses = convert_to_tensor(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "compute_average_loss needs one loss an example, of rank 1 or more. Received: a "
            "scalar. Create the loss with reduction='none'."
        )
    if sample_weight is not None:
        weights = convert_to_tensor(sample_weight).astype(losses.dtype)
        trailing = losses.ndim - weights.ndim
        losses *= weights.reshape(weights.shape + (1,) * trailing)
    if global_batch_size is None:
        if has_strategy() and in_cross_replica_context():
            raise RuntimeError(
                "compute_average_loss was called in cross-replica context, where there is no batch "
                "of a replica. Call it inside strategy.run, or state global_batch_size."
            )
        part = _part_of_replica()
        # The gradients of a replica without examples do not count.
        global_batch_size = round(losses.shape[0] / part) if part else 1
    return jnp.sum(losses) / _batch_size(global_batch_size).astype(losses.dtype)


def _batch_size(value: Any) -> jax.Array:
    size = convert_to_tensor(value)
    if size.ndim != 0:
        raise ValueError(f"global_batch_size must be scalar. Received: the shape {size.shape}")
    if not jnp.issubdtype(size.dtype, jnp.integer):
        raise TypeError(f"global_batch_size must be an int. Received: dtype {size.dtype}")
    if not isinstance(size, jax.core.Tracer) and size < 0:
        raise InvalidArgumentError(
            message=f"global_batch_size must be non-negative. Received: {value}"
        )
    return size


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Returns this replica's part of the sum of the regularization losses.

    The replicas' parts add up to the sum. They are equal; in `fit`, where a batch may not divide,
    they are as large as the replicas' parts of it.

    Raises:
        RuntimeError: In cross-replica context.

    TF: `tf.nn.scale_regularization_loss`.
    """
    if has_strategy() and in_cross_replica_context():
        raise RuntimeError(
            "scale_regularization_loss was called in cross-replica context. Call it inside "
            "strategy.run."
        )
    return jnp.sum(convert_to_tensor(regularization_loss)) * _part_of_replica()


def _part_of_replica() -> float:
    """Returns what part of a global number is this replica's: its share of the examples in a step
    of a Keras model, else that of one of equal replicas.
    """
    share = current_share()
    return 1 / get_strategy().num_replicas_now if share is None else share
