"""Train steps of one's own, for `fit`.

Those with a tape scale their losses as TensorFlow teaches: what a replica differentiates is its
part of the loss of the global batch.
"""

from __future__ import annotations

from typing import Any

import jax
import keras

import unison.tf as tf


@keras.saving.register_keras_serializable("random programs")
class Stateless(keras.Model):
    """The `train_step` of Keras' guide for JAX."""

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(weights: Any, others: Any, metrics: Any) -> Any:
            mapping = [
                *zip(self.trainable_variables, weights, strict=True),
                *zip(self.non_trainable_variables, others, strict=True),
                *zip(self.metrics_variables, metrics, strict=True),
            ]
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
                predictions = self(x, training=True)
                loss = self.compute_loss(x, y, predictions, sample_weight, training=True)
                self._loss_tracker.update_state(loss, sample_weight=_count(x))
                scaled = self.optimizer.scale_loss(loss)
            others = [
                new if (new := scope.get_current_value(variable)) is not None else old
                for variable, old in zip(self.non_trainable_variables, others, strict=True)
            ]
            metrics = [
                new if (new := scope.get_current_value(variable)) is not None else old
                for variable, old in zip(self.metrics_variables, metrics, strict=True)
            ]
            return scaled, (predictions, others, metrics)

        (_, (predictions, others, metrics)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            weights, others, metrics
        )
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        mapping = list(zip(self.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            logs = self.compute_metrics(x, y, predictions, sample_weight)
        metrics = [
            new if (new := scope.get_current_value(variable)) is not None else old
            for variable, old in zip(self.metrics_variables, metrics, strict=True)
        ]
        count = tf.distribute.get_replica_context().all_reduce("SUM", float(_count(x)))
        return {**logs, "examples": count}, (weights, others, slots, metrics)


def _count(x: Any) -> Any:
    return jax.tree.leaves(x)[0].shape[0]


APPLYING = ("apply", "clip_sums", "minimize", "two_optimizers")


def apply_gradients(
    way: str, tape: tf.GradientTape, loss: Any, variables: list[Any], optimizers: list[Any]
) -> None:
    """Updates variables by the gradients of a replica's loss, in one of the ways of `APPLYING`."""
    if way == "minimize":
        optimizers[0].minimize(loss, variables, tape=tape)
    elif way == "two_optimizers":
        half = len(variables) // 2
        for optimizer, some in zip(optimizers, (variables[:half], variables[half:]), strict=True):
            optimizer.apply_gradients(zip(tape.gradient(loss, some), some, strict=True))
    elif way == "clip_sums":
        replica = tf.distribute.get_replica_context()
        sums = replica.all_reduce("SUM", tape.gradient(loss, variables))
        clipped, _ = tf.clip_by_global_norm(sums, 0.3)
        pairs = zip(clipped, variables, strict=True)
        optimizers[0].apply_gradients(pairs, skip_gradients_aggregation=True)
    else:
        gradients = tape.gradient(loss, variables)
        optimizers[0].apply_gradients(zip(gradients, variables, strict=True))


class _Taped(tf.keras.Model):
    applying = "apply"
    second_optimizer: Any = None

    def loss_of(self, x: Any, y: Any, predictions: Any, sample_weight: Any) -> Any:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            predictions = self(x, training=True)
            loss = self.loss_of(x, y, predictions, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        optimizers = [self.optimizer, self.second_optimizer]
        apply_gradients(self.applying, tape, scaled, self.trainable_variables, optimizers)
        logs = self.compute_metrics(x, y, predictions, sample_weight)
        # What a tracker shows of such a loss is a replica's part, as docs/keras.md says.
        return {name: value for name, value in logs.items() if name != "loss"}


@keras.saving.register_keras_serializable("random programs")
class ComputesLoss(_Taped):
    """Differentiates what `compute_loss` returns."""

    def loss_of(self, x: Any, y: Any, predictions: Any, sample_weight: Any) -> Any:
        return self.compute_loss(x, y, predictions, sample_weight)


class _ByExample(_Taped):
    """Differentiates what it makes of the examples' losses."""

    def loss_of(self, x: Any, y: Any, predictions: Any, sample_weight: Any) -> Any:
        total = 0.0
        if sample_weight is None:
            sample_weight = jax.tree.map(lambda _: None, predictions)
        for loss, truth, guess, weight in zip(
            self.example_losses, _flat(y), _flat(predictions), _flat(sample_weight), strict=True
        ):
            total += self.scaled(loss(truth, guess, weight))
        if self.losses:
            total += tf.nn.scale_regularization_loss(tf.add_n(self.losses))
        return total


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [tree[name] for name in sorted(tree)]
    return list(tree) if isinstance(tree, list | tuple) else [tree]


@keras.saving.register_keras_serializable("random programs")
class Averages(_ByExample):
    """Averages the examples' losses by `compute_average_loss`."""

    def scaled(self, losses: Any) -> Any:
        return tf.nn.compute_average_loss(losses)


@keras.saving.register_keras_serializable("random programs")
class DividesByBatch(_ByExample):
    """Divides the sum of the examples' losses by the size of a global batch, and adds a penalty."""

    global_batch = 1

    def loss_of(self, x: Any, y: Any, predictions: Any, sample_weight: Any) -> Any:
        # Each replica adds its part of a penalty, also one without examples.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        squares = [tf.reduce_sum(variable**2) for variable in self.trainable_variables[:2]]
        penalty = 0.01 * tf.cast(tf.add_n(squares), "float32") / replicas if squares else 0.0
        return super().loss_of(x, y, predictions, sample_weight) + penalty

    def scaled(self, losses: Any) -> Any:
        return tf.reduce_sum(losses) / self.global_batch


@keras.saving.register_keras_serializable("random programs")
class CallsLosses(_ByExample):
    """Adds what Keras' loss objects return."""

    def scaled(self, losses: Any) -> Any:
        return losses


STEPS: dict[str, type[keras.Model]] = {
    "keras": keras.Model,
    "stateless": Stateless,
    "compute_loss": ComputesLoss,
    "average": Averages,
    "global_batch": DividesByBatch,
    "loss_object": CallsLosses,
    "loop": keras.Model,
}

#: Steps with a tape.
TAPED = ("compute_loss", "average", "global_batch", "loss_object", "loop")

#: Steps that reduce the examples' losses themselves.
BY_EXAMPLE = ("average", "global_batch")
