"""The model of a random program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from generated_programs.choices import Layer, Output, Program
from generated_programs.layers import (
    AddsLoss,
    Captures,
    Centers,
    Counts,
    DrawsNoise,
    ReferenceNormalization,
    Residual,
    imitated,
)

Build = Callable[..., keras.layers.Layer]

#: What a layer takes: "vector" is (batch, features), "steps" (batch, time, features), "image"
#: (batch, height, width, channels).
LAYERS: dict[str, tuple[tuple[str, ...], Build]] = {
    "dense": (("vector", "steps", "image"), lambda **o: keras.layers.Dense(4, "tanh", **o)),
    "relu": (("vector", "steps", "image"), lambda **o: keras.layers.Dense(5, "relu", **o)),
    "residual": (("vector", "steps"), lambda **_: Residual()),
    "prelu": (("vector",), lambda **_: keras.layers.PReLU()),
    "layer_norm": (("vector", "steps"), lambda **_: keras.layers.LayerNormalization()),
    "rms_norm": (("vector", "steps"), lambda **_: keras.layers.RMSNormalization()),
    "group_norm": (("image",), lambda **_: keras.layers.GroupNormalization(1)),
    "unit_norm": (("vector",), lambda **_: keras.layers.UnitNormalization()),
    "spectral_norm": (("vector",), lambda **_: _spectral()),
    "batch_norm": (("vector", "steps", "image"), lambda **_: _normalization(synchronized=False)),
    "sync_batch_norm": (
        ("vector", "steps", "image"),
        lambda **_: _normalization(synchronized=True),
    ),
    "dropout": (("vector", "steps", "image"), lambda **_: keras.layers.Dropout(0.4, seed=5)),
    "noise": (("vector", "steps"), lambda **_: keras.layers.GaussianNoise(0.3, seed=6)),
    "seedless_dropout": (("vector", "steps"), lambda **_: keras.layers.Dropout(0.3)),
    "recurrent_dropout": (
        ("steps",),
        lambda **_: keras.layers.GRU(3, return_sequences=True, dropout=0.3),
    ),
    "counts": (("vector", "steps", "image"), lambda **_: Counts()),
    "centers": (("vector", "steps", "image"), lambda **_: Centers()),
    "captures": (("vector", "steps", "image"), lambda **_: Captures(not _in_scope)),
    "tf_noise": (("vector", "steps", "image"), lambda **_: DrawsNoise()),
    "adds_loss": (("vector", "steps", "image"), lambda **_: AddsLoss()),
    "masking": (("steps",), lambda **_: keras.layers.Masking()),
    "lstm": (("steps",), lambda **o: keras.layers.LSTM(3, return_sequences=True, **o)),
    "gru": (("steps",), lambda **o: keras.layers.GRU(3, return_sequences=True, **o)),
    "simple_rnn": (("steps",), lambda **o: keras.layers.SimpleRNN(3, return_sequences=True, **o)),
    "bidirectional": (
        ("steps",),
        lambda **_: keras.layers.Bidirectional(keras.layers.LSTM(2, return_sequences=True)),
    ),
    "time_distributed": (
        ("steps",),
        lambda **_: keras.layers.TimeDistributed(keras.layers.Dense(3, "tanh")),
    ),
    "attention": (("steps",), lambda **_: _Attention()),
    "query_attention": (("steps",), lambda **_: _QueryAttention()),
    "conv1d": (("steps",), lambda **o: keras.layers.Conv1D(3, 2, padding="causal", **o)),
    "conv2d": (("image",), lambda **o: keras.layers.Conv2D(3, 3, padding="same", **o)),
    "strided_conv2d": (("image",), lambda **o: keras.layers.Conv2D(4, 2, strides=2, **o)),
    "separable_conv2d": (("image",), lambda **_: keras.layers.SeparableConv2D(3, 2)),
    "depthwise_conv2d": (("image",), lambda **_: keras.layers.DepthwiseConv2D(2)),
    "transposed_conv2d": (("image",), lambda **o: keras.layers.Conv2DTranspose(2, 2, **o)),
    "max_pool": (("image",), lambda **_: keras.layers.MaxPooling2D(2, padding="same")),
    "average_pool": (("image",), lambda **_: keras.layers.AveragePooling2D(2, padding="same")),
}

#: Layers of which the kernel may be regularized and constrained, and the outputs regularized.
REGULARIZED = ("dense", "relu", "lstm", "gru", "simple_rnn", "conv1d", "conv2d")

#: Layers of which the results on one device are those of a number of replicas.
IMITATING = ("batch_norm", "counts")

#: Layers that draw random numbers.
RANDOM = ("dropout", "noise", "seedless_dropout", "recurrent_dropout", "tf_noise")

STEPS = 5
FEATURES = {"vector": (6,), "steps": (STEPS, 3), "tokens": (STEPS,), "image": (6, 6, 2)}
TOKENS, CLASSES = 9, 3


def _normalization(synchronized: bool) -> keras.layers.Layer:
    if imitated() == 1 and _in_scope:
        return keras.layers.BatchNormalization(momentum=0.8, synchronized=synchronized)
    if synchronized:
        return keras.layers.BatchNormalization(momentum=0.8)
    return ReferenceNormalization(momentum=0.8)


#: Whether models are built in a strategy's scope.
_in_scope = False


def built_in_scope(is_so: bool) -> None:
    global _in_scope
    _in_scope = is_so


def _spectral() -> keras.layers.Layer:
    return keras.layers.SpectralNormalization(keras.layers.Dense(4))


class _Attention:
    """Self-attention: called with one value."""

    def __init__(self) -> None:
        self.layer = keras.layers.MultiHeadAttention(2, 2)

    def __call__(self, value: Any) -> Any:
        return self.layer(value, value)


class _QueryAttention:
    def __init__(self) -> None:
        self.layer = keras.layers.GroupQueryAttention(2, 2, 1)

    def __call__(self, value: Any) -> Any:
        return self.layer(value, value)


def make_layer(layer: Layer) -> Any:
    """Returns a Keras layer, or what is called like one."""
    options: dict[str, Any] = {}
    if layer.kind in REGULARIZED:
        if layer.regularizer is not None:
            options["kernel_regularizer"] = _REGULARIZERS[layer.regularizer]()
        if layer.activity:
            options["activity_regularizer"] = keras.regularizers.L2(0.02)
        if layer.constrained:
            options["kernel_constraint"] = keras.constraints.MaxNorm(0.9)
    made = LAYERS[layer.kind][1](**options)
    if layer.frozen:
        (made.layer if isinstance(made, _Attention | _QueryAttention) else made).trainable = False
    return made


_REGULARIZERS = {
    "l1": lambda: keras.regularizers.L1(0.01),
    "l2": lambda: keras.regularizers.L2(0.02),
    "orthogonal": lambda: keras.regularizers.OrthogonalRegularizer(0.02),
}


def make_model(program: Program, kind: type[keras.Model]) -> keras.Model:
    """Builds the model of a program.

    Args:
        program: The program.
        kind: The class of the model.
    """
    inputs, ends = [], []
    shared: dict[str, list[Any]] = {}
    for number, each in enumerate(program.inputs):
        dtype = "int32" if each.kind == "tokens" else None
        tensor = keras.Input(FEATURES[each.kind], dtype=dtype, name=f"in_{number}")
        inputs.append(tensor)
        layers = shared.get(each.kind) if program.shared else None
        if layers is None:
            layers = [make_layer(layer) for layer in each.layers if _takes(layer, each.kind)]
            if each.kind == "tokens":
                masks = number == 0
                layers.insert(0, keras.layers.Embedding(TOKENS, 4, mask_zero=masks))
            shared[each.kind] = layers
        for layer in layers:
            tensor = layer(tensor)
        ends.append(tensor)
    keeps_steps = any(output.kind == "steps" for output in program.outputs)
    if keeps_steps:
        merged, rank = ends[0], "steps"
    else:
        flat = [_flattened(end, each.kind) for end, each in zip(ends, program.inputs, strict=True)]
        merged, rank = (flat[0] if len(flat) == 1 else keras.layers.Concatenate()(flat)), "vector"
    for layer in program.head:
        if rank in LAYERS[layer.kind][0]:
            merged = make_layer(layer)(merged)
    outputs = [
        _output(output, merged, f"out_{number}") for number, output in enumerate(program.outputs)
    ]
    if program.named:
        return kind(
            {f"in_{number}": tensor for number, tensor in enumerate(inputs)},
            {f"out_{number}": tensor for number, tensor in enumerate(outputs)},
        )
    return kind(
        inputs if len(inputs) > 1 else inputs[0], outputs if len(outputs) > 1 else outputs[0]
    )


def _takes(layer: Layer, kind: str) -> bool:
    return ("steps" if kind == "tokens" else kind) in LAYERS[layer.kind][0]


def _flattened(tensor: Any, kind: str) -> Any:
    if kind in ("steps", "tokens"):
        return keras.layers.GlobalAveragePooling1D()(tensor)  # which looks at masks
    return keras.layers.GlobalAveragePooling2D()(tensor) if kind == "image" else tensor


def _output(output: Output, tensor: Any, name: str) -> Any:
    units, activation = {
        "number": (1, None),
        "steps": (1, None),
        "binary": (1, "sigmoid"),
        "classes": (CLASSES, "softmax"),
        "one_hot": (CLASSES, "softmax"),
    }[output.kind]
    # Biases that differ: an example of zeros would be of several classes alike, and round-off would
    # say of which.
    biases = keras.initializers.RandomUniform(0.05, 0.2, seed=7)
    dtype = keras.config.floatx()
    layer = keras.layers.Dense(units, activation, bias_initializer=biases, name=name, dtype=dtype)
    return layer(tensor)
