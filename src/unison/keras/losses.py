"""Losses whose global value is not the mean of the replicas' values.

In `fit`, a replica's loss counts by its share of the global batch's examples: that makes a mean
over examples exact, with sample weights too, because Keras divides by the number of examples.
Other reductions divide by something else (by nothing, by the sum of the weights, by the number of
unmasked steps), which only all replicas together know. `with_global_reductions` replaces them
while a step is traced.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from jax import lax
from keras import ops
from keras.src.backend import get_keras_mask

from unison.runtime.placement import REPLICA_AXIS


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
    """A loss whose values on the replicas, weighted by their shares, add up to the global loss.

    On a replica without examples it takes part in the sums over the replicas, with nothing.

    Args:
        loss: The loss of a replica's examples.
        share: The replica's share of the global batch's.
    """

    def __init__(self, loss: keras.losses.Loss, share: float):
        self.of_replica = loss
        self._share = share

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        with recorded_mask(self.of_replica) as masks:
            local = self.of_replica(y_true, y_pred, sample_weight)
        masks = [mask for mask in (get_keras_mask(y_pred), *masks) if mask is not None]
        reduction = self.of_replica.reduction
        if reduction == "sum":
            return local / self._share if self._share else local
        if reduction == "mean_with_sample_weight":
            divisor = _total_weight(sample_weight, masks)
        elif reduction in ("sum_over_batch_size", "mean"):
            divisor = _total_weight(None, masks)
        else:
            divisor = None
        if divisor is None:
            return local
        divisor = ops.cast(divisor, local.dtype)
        if not self._share:
            divisor = ops.zeros_like(divisor)
        # `local` was divided by this replica's divisor; it should be by that of all.
        all_replicas = lax.psum(lax.stop_gradient(divisor), REPLICA_AXIS)
        if not self._share:
            return local
        return ops.divide_no_nan(local * divisor, all_replicas) / self._share


@contextlib.contextmanager
def recorded_mask(loss: keras.losses.Loss) -> Iterator[list[Any]]:
    """Yields a list that gets the mask of the values that `loss` computes inside.

    Some losses mask values themselves (`ignore_class`); only their `call` shows which.
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
    """Returns the sum of the weights of this replica's values; None where all weigh 1."""
    if not masks:
        return None if sample_weight is None else ops.sum(sample_weight)
    mask = ops.cast(functools.reduce(operator.and_, masks), "float32")
    if sample_weight is None:
        return ops.sum(mask)
    return ops.sum(_align(ops.convert_to_tensor(sample_weight), mask) * mask)


def _align(weights: Any, values: Any) -> Any:
    """Gives `weights` the rank of `values`, as Keras does: a trailing 1 comes or goes."""
    if weights.ndim == values.ndim + 1 and weights.shape[-1] == 1:
        return ops.squeeze(weights, -1)
    while weights.ndim < values.ndim:
        weights = ops.expand_dims(weights, -1)
    return weights
