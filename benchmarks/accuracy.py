"""What compressed training costs in accuracy: `python -m benchmarks.accuracy --data mnist.npz`.

Trains a network several times with each method of `unison.compression`, as it is by default, and
without any. Prints, as a table in Markdown, how many of the test images are recognized, and what a
replica sends in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

import unison
import unison.train
from benchmarks import machine
from unison import compression
from unison.cli.demo_data import Images, load_images
from unison.cli.errors import CommandError
from unison.compression import Compression, LocalTraining

#: Divides the images of MNIST, and is divided by 2, 3 and 4 replicas.
_BATCH = 120
_EVALUATION_BATCH = 1000


class Network(NamedTuple):
    """What is trained.

    Attributes:
        layers: Returns its layers.
        rate: The learning rate of SGD.
        epochs: How often it sees all training images.
    """

    layers: Callable[[], list[keras.layers.Layer]]
    rate: float
    epochs: int


class Method(NamedTuple):
    """How gradients travel.

    Attributes:
        compression: By what they are compressed, if they are.
        momentum: That of the optimizer.
    """

    compression: Compression | LocalTraining | None
    momentum: float = 0.9


class Row(NamedTuple):
    """What has been measured of a method.

    Attributes:
        method: Its name.
        optimizer: That of the optimizer.
        accuracies: In percent of the test images, for each seed.
        difference: The mean of these less that without compression, in percentage points.
        bytes_sent: What a replica sends in a step.
        ratio: How many times fewer bytes than without compression.
    """

    method: str
    optimizer: str
    accuracies: list[float]
    difference: float
    bytes_sent: float
    ratio: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)


def _mlp() -> list[keras.layers.Layer]:
    return [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]


def _cnn() -> list[keras.layers.Layer]:
    return [
        keras.layers.Reshape((28, 28, 1)),
        keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
        keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]


NETWORKS = {"mlp": Network(_mlp, 0.1, 5), "cnn": Network(_cnn, 0.05, 3)}

METHODS = {
    "none": Method(None),
    "bfloat16": Method(compression.bfloat16()),
    "float16": Method(compression.float16()),
    "int8": Method(compression.int8()),
    "int4": Method(compression.int4()),
    # These two have the momentum themselves.
    "sign": Method(compression.sign(), momentum=0.0),
    "topk": Method(compression.topk(), momentum=0.0),
    "powersgd": Method(compression.powersgd()),
    "local_sgd": Method(compression.local_sgd()),
    "diloco": Method(compression.diloco()),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    add = parser.add_argument
    named = [name for name in METHODS if name != "none"]
    add("--data", required=True, metavar="PATH", help="images, as Keras' mnist.npz has them")
    add("--model", choices=tuple(NETWORKS), default="mlp", help="what is trained (%(default)s)")
    add("--seeds", type=int, default=3, metavar="N", help="trainings of each (%(default)s)")
    add("--methods", default=",".join(named), metavar="NAME,NAME", help="which (%(default)s)")
    add("--replicas", type=int, default=2, metavar="N", help="logical devices (%(default)s)")
    add("--epochs", type=int, metavar="N", help="of each training (5 of the MLP, 3 of the CNN)")
    add("--json", type=pathlib.Path, metavar="PATH", help="write everything measured there")
    options = parser.parse_args(arguments)
    methods = options.methods.split(",")
    if unknown := set(methods) - set(named):
        parser.error(f"--methods knows {', '.join(named)}. Received: {', '.join(unknown)}")
    for name in ("seeds", "replicas", "epochs"):
        if (number := getattr(options, name)) is not None and number < 1:
            parser.error(f"--{name}: expected 1 or more. Received: {number}")
    network = NETWORKS[options.model]
    if options.epochs:
        network = network._replace(epochs=options.epochs)
    try:
        images = load_images(options.data)
    except CommandError as error:
        parser.error(str(error))
    unison.set_logical_cpu_devices(options.replicas)
    rows: list[Row] = []
    print(f"{options.model}, {options.replicas} replicas, {network.epochs} epochs\n\n{_HEADER}")
    for name in METHODS:
        if name in ("none", *methods):
            plain = rows[0] if rows else None
            rows.append(measured(name, network, images, options.replicas, options.seeds, plain))
            print(as_markdown(rows[-1]), flush=True)
    if options.json:
        told = {
            "machine": machine.description(),
            "model": options.model,
            "replicas": options.replicas,
            "batch": _BATCH,
            "epochs": network.epochs,
            "rows": [row._asdict() | {"mean": row.mean} for row in rows],
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def measured(
    name: str, network: Network, images: Images, replicas: int, seeds: int, plain: Row | None
) -> Row:
    """Trains a network with a method, once with each seed.

    Args:
        name: A key of `METHODS`.
        network: What is trained.
        images: On what, and what it is tested with.
        replicas: The number of replicas.
        seeds: How many seeds there are: 0 and those that follow.
        plain: What was measured without compression; None: this is that.
    """
    method = METHODS[name]
    accuracies = []
    for seed in range(seeds):
        strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
        with strategy.scope():
            keras.utils.set_random_seed(seed)
            model = keras.Sequential([keras.Input((images.x_train.shape[1],)), *network.layers()])
            optimizer = keras.optimizers.SGD(network.rate, momentum=method.momentum)
            if method.compression is not None:
                unison.train.with_compression(optimizer, method.compression)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, metrics=["accuracy"])
        model.fit(
            images.x_train, images.y_train, batch_size=_BATCH, epochs=network.epochs, verbose=0
        )
        _, accuracy = model.evaluate(
            images.x_test, images.y_test, batch_size=_EVALUATION_BATCH, verbose=0
        )
        accuracies.append(100 * accuracy)
    weights: dict[str, Any] = {weight.path: weight for weight in model.trainable_variables}
    # What would be sent without compression, any of them tells.
    told = compression.report(method.compression or compression.bfloat16(), weights, replicas)
    momentum = f", momentum={method.momentum}" if method.momentum else ""
    row = Row(name, f"SGD({network.rate}{momentum})", accuracies, 0.0, told.bytes_sent, told.ratio)
    if plain is None:
        return row._replace(bytes_sent=told.bytes_uncompressed, ratio=1.0)
    return row._replace(difference=row.mean - plain.mean)


_HEADER = """\
| compression | optimizer | accuracy of each seed | mean | difference | bytes | times fewer |
| --- | --- | --- | --- | --- | --- | --- |"""


def as_markdown(row: Row) -> str:
    """Returns the row of the table."""
    each = ", ".join(f"{accuracy:.2f}" for accuracy in row.accuracies)
    if row.method == "none":
        name, difference, fewer = "none", "", ""
    else:
        name, difference = f"`{row.method}()`", f"{row.difference:+.2f}"
        fewer = f"{row.ratio:.1f}"
    return (
        f"| {name} | `{row.optimizer}` | {each} | {row.mean:.2f} | {difference} | "
        f"{row.bytes_sent:,.0f} | {fewer} |"
    )


if __name__ == "__main__":
    sys.exit(main())
