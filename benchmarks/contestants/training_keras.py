"""A training loop of one's own as TensorFlow's tutorials write it, for `tf` and for `unison.tf`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from benchmarks import training_examples
from benchmarks.workloads import WIDTHS, TrainingWork


def model_of(work: TrainingWork) -> keras.Model:
    """Returns the model, with the parameters that all begin with; call it in the scope."""
    inputs, *hidden, classes = WIDTHS[work.model]
    layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
    model = keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(classes)])
    model.set_weights(training_examples.initial_parameters(work))
    return model


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(training_examples.RATE, epsilon=training_examples.EPSILON)


class Loop:
    """A model, its optimizer and a compiled step.

    Args:
        tf: TensorFlow, or `unison.tf`.
        strategy: A strategy of it.
        work: The workload.
        make_optimizer: Makes the optimizer.
    """

    def __init__(
        self,
        tf: Any,
        strategy: Any,
        work: TrainingWork,
        make_optimizer: Callable[[], keras.optimizers.Optimizer] = optimizer,
    ):
        with strategy.scope():
            self.model = model_of(work)
            self.optimizer = adam = make_optimizer()
            adam.build(self.model.trainable_variables)

        def step(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels=labels, logits=self.model(images, training=True)
                )
                loss = tf.reduce_sum(losses) / work.batch
            gradients = tape.gradient(loss, self.model.trainable_variables)
            adam.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            return loss

        @tf.function
        def on_replicas(images: Any, labels: Any) -> Any:
            return strategy.run(step, args=(images, labels))

        self.step = on_replicas
        self.step_uncompiled = lambda images, labels: strategy.run(step, args=(images, labels))

    def parameters(self) -> list[Any]:
        return [variable.numpy() for variable in self.model.trainable_variables]
