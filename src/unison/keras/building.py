"""A model as it is before its first step: whether it is built, and on which batch it will be."""

from __future__ import annotations

import operator
from typing import Any

import jax
import keras


def first_batch_of(iterator: Any) -> Any:
    """Returns a batch of Keras' `EpochIterator`, as Keras itself does to build a model."""
    for _, _, batches in iterator:
        return next(batches)
    raise ValueError("The data has no batch.")


def is_built(model: keras.Model) -> bool:
    """Whether Keras builds nothing, and so takes no batch for it, which shuffling would notice."""
    parts = [model._compile_metrics, model._compile_loss, *model._flatten_layers()]
    return all(part is None or part.built for part in parts)


class Builds:
    """Tells when Keras builds a model, for which it takes a batch of the data.

    Where data is shuffled, an order is drawn for that batch. So a batch is taken as often as Keras
    takes one, also where it is not needed.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        #: The metrics and the loss of `compile` when the model was built last.
        self._compiled: tuple[Any, Any] | None = None

    def are_due(self) -> bool:
        """Whether Keras builds the model now: once after each `compile`."""
        before, self._compiled = (
            self._compiled,
            (self._model._compile_metrics, self._model._compile_loss),
        )
        is_new = before is None or any(map(operator.is_not, before, self._compiled))
        return is_new and not is_built(self._model)


def fixes_batch_size(model: keras.Model) -> bool:
    """Whether a model was created with inputs of a fixed batch size, that of a replica's share."""
    try:
        inputs = jax.tree.leaves(getattr(model, "inputs", None))
    except ValueError:  # of a Sequential model that is not built yet
        return False
    shapes = [getattr(each, "shape", ()) for each in inputs]
    return any(shape and shape[0] is not None for shape in shapes)
