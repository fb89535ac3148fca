"""`tf.train.Example` without TensorFlow: the messages, and reading them into arrays."""

from unison.data.examples.features import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    Sparse,
    SparseFeature,
    VarLenFeature,
)
from unison.data.examples.messages import message
from unison.data.examples.parsing import ExampleParser, parse_example
from unison.data.examples.sequences import parse_sequence_example

__all__ = [
    "ExampleParser",
    "FixedLenFeature",
    "FixedLenSequenceFeature",
    "Sparse",
    "SparseFeature",
    "VarLenFeature",
    "message",
    "parse_example",
    "parse_sequence_example",
]
