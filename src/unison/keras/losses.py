"""Losses of replicas whose sum is the loss of the global batch.

In `fit`, a replica's loss is multiplied by its share of the global batch: this makes a mean
over examples exact, with sample weights too, because Keras divides by the number of examples.
Other reductions divide by something else (by nothing, by the sum of the weights, by the number of
unmasked steps), which requires a sum over all replicas. `with_global_reductions` replaces them
while a step is traced.

In a step that assigns (`train_step(self, data)`), losses are multiplied by the share when they
are computed, as in TensorFlow: those given to `compile`, those that layers add, and those that
the step calls itself. `teach_losses` handles the last.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from jax import lax
from keras import ops
from keras.src.backend import get_keras_mask
from keras.src.losses import loss as keras_loss

from unison.collectives.presence import with_gradient_through_combined
from unison.runtime.placement import REPLICA_AXIS
from unison.strategies.replica_share import ScaledBy, replica_share, scale_of_losses


def teach_losses() -> None:
    """Scales Keras' losses in replicas where TensorFlow's are scaled, and logs them unscaled.

    Keras calls these functions on every backend, and scales in TensorFlow only.
    """
    keras_loss.scale_loss_for_distribution = scaled_loss
    keras_loss.unscale_loss_for_distribution = unscaled_loss


def scaled_loss(loss: Any) -> Any:
    """Returns `loss`, a mean over the replica's examples, as its part of the global mean, in steps
    and functions in which losses are scaled; otherwise unchanged.
    """
    scale = scale_of_losses()
    return loss if scale is None else loss * ops.cast(scale, loss.dtype)


def aggregating_scaled(aggregate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a model's `_aggregate_additional_loss` (of layers' losses) with `scaled_loss`."""
    return functools.wraps(aggregate)(lambda loss: scaled_loss(aggregate(loss)))


def unscaled_loss(loss: Any) -> Any:
    """The inverse of `scaled_loss`, for what is logged."""
    scale = scale_of_losses()
    # A replica without examples updates no metric, whatever this returns.
    return loss if not scale else loss / ops.cast(scale, loss.dtype)


@contextlib.contextmanager
def with_global_reductions(model: keras.Model, share: float) -> Iterator[None]:
    """Inside, the compiled losses of `model` are reduced globally.

    Args:
        model: A compiled and built model.
        share: The replica's share of the global batch's examples.
    """
    compiled = getattr(model, "_compile_loss", None)
    flat_losses = getattr(compiled, "_flat_losses", None)
    if compiled is None or not flat_losses:
        yield
        return
    compiled._flat_losses = [
        entry._replace(loss=GlobalLoss(entry.loss, share))
        if isinstance(entry.loss, keras.losses.Loss)
        else entry
        for entry in flat_losses
    ]
    try:
        yield
    finally:
        compiled._flat_losses = flat_losses


class GlobalLoss:
    """A loss whose values on the replicas add up to the global loss, once they have been
    multiplied by the replicas' shares, here or later; see `ScaledBy`.

    A replica without examples takes part in the sums over the replicas, with zero.

    Args:
        loss: The loss of a replica's examples.
        share: The replica's share of the global batch's.
    """

    def __init__(self, loss: keras.losses.Loss, share: float):
        self.of_replica = loss
        self._share = share

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        with (
            recorded_mask(self.of_replica) as masks,
            replica_share(self._share, ScaledBy.GRADIENTS),  # not scaled there
        ):
            local = self.of_replica(y_true, y_pred, sample_weight)
        reduction = self.of_replica.reduction
        if tuple(local.shape) == (0,) and reduction not in (None, "none"):
            local = ops.sum(local)  # Keras leaves no values as they are.
        is_scaled_here = scale_of_losses() is not None
        masks = [mask for mask in (get_keras_mask(y_pred), *masks) if mask is not None]
        if reduction == "sum":
            return local / self._share if self._share and not is_scaled_here else local
        if reduction == "mean_with_sample_weight":
            divisor = _total_weight(sample_weight, masks)
        elif reduction in ("sum_over_batch_size", "mean"):
            divisor = _total_weight(None, masks)
        else:
            return local
        if divisor is None:
            return scaled_loss(local)
        divisor = ops.cast(divisor, local.dtype)
        if not self._share:
            divisor = ops.zeros_like(divisor)
        # `local` was divided by this replica's divisor; it should be divided by that of all.
        all_replicas = lax.psum(lax.stop_gradient(divisor), REPLICA_AXIS)
        if not self._share:
            return local
        part = ops.divide_no_nan(local * divisor, all_replicas)
        return part if is_scaled_here else part / self._share


def reaching_combined(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a model's `compute_loss_and_updates`, whose gradient every replica has.

    See `with_gradient_through_combined`.
    """

    @functools.wraps(compute)
    def computing(*args: Any, **kwargs: Any) -> Any:
        loss, updates = compute(*args, **kwargs)
        return with_gradient_through_combined(loss), updates

    return computing


@contextlib.contextmanager
def recorded_mask(loss: keras.losses.Loss) -> Iterator[list[Any]]:
    """Yields a list to which the mask of the values that `loss` computes is added.

    Some losses mask values themselves (`ignore_class`); only a call of their `call` shows it.
    """
    call = loss.call
    masks: list[Any] = []

    def recording_call(*args: Any) -> Any:
        values = call(*args)
        masks.append(get_keras_mask(values))
        return values

    vars(loss)["call"] = recording_call
    try:
        yield masks
    finally:
        del vars(loss)["call"]


def _total_weight(sample_weight: Any, masks: Sequence[Any]) -> Any:
    """Returns the sum of the weights of this replica's values; None if all weights are 1."""
    if not masks:
        return None if sample_weight is None else ops.sum(sample_weight)
    mask = ops.cast(functools.reduce(operator.and_, masks), "float32")
    if sample_weight is None:
        return ops.sum(mask)
    return ops.sum(_align(ops.convert_to_tensor(sample_weight), mask) * mask)


def _align(weights: Any, values: Any) -> Any:
    """Gives `weights` the rank of `values`, as Keras does: adds or removes a last axis."""
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        return ops.squeeze(weights, -1)
    while weights.ndim < values.ndim:
        weights = ops.expand_dims(weights, -1)
    return weights
