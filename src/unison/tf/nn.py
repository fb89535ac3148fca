"""`tf.nn`: activations and losses of one example each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from unison.strategies import get_strategy, has_strategy, in_cross_replica_context
from unison.tf.missing import names_missing_from
from unison.tf.tensors import convert_to_tensor

__getattr__ = names_missing_from(__name__)


def relu(features: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.relu`."""
    del name
    return jax.nn.relu(convert_to_tensor(features))


def sigmoid(x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.sigmoid`."""
    del name
    return jax.nn.sigmoid(convert_to_tensor(x))


def tanh(x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.tanh`."""
    del name
    return jnp.tanh(convert_to_tensor(x))


def gelu(features: Any, approximate: bool = False, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.gelu`."""
    del name
    return jax.nn.gelu(convert_to_tensor(features), approximate=approximate)


def softmax(logits: Any, axis: int = -1, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.softmax`."""
    del name
    return jax.nn.softmax(convert_to_tensor(logits), axis)


def log_softmax(logits: Any, axis: int = -1, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.log_softmax`."""
    del name
    return jax.nn.log_softmax(convert_to_tensor(logits), axis)


def sparse_softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, name: str | None = None
) -> jax.Array:
    """Returns the loss of every example.

    Args:
        labels: Class indices, of shape `[...]`.
        logits: Of shape `[..., classes]`.
        name: Without effect.

    TF: `tf.nn.sparse_softmax_cross_entropy_with_logits`.
    """
    del name
    log_probabilities = log_softmax(logits)
    labels = convert_to_tensor(labels)[..., None]
    return -jnp.take_along_axis(log_probabilities, labels, axis=-1)[..., 0]


def softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, axis: int = -1, name: str | None = None
) -> jax.Array:
    """Returns the loss of every example, for labels that are probabilities of the classes.

    TF: `tf.nn.softmax_cross_entropy_with_logits`.
    """
    del name
    return -jnp.sum(convert_to_tensor(labels) * log_softmax(logits, axis), axis)


def sigmoid_cross_entropy_with_logits(
    labels: Any, logits: Any, name: str | None = None
) -> jax.Array:
    """TF: `tf.nn.sigmoid_cross_entropy_with_logits`."""
    del name
    labels, logits = convert_to_tensor(labels), convert_to_tensor(logits)
    return -labels * jax.nn.log_sigmoid(logits) - (1 - labels) * jax.nn.log_sigmoid(-logits)


def l2_loss(t: Any, name: str | None = None) -> jax.Array:
    """Returns half the sum of squares. TF: `tf.nn.l2_loss`."""
    del name
    return jnp.sum(jnp.square(convert_to_tensor(t))) / 2


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> jax.Array:
    """Returns this replica's part of the mean loss: `sum(losses) / global_batch_size`.

    The replicas' parts add up to the mean over the global batch. Only the first axis counts as
    the batch: losses `[[1, 2], [3, 4]]` give 5.0.

    Args:
        per_example_loss: This replica's losses, of shape `[examples, ...]`.
        sample_weight: Weights that can be multiplied with them.
        global_batch_size: Default: this replica's examples times the replicas. State it where
            the replicas' batches may differ in size.

    Raises:
        ValueError: `per_example_loss` is a scalar.
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
        weights = convert_to_tensor(sample_weight, losses.dtype)
        trailing = losses.ndim - weights.ndim
        losses *= weights.reshape(weights.shape + (1,) * trailing)
    if global_batch_size is None:
        if has_strategy() and in_cross_replica_context():
            raise RuntimeError(
                "compute_average_loss was called in cross-replica context, where there is no batch "
                "of a replica. Call it inside strategy.run, or state global_batch_size."
            )
        global_batch_size = losses.shape[0] * get_strategy().num_replicas_in_sync
    return jnp.sum(losses) / jnp.asarray(global_batch_size, losses.dtype)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Returns the regularization loss divided by the number of replicas, which sum it up again.

    TF: `tf.nn.scale_regularization_loss`.
    """
    if has_strategy() and in_cross_replica_context():
        raise RuntimeError(
            "scale_regularization_loss was called in cross-replica context. Call it inside "
            "strategy.run."
        )
    losses = jnp.sum(convert_to_tensor(regularization_loss))
    return losses / get_strategy().num_replicas_in_sync
