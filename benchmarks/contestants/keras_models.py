"""The Keras models, and the round that all Keras contestants share: `fit` of one epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops

from benchmarks import training_data
from benchmarks.protocol import Contestant
from benchmarks.workloads import (
    CLASSES,
    GPT_EPSILON,
    GPT_POLICY,
    GPT_SIZES,
    GRAPH,
    IMAGE_SHAPE,
    ROWS_OF_EMBEDDING,
    SEQUENCE_SHAPE,
    FitWork,
    GPTSize,
)


class _Kind(NamedTuple):
    """What a model is trained by."""

    loss: Callable[[], keras.losses.Loss]
    metrics: tuple[str, ...]


_CLASSES = _Kind(
    lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True), ("accuracy",)
)
_KINDS = {
    "recommender": _Kind(lambda: keras.losses.BinaryCrossentropy(from_logits=True), ()),
    "unet": _Kind(keras.losses.MeanSquaredError, ()),
}


def mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(512, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )


def wide_mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(4096, activation="relu"),
            layers.Dense(4096, activation="relu"),
            layers.Dense(10),
        ]
    )


def cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def resnet() -> keras.Model:
    """A residual block of each of three widths, with batch normalization."""

    def normalized(x: Any, filters: int, size: int, strides: int = 1) -> Any:
        x = layers.Conv2D(filters, size, strides, "same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    images = keras.Input(IMAGE_SHAPE)
    x = layers.ReLU()(normalized(images, 16, 3))
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        y = layers.ReLU()(normalized(x, filters, 3, strides))
        y = normalized(y, filters, 3)
        shortcut = x if strides == 1 else normalized(x, filters, 1, strides)
        x = layers.ReLU()(y + shortcut)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(CLASSES)(x))


def lstm() -> keras.Model:
    return keras.Sequential(
        [keras.Input(SEQUENCE_SHAPE), layers.LSTM(128), layers.Dense(CLASSES)],
    )


def gru() -> keras.Model:
    return keras.Sequential(
        [keras.Input(SEQUENCE_SHAPE), layers.GRU(128), layers.Dense(CLASSES)],
    )


def recommender() -> keras.Model:
    """Embeddings of 50,000 users and as many items, and dense layers on the pair."""
    pairs = keras.Input((2,), dtype="int32")
    users = layers.Embedding(ROWS_OF_EMBEDDING, 32)(pairs[:, 0])
    items = layers.Embedding(ROWS_OF_EMBEDDING, 32)(pairs[:, 1])
    x = layers.Dense(64, activation="relu")(layers.Concatenate()([users, items]))
    return keras.Model(pairs, layers.Dense(1)(x))


def unet() -> keras.Model:
    """The noise of an image, as diffusion models learn it: three resolutions, group norms."""

    def block(x: Any, time: Any, filters: int) -> Any:
        y = layers.Conv2D(filters, 3, padding="same")(x)
        y = layers.Activation("silu")(layers.GroupNormalization(8)(y))
        y = y + layers.Reshape((1, 1, filters))(layers.Dense(filters)(time))
        y = layers.Conv2D(filters, 3, padding="same")(y)
        return layers.Activation("silu")(layers.GroupNormalization(8)(y))

    images, share = keras.Input(IMAGE_SHAPE), keras.Input((1,))
    time = layers.Dense(64, activation="silu")(share)
    fine = block(images, time, 32)
    middle = block(layers.Conv2D(32, 3, 2, "same")(fine), time, 64)
    x = block(layers.Conv2D(64, 3, 2, "same")(middle), time, 64)
    for skipped, filters in ((middle, 64), (fine, 32)):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skipped])
        x = block(x, time, filters)
    return keras.Model((images, share), layers.Conv2D(IMAGE_SHAPE[-1], 1)(x))


class Messages(layers.Layer):
    """A layer of a graph network: nodes hear what their neighbours say along the edges."""

    def __init__(self, width: int):
        super().__init__()
        self.said = layers.Dense(width, activation="relu")
        self.heard = layers.Dense(width, activation="relu")

    def build(self, nodes_shape: Any, edges_shape: Any) -> None:
        features = nodes_shape[-1]
        self.said.build((None, 2 * features))
        self.heard.build((None, features + self.said.units))

    def call(self, nodes: Any, edges: Any) -> Any:
        graphs, count = ops.shape(nodes)[0], nodes.shape[1]
        offsets = count * ops.arange(graphs, dtype="int32")[:, None, None]
        ends = ops.reshape(edges + offsets, (-1, 2))
        flat = ops.reshape(nodes, (-1, nodes.shape[2]))
        from_ends = ops.reshape(ops.take(flat, ends, axis=0), (-1, 2 * nodes.shape[2]))
        heard = ops.segment_sum(self.said(from_ends), ends[:, 1], graphs * count)
        new = self.heard(ops.concatenate([flat, heard], axis=-1))
        return ops.reshape(new, (-1, count, self.heard.units))

    def compute_output_shape(self, nodes_shape: Any, edges_shape: Any) -> Any:
        return (*nodes_shape[:2], self.heard.units)


def graph() -> keras.Model:
    nodes = keras.Input((GRAPH.nodes, GRAPH.features))
    edges = keras.Input((GRAPH.edges, 2), dtype="int32")
    x = nodes
    for _ in range(3):
        x = Messages(64)(x, edges)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model((nodes, edges), layers.Dense(CLASSES)(x))


class Positions(layers.Layer):
    """Adds an embedding of each position."""

    def build(self, shape: Any) -> None:
        self.embeddings = self.add_weight(shape[1:], initializer="zeros")

    def call(self, x: Any) -> Any:
        return x + self.embeddings


def gpt(size: GPTSize, initializer: Any) -> keras.Model:
    def norm() -> keras.layers.Layer:
        return layers.LayerNormalization(epsilon=GPT_EPSILON)

    given: Any = {"kernel_initializer": initializer}
    tokens = keras.Input((size.length,), dtype="int32")
    x = layers.Embedding(size.words, size.width, embeddings_initializer=initializer)(tokens)
    x = Positions()(x)
    for _ in range(size.layers):
        y = norm()(x)
        attention = layers.MultiHeadAttention(size.heads, size.width // size.heads, **given)
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.Dense(4 * size.width, "gelu", **given)(norm()(x))
        x = x + layers.Dense(size.width, **given)(y)
    logits = layers.Dense(size.words, use_bias=False, **given)(norm()(x))
    return keras.Model(tokens, logits)


MODELS = {
    "mlp": mlp,
    "wide_mlp": wide_mlp,
    "cnn": cnn,
    "resnet": resnet,
    "lstm": lstm,
    "gru": gru,
    "recommender": recommender,
    "unet": unet,
    "graph": graph,
}


def compiled(name: str, device: str = "cpu") -> keras.Model:
    """Returns the model `name`, compiled for training; call it in the strategy's scope."""
    if name == "gpt":
        if device == "gpu":
            keras.config.set_dtype_policy(GPT_POLICY)
        model = gpt(GPT_SIZES[device], keras.initializers.RandomNormal(stddev=0.02))
    else:
        model = MODELS[name]()
    kind = _KINDS.get(name, _CLASSES)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3), loss=kind.loss(), metrics=list(kind.metrics)
    )
    return model


