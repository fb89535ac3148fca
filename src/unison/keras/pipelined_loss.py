"""The loss of a model whose last layer is a pipeline: computed with the results, by 1F1B.

Keras calls the layers first, and the loss with their results. A pipeline needs the loss
while it runs (`unison.pipelining.pipeline_loss`). So the layer gets the loss and the targets
before the model is called; and when Keras then calls the loss of these results and targets, it
gets the value that the layer has computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras

from unison.keras.losses import GlobalLoss, recorded_mask
from unison.keras.pipeline import Pipeline

#: Losses that depend on several examples together: for a part of a batch, they differ.
_OF_BATCHES = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)


def with_pipelined_loss(model: keras.Model) -> Callable[..., Any]:
    """Returns `model.compute_loss_and_updates`, in training with the loss computed by a pipeline.

    A loss has to be a mean over examples, so that the mean of the micro-batches' losses is that of
    the batch. A loss whose scale against underflow is only known outside is computed there.

    Args:
        model: A Keras model. If it overrides this method, it is unchanged.
    """
    compute = model.compute_loss_and_updates
    if type(model).compute_loss_and_updates is not keras.Model.compute_loss_and_updates:
        return compute

    @functools.wraps(compute)
    def computing(
        trainable_variables: Any,
        non_trainable_variables: Any,
        metrics_variables: Any,
        x: Any,
        y: Any,
        sample_weight: Any,
        training: bool = False,
        optimizer_variables: Any = None,
    ) -> Any:
        run = functools.partial(
            compute,
            trainable_variables,
            non_trainable_variables,
            metrics_variables,
            x,
            y,
            sample_weight,
            training=training,
            optimizer_variables=optimizer_variables,
        )
        pipeline = _last_in_turns(model) if training else None
        compiled: Any = getattr(model, "_compile_loss", None)
        losses = getattr(compiled, "_flat_losses", None) or []
        if pipeline is None or len(losses) != 1 or not _is_mean(losses[0].loss):
            return run()
        scales = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        if scales or any(map(keras.tree.is_nested, (y, sample_weight))):
            return run()
        loss = PipelinedLoss(losses[0].loss, y, sample_weight)
        compiled._flat_losses = [losses[0]._replace(loss=loss)]
        try:
            with pipeline.computing(loss):
                return run()
        finally:
            compiled._flat_losses = losses

    return computing


class PipelinedLoss:
    """A loss that a pipeline has already computed, if it is called with the same values.

    Args:
        loss: The loss, as a step uses it.
        y_true: The targets of a replica's batch.
        sample_weight: Their weights, or None.
    """

    def __init__(self, loss: GlobalLoss, y_true: Any, sample_weight: Any):
        self._loss = loss
        self._told: tuple[jax.Array, jax.Array] | None = None
        #: Whether the loss turned out to leave some values out: it is not a mean over examples.
        self._is_masked = False
        self.targets = (y_true, sample_weight)

    def is_of(self, examples: int) -> bool:
        """Whether the targets have this number of examples."""
        return all(leaf.shape[:1] == (examples,) for leaf in jax.tree.leaves(self.targets))

    def of_microbatch(self, results: jax.Array, targets: Any) -> jax.Array:
        """Returns the loss of a micro-batch."""
        y_true, sample_weight = targets
        loss = self._loss.of_replica
        with recorded_mask(loss) as masks:
            value = loss(y_true, results, sample_weight)
        self._is_masked |= any(mask is not None for mask in masks)
        return value

    def tell(self, value: jax.Array, results: jax.Array) -> None:
        """Stores the mean of the micro-batches' losses, and the results to which it belongs."""
        self._told = value, results

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if self._told is not None and not self._is_masked:
            value, *known = (*self._told, *self.targets)
            asked = (y_pred, y_true, sample_weight)
            if all(one is other for one, other in zip(asked, known, strict=True)):
                return value
        return self._loss(y_true, y_pred, sample_weight)


def _last_in_turns(model: keras.Model) -> Pipeline | None:
    """Returns the 1F1B pipeline that computes the model's only output, if there is one."""
    outputs = getattr(model, "outputs", None) or []
    if len(outputs) != 1:
        return None
    layer = outputs[0]._keras_history.operation
    return layer if isinstance(layer, Pipeline) and layer.schedule == "1f1b" else None


def _is_mean(loss: Any) -> bool:
    """Whether a loss is a mean over the examples, unless it leaves some out."""
    if not isinstance(loss, GlobalLoss):
        return False
    of_replica = loss.of_replica
    reduces = of_replica.reduction in ("sum_over_batch_size", "mean")
    return reduces and getattr(of_replica, "fn", None) not in _OF_BATCHES
