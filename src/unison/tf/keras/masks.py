"""Masks of predictions on their way to the metrics of a training step.

Keras' metrics leave out what the mask of the predictions leaves out. In its training step on JAX,
the predictions come out of `jax.value_and_grad`, which returns other arrays than the ones that have
the masks: so padding would count in the metrics of `fit`, and not in those of `evaluate`. As under
TensorFlow, it counts in neither.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
from keras.src.backend import get_keras_mask, set_keras_mask

from unison.thread_local import ThreadLocal

#: Whether the thread runs Keras' own training step, which passes the predictions on to the metrics.
in_keras_step: ThreadLocal[bool] = ThreadLocal(False)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["predictions", "masks"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class _Masked:
    """Predictions, and the mask of each array among them, or None."""

    predictions: Any
    masks: list[Any]

    @classmethod
    def of(cls, predictions: Any) -> _Masked:
        return cls(predictions, [get_keras_mask(each) for each in jax.tree.leaves(predictions)])

    def with_masks_set(self) -> Any:
        for array, mask in zip(jax.tree.leaves(self.predictions), self.masks, strict=True):
            set_keras_mask(array, mask)
        return self.predictions


def returning_masks(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras' `compute_loss_and_updates`, which returns the masks to its own step."""

    @functools.wraps(compute)
    def wrapper(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        loss, (unscaled_loss, predictions, *variables) = compute(self, *args, **kwargs)
        if in_keras_step.value:
            predictions = _Masked.of(predictions)
        return loss, (unscaled_loss, predictions, *variables)

    return wrapper


def taking_masks(update: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras' `_update_metrics_variables`, which takes predictions with their masks."""

    @functools.wraps(update)
    def wrapper(
        self: keras.Model, variables: Any, loss: Any, x: Any, y: Any, y_pred: Any, weight: Any
    ) -> Any:
        if isinstance(y_pred, _Masked):
            y_pred = y_pred.with_masks_set()
        return update(self, variables, loss, x, y, y_pred, weight)

    return wrapper