class KerasFit(Contestant):
    """A round is one call of `fit`, with all that it does before and after the steps."""

    def __init__(
        self,
        model: keras.Model,
        work: FitWork,
        libraries: dict[str, str],
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ):
        self._model = model
        self._work = work
        self._libraries = libraries
        self._callbacks = callbacks
        self._inputs, self._targets = training_data.load(work)
        self._history: dict[str, list[float]] = {}

    @property
    def versions(self) -> dict[str, str]:
        return {"keras": keras.__version__, **self._libraries}

    def round(self) -> float:
        begin = time.perf_counter()
        history = self._model.fit(
            self._inputs,
            self._targets,
            batch_size=self._work.batch,
            epochs=1,
            verbose=self._work.verbose,
            callbacks=list(self._callbacks),
        )
        seconds = time.perf_counter() - begin
        self._history = history.history
        return self._work.examples / seconds

    def facts(self) -> dict[str, Any]:
        logs = {name: values[-1] for name, values in self._history.items()}
        return logs | {"state_bytes": _state_bytes(self._model)}


def _state_bytes(model: keras.Model) -> int:
    """Returns the bytes of one copy of the parameters and the optimizer's state."""
    # By shapes: reading a value could make a copy, and the memory is what is measured.
    return sum(
        math.prod(variable.shape) * np.dtype(variable.dtype).itemsize
        for variable in (*model.variables, *model.optimizer.variables)
    )
