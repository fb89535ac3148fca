"""A loop of `strategy.run` with a tape, as TensorFlow's tutorial on custom training writes it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import unison.tf as tf
from generated_programs.choices import Program
from generated_programs.examples import Examples
from generated_programs.parts import LOSSES, METRICS, make_optimizers
from generated_programs.steps import apply_gradients

_ON_READ = tf.VariableSynchronization.ON_READ
_SUM, _MEAN = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


class Loop:
    """The loop of a program. Construct it in the strategy's scope.

    Attributes:
        optimizers: The optimizers.
    """

    def __init__(self, program: Program, model: keras.Model, strategy: Any):
        self._program, self._model, self._strategy = program, model, strategy
        is_reduced = program.loop_loss == "loss_object"
        self._losses = [
            LOSSES[output.kind][output.loss](reduction=output.reduction if is_reduced else None)
            for output in program.outputs
        ]
        self._metrics = [
            [_metric(METRICS[output.kind][name]()) for name in output.metrics]
            for output in program.outputs
        ]
        self.optimizers = make_optimizers(program)
        self._variables = {
            "seen": tf.Variable(0.0, trainable=False, synchronization=_ON_READ, aggregation=_SUM),
            "last": tf.Variable(0.0, trainable=False, synchronization=_ON_READ, aggregation=_MEAN),
            "sum": tf.Variable(0.0, trainable=False, aggregation=_SUM),
            "mean": tf.Variable(0.0, trainable=False, aggregation=_MEAN),
            "steps": tf.Variable(0, trainable=False, aggregation=_FIRST),
        }
        self._step = tf.function(self._on_all_replicas)

    def fit(self, examples: Examples, seen: dict[str, Any], where: str) -> None:
        """Trains for the program's epochs, and notes what can be seen after each."""
        parts = examples.parts()
        batches = tf.data.Dataset.from_tensor_slices(parts).batch(self._program.batch)
        for epoch in range(self._program.epochs):
            for metric in self._all_metrics():
                metric.reset_state()
            distributed = self._strategy.experimental_distribute_dataset(batches)
            losses = [float(self._step(batch)) for batch in distributed]
            seen[f"{where}, losses of epoch {epoch}"] = np.array(losses)
            for number, metric in enumerate(self._all_metrics()):
                name = f"{where}, metric {number} {metric.name} of epoch {epoch}"
                seen[name] = np.asarray(metric.result())
            for name, variable in self._variables.items():
                seen[f"{where}, variable {name} after epoch {epoch}"] = variable.numpy()

    def _all_metrics(self) -> list[Any]:
        return [metric for of_output in self._metrics for metric in of_output]

    def _on_all_replicas(self, batch: Any) -> Any:
        losses = self._strategy.run(self._on_replica, args=(batch,))
        return self._strategy.reduce("SUM", losses, axis=None)

    def _on_replica(self, batch: Any) -> Any:
        x, y, *rest = batch
        targets = _flat(y)
        weights = _flat(rest[0]) if rest else [None] * len(targets)
        with tf.GradientTape(persistent=True) as tape:
            outputs = _flat(self._model(x, training=True))
            loss = 0.0
            for of_output, truth, guess, weight in zip(
                self._losses, targets, outputs, weights, strict=True
            ):
                loss += self._scaled(of_output(truth, guess, weight))
            if self._model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(self._model.losses))
            scaled = self.optimizers[0].scale_loss(loss)
        variables = self._model.trainable_variables
        apply_gradients(self._program.applying, tape, scaled, variables, self.optimizers)
        for metrics, truth, guess, weight in zip(
            self._metrics, targets, outputs, weights, strict=True
        ):
            for metric in metrics:
                metric.update_state(truth, guess, sample_weight=weight)
        self._note(targets[0])
        return loss

    def _scaled(self, losses: Any) -> Any:
        if self._program.loop_loss == "average":
            return tf.nn.compute_average_loss(losses, global_batch_size=self._program.batch)
        if self._program.loop_loss == "local_average":
            return tf.nn.compute_average_loss(losses)
        if self._program.loop_loss == "global_batch":
            return tf.reduce_sum(losses) / self._program.batch
        return losses

    def _note(self, target: Any) -> None:
        """Writes variables of every annotation, so that they hold what one device's do."""
        sum_of_share = tf.reduce_sum(tf.cast(target, "float32"))
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        self._variables["seen"].assign_add(tf.cast(tf.shape(target)[0], "float32"))
        self._variables["last"].assign(sum_of_share * replicas)
        self._variables["sum"].assign_add(sum_of_share)
        self._variables["mean"].assign_add(sum_of_share * replicas)
        self._variables["steps"].assign_add(1)


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [tree[name] for name in sorted(tree)]
    return list(tree) if isinstance(tree, list | tuple) else [tree]


def _metric(made: Any) -> keras.metrics.Metric:
    """Returns a metric of one that `compile` would make of a name or a function."""
    if isinstance(made, str):
        return keras.metrics.SparseCategoricalAccuracy(name=made)
    if isinstance(made, keras.metrics.Metric):
        return made
    return keras.metrics.MeanMetricWrapper(made, name=made.__name__)
