"""Serialized SequenceExamples into arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from unison.data.examples.columns import KIND_NAMES, column_from, parsed, values_in
from unison.data.examples.features import (
    FixedLenSequenceFeature,
    Sparse,
    VarLenFeature,
    dtype_of_kind,
    kind_of,
    missing_value,
)
from unison.data.examples.parsing import (
    ExampleParser,
    known_shape,
    places_in_rows,
    without_batch,
)
from unison.data.leaves import as_leaf
from unison.errors import InvalidArgumentError


def parse_sequence_example(
    serialized: Any,
    context_features: Mapping[str, Any] | None = None,
    sequence_features: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns the features of one serialized `tf.train.SequenceExample`, or of a batch of them.

    Args:
        serialized: `bytes`, or an array or list of them.
        context_features: The features of the context to parse, as in `parse_example`.
        sequence_features: The lists of features to parse, by key: a
            `FixedLenSequenceFeature`, or a `VarLenFeature`.

    Returns:
        The features of the context; those of the lists, with an axis for the steps (in a batch,
        padded to the longest); and the numbers of steps of the padded ones.

    Raises:
        InvalidArgumentError: The bytes are not a SequenceExample, or it lacks a feature, or has
            one of another kind or size.

    TF: `tf.io.parse_sequence_example`, `tf.io.parse_single_sequence_example`.
    """
    if not context_features and not sequence_features:
        raise ValueError("Expected context_features or sequence_features. Received: none")
    leaf = as_leaf(serialized)
    texts = [leaf] if isinstance(leaf, bytes) else list(leaf)
    messages = [parsed("SequenceExample", text) for text in texts]
    context: dict[str, Any] = {}
    if context_features:
        # On the wire, a context has the format of an Example's features.
        wanted = parsed("Example", b"")
        examples = []
        for found in messages:
            wanted.features.CopyFrom(found.context)
            examples.append(wanted.SerializeToString())
        context = ExampleParser(context_features)(np.array(examples, object))
    sequences: dict[str, Any] = {}
    lengths: dict[str, Any] = {}
    for key, feature in sorted((sequence_features or {}).items()):
        lists = [
            found.feature_lists.feature_list[key].feature
            if key in found.feature_lists.feature_list
            else None
            for found in messages
        ]
        if isinstance(feature, VarLenFeature):
            sequences[key] = _sparse(key, lists, feature)
        elif isinstance(feature, FixedLenSequenceFeature):
            sequences[key], lengths[key] = _dense(key, lists, feature)
        else:
            raise TypeError(
                "Expected a FixedLenSequenceFeature or a VarLenFeature for the list "
                f"{key!r}. Received: {feature!r}"
            )
    if not isinstance(leaf, bytes):
        return context, sequences, lengths
    alone = [
        {key: without_batch(value) for key, value in found.items()}
        for found in (context, sequences, lengths)
    ]
    return alone[0], alone[1], alone[2]


def _dense(
    key: str, lists: list[Any], feature: FixedLenSequenceFeature
) -> tuple[np.ndarray, np.ndarray]:
    kind = kind_of(feature.dtype)
    shape = known_shape(key, feature.shape)
    size = math.prod(shape)
    dtype = dtype_of_kind(kind)
    lengths = np.array([len(steps or ()) for steps in lists], np.int64)
    padding = missing_value(dtype) if feature.default_value is None else feature.default_value
    rows = np.empty((len(lists), int(lengths.max(initial=0)), size), dtype)
    rows[...] = padding
    for index, steps in enumerate(lists):
        if steps is None and not feature.allow_missing:
            raise InvalidArgumentError(
                message=f"Name: <unknown>, Feature list '{key}' is required but could not be "
                f"found in example {index}. Did you mean to include it in "
                "feature_list_dense_missing_assumed_empty, that is, allow_missing=True?"
            )
        for step, of_step in enumerate(steps or ()):
            values = values_in(of_step, key, kind, index)
            if values is None or len(values) != size:
                raise InvalidArgumentError(
                    message=f"Feature list: {key}, Index: {index}, step {step}. Number of "
                    f"{KIND_NAMES[kind]} values != expected. Values size: {len(values or ())} but "
                    f"output shape: {list(shape)}"
                )
            rows[index, step] = values
    return rows.reshape((*rows.shape[:2], *shape)), lengths


def _sparse(key: str, lists: list[Any], feature: VarLenFeature) -> Sparse:
    kind = kind_of(feature.dtype)
    steps_of = np.array([len(steps or ()) for steps in lists], np.int64)
    found = (
        values_in(of_step, key, kind, index) or ()
        for index, steps in enumerate(lists)
        for of_step in steps or ()
    )
    column = column_from(found, kind)
    counts = column.counts
    examples = np.repeat(np.repeat(np.arange(len(lists)), steps_of), counts)
    steps = np.repeat(places_in_rows(steps_of), counts)
    indices = np.stack([examples, steps, places_in_rows(counts)], 1)
    longest = [len(lists), steps_of.max(initial=0), counts.max(initial=0)]
    return Sparse(indices, column.values, np.array(longest, np.int64))
