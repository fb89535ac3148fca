"""Reading serialized `tf.train.Example`s into tensors; the work is `unison.data.examples`'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from unison.data.examples import (
    ExampleParser,
    FixedLenFeature,
    FixedLenSequenceFeature,
    Sparse,
    SparseFeature,
    VarLenFeature,
    message,
)
from unison.data.examples import parse_sequence_example as core_parse_sequence_example
from unison.eager_fallback import NeedsPythonError, needs_python
from unison.errors import InvalidArgumentError
from unison.runtime.precision import device_array
from unison.tf.io.ragged_features import RaggedFeature, RaggedParser
from unison.tf.pending import PendingText
from unison.tf.sparse import SparseTensor
from unison.tf.tensors import start_devices
from unison.tf.text import StringTensor, texts_of

__all__ = [
    "FixedLenFeature",
    "FixedLenSequenceFeature",
    "RaggedFeature",
    "SparseFeature",
    "VarLenFeature",
    "decode_json_example",
    "parse_example",
    "parse_sequence_example",
    "parse_single_example",
    "parse_single_sequence_example",
]


def parse_example(
    serialized: Any, features: Mapping[str, Any], example_names: Any = None, name: str | None = None
) -> dict[str, Any]:
    """Returns the features of a batch of serialized `tf.train.Example`s, or of one.

    The fast way to read records is `dataset.batch(n).map(lambda batch: parse_example(batch, ...))`.

    Args:
        serialized: A vector of strings, or one.
        features: What to read, by key: `FixedLenFeature`, `VarLenFeature`,
            `FixedLenSequenceFeature`, `SparseFeature`, `RaggedFeature`.
        example_names: Without effect.
        name: Without effect.

    Raises:
        InvalidArgumentError: What is serialized is no Example, lacks a feature, or has one of
            another kind or size.

    TF: `tf.io.parse_example`.
    """
    _check_features(features)
    ragged = {key: f for key, f in features.items() if isinstance(f, RaggedFeature)}
    others = {key: f for key, f in features.items() if key not in ragged}
    parser = ExampleParser(others) if others or not ragged else None
    if isinstance(serialized, PendingText):
        return _parsed_later(serialized, parser, features)
    needs_python("tf.io.parse_example")
    texts = _texts(serialized)
    found = {} if parser is None else _tensors(parser(texts))
    return found | RaggedParser(ragged)(texts) if ragged else found


def parse_single_example(
    serialized: Any, features: Mapping[str, Any], example_names: Any = None, name: str | None = None
) -> dict[str, Any]:
    """Returns the features of a serialized `tf.train.Example`; see `parse_example`.

    In the function of `Dataset.map`, whole blocks are parsed at once.

    TF: `tf.io.parse_single_example`.
    """
    _check_features(features)
    if len(getattr(serialized, "shape", ())) or isinstance(serialized, list | tuple):
        raise ValueError(f"Input serialized must be a scalar. Received: {serialized!r}")
    return parse_example(serialized, features)


def parse_sequence_example(
    serialized: Any,
    context_features: Mapping[str, Any] | None = None,
    sequence_features: Mapping[str, Any] | None = None,
    example_names: Any = None,
    name: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the features of a batch of serialized `tf.train.SequenceExample`s.

    Args:
        serialized: A vector of strings.
        context_features: What to read of the contexts, as `parse_example` takes it.
        sequence_features: What to read of the lists, by key: `FixedLenSequenceFeature`,
            `VarLenFeature`.
        example_names: Without effect.
        name: Without effect.

    Returns:
        The features of the contexts, those of the lists, and the lengths of the lists that are
        padded.

    TF: `tf.io.parse_sequence_example`.
    """
    given = [*(context_features or {}).values(), *(sequence_features or {}).values()]
    if any(isinstance(feature, RaggedFeature) for feature in given):
        raise ValueError(
            "parse_sequence_example takes no RaggedFeature in Unison: use VarLenFeature, and "
            "tf.RaggedTensor.from_sparse, or FixedLenSequenceFeature, which is padded."
        )
    needs_python("tf.io.parse_sequence_example")
    found = core_parse_sequence_example(_texts(serialized), context_features, sequence_features)
    return _tensors(found[0]), _tensors(found[1]), _tensors(found[2])


def parse_single_sequence_example(
    serialized: Any,
    context_features: Mapping[str, Any] | None = None,
    sequence_features: Mapping[str, Any] | None = None,
    example_name: Any = None,
    name: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the features of the context of a `tf.train.SequenceExample`, and of its lists.

    TF: `tf.io.parse_single_sequence_example`.
    """
    context, sequences, _ = parse_sequence_example(serialized, context_features, sequence_features)
    return context, sequences


def decode_json_example(json_examples: Any, name: str | None = None) -> StringTensor:
    """Returns `tf.train.Example`s that are written in JSON serialized.

    Raises:
        InvalidArgumentError: One is no Example.

    TF: `tf.io.decode_json_example`.
    """
    example = message("Example")
    from google.protobuf import json_format

    texts = StringTensor(json_examples)
    serialized = np.empty(texts.shape, object)
    for index, text in enumerate(texts.view(np.ndarray).flat):
        try:
            serialized.ravel()[index] = json_format.Parse(text, example()).SerializeToString()
        except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidArgumentError(
                message=f"Error while parsing JSON: {bytes(text)[:64]!r}: {str(error)[:200]}"
            ) from error
    return StringTensor(serialized)


def _check_features(features: Any) -> None:
    if not features:
        what = "None" if features is None else "empty"
        raise ValueError(f"Invalid argument: features cannot be {what}.")


def _texts(serialized: Any) -> Any:
    """Returns the argument of the parser: `bytes`, or an array of them."""
    return texts_of(serialized)[()]


def _parsed_later(
    serialized: PendingText, parser: ExampleParser | None, features: Mapping[str, Any]
) -> Any:
    if parser is None or any(
        not isinstance(feature, FixedLenFeature) for feature in features.values()
    ):
        # Rows of a block would be padded to each other.
        raise NeedsPythonError("Features of different lengths are parsed one by one.")
    if serialized.is_in_block + len(serialized.shape) != 1:
        raise NeedsPythonError("Blocks of batches are parsed one by one.")
    return serialized.through(parser)


def _tensors(parsed: dict[str, Any]) -> dict[str, Any]:
    start_devices()
    return {key: _tensor(value) for key, value in parsed.items()}


def _tensor(value: Any) -> Any:
    if isinstance(value, Sparse):
        return SparseTensor(*map(_tensor, value))
    if isinstance(value, bytes) or value.dtype.kind == "O":
        return StringTensor(value) if isinstance(value, bytes) else value.view(StringTensor)
    return device_array(np.asarray(value))
