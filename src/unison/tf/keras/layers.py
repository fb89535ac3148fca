"""`tf.keras.layers`: Keras' layers, those for text without TensorFlow, and `experimental`."""

from __future__ import annotations

from typing import Any

import keras

from unison.keras import lookup, text_vectorization
from unison.keras.hashing import HashedCrossing, Hashing
from unison.keras.lookup import IntegerLookup
from unison.strategies import has_strategy
from unison.tf.keras.names import make_module, stand_over
from unison.tf.text import StringTensor

__all__ = [
    "HashedCrossing",
    "Hashing",
    "IntegerLookup",
    "StringLookup",
    "TextVectorization",
    "ThresholdedReLU",
]


class StringLookup(lookup.StringLookup):
    """See `unison.keras.lookup.StringLookup`; the inverse returns a string tensor.

    TF: `tf.keras.layers.StringLookup`.
    """

    def call(self, inputs: Any) -> Any:
        outputs = super().call(inputs)
        return StringTensor(outputs) if self.invert else outputs


class TextVectorization(text_vectorization.TextVectorization):
    """See `unison.keras.text_vectorization`; functions of the program get string tensors.

    TF: `tf.keras.layers.TextVectorization`.
    """

    def _for_functions(self, texts: Any) -> StringTensor:
        return StringTensor(texts)


def ThresholdedReLU(theta: float = 1.0, **kwargs: Any) -> keras.layers.Layer:  # noqa: N802
    """Returns the layer that passes values greater than `theta`.

    TF: `tf.keras.layers.ThresholdedReLU` (Keras 2).
    """
    return keras.layers.ReLU(threshold=theta, **kwargs)


def _synchronized_batch_normalization(*args: Any, **kwargs: Any) -> keras.layers.Layer:
    """Normalizes by the statistics of the global batch; outside of a scope, by those of the batch.

    TF: `tf.keras.layers.experimental.SyncBatchNormalization`.
    """
    return keras.layers.BatchNormalization(*args, synchronized=has_strategy(), **kwargs)


__getattr__ = stand_over(__name__)

make_module(
    f"{__name__}.experimental",
    {
        "EinsumDense": keras.layers.EinsumDense,
        "SyncBatchNormalization": _synchronized_batch_normalization,
    },
)
_PREPROCESSING = (
    "CategoryEncoding CenterCrop Discretization HashedCrossing Hashing IntegerLookup "
    "Normalization RandomContrast RandomCrop RandomFlip RandomRotation RandomTranslation "
    "RandomZoom Rescaling Resizing StringLookup TextVectorization".split()
)
make_module(
    f"{__name__}.experimental.preprocessing", {name: globals()[name] for name in _PREPROCESSING}
)
