"""The models that can be measured without a program of one's own, on data of MNIST's shape."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from unison.cells import VariableAggregation
from unison.data import Dataset
from unison.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, Strategy
from unison.strategies.current import get_replica_context
from unison.variables import Variable

#: More epochs than needed: the program is ended when it has been measured.
_EPOCHS = 10_000

_SEED = 0
_CLASSES = 10
_RATE = 0.1


def main() -> None:
    """Trains a model until the program is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--examples", type=int, required=True)
    options = parser.parse_args()
    generator = np.random.default_rng(_SEED)
    images = generator.random((options.examples, 28, 28), np.float32)
    labels = generator.integers(0, _CLASSES, options.examples, np.int32)
    dataset = Dataset.from_tensor_slices((images, labels)).shuffle(options.examples, seed=_SEED)
    MODELS[options.model](_strategy(), dataset.batch(options.batch, drop_remainder=True))


def _strategy() -> Strategy:
    cluster = json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})
    if len(cluster.get("worker", [])) > 1:
        return MultiWorkerMirroredStrategy()
    return MirroredStrategy()


def _mlp(keras: Any) -> list[Any]:
    layers = keras.layers
    return [
        layers.Flatten(),
        layers.Dense(512, activation="relu"),
        layers.Dropout(0.2),
        layers.Dense(_CLASSES),
    ]


def _cnn(keras: Any) -> list[Any]:
    layers = keras.layers
    return [
        layers.Reshape((28, 28, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dense(_CLASSES),
    ]


def _fit(layers: Callable[[Any], list[Any]]) -> Callable[[Strategy, Dataset], None]:
    def train(strategy: Strategy, dataset: Dataset) -> None:
        import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)

        import keras  # isort: skip

        keras.utils.set_random_seed(_SEED)
        with strategy.scope():
            model = keras.Sequential([keras.Input((28, 28)), *layers(keras)])
            model.compile(
                optimizer="adam",
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        model.fit(dataset, epochs=_EPOCHS, verbose=0)

    return train


def _loop(strategy: Strategy, dataset: Dataset) -> None:
    """Trains the layers of `mlp`, without the dropout, by SGD in a loop over `strategy.run`."""
    import jax
    import jax.numpy as jnp
    import optax

    generator = np.random.default_rng(_SEED)
    shapes = [(784, 512), (512,), (512, _CLASSES), (_CLASSES,)]
    with strategy.scope():
        weights = [
            Variable(
                generator.normal(0, 0.05, shape).astype("float32"),
                aggregation=VariableAggregation.MEAN,
            )
            for shape in shapes
        ]

    def loss_of(values: list[jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(images.reshape(len(images), -1) @ values[0] + values[1])
        logits = hidden @ values[2] + values[3]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    def step(batch: Any) -> jax.Array:
        values = [weight.value() for weight in weights]
        loss, gradients = jax.value_and_grad(loss_of)(values, *batch)
        replicas = get_replica_context()
        assert replicas is not None
        gradients = replicas.all_reduce("mean", gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(_RATE * gradient)
        return loss

    for _ in range(_EPOCHS):
        for batch in strategy.experimental_distribute_dataset(dataset):
            strategy.run(step, args=(batch,))


#: The function that trains each.
MODELS: dict[str, Callable[[Strategy, Dataset], None]] = {
    "mlp": _fit(_mlp),
    "cnn": _fit(_cnn),
    "loop": _loop,
}


if __name__ == "__main__":
    main()
