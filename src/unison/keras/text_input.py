"""Text as the input of a model.

Keras converts a model's inputs to tensors, which cannot hold text. `converting_but_text` and
similar functions are Keras' methods, but pass text on, up to the layer that converts it to numbers.

A compiled step cannot have text as an input. `TextEncoder` calls the layers on the
host, before the step; in the step, the layers find their outputs in an `EncodedText`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters import data_adapter_utils

from unison.keras.host_layers import (
    EncodedText,
    HostLayer,
    is_text,
    observing_calls,
    text_array,
    with_text_as_objects,
)

_Method = Callable[..., Any]


def passes_as_text(value: Any) -> bool:
    """Whether `value` is an array of text, or replaces one."""
    return isinstance(value, EncodedText) or (isinstance(value, np.ndarray) and is_text(value))


def calling_with_text(call: _Method) -> _Method:
    """Returns `Model.__call__` that accepts text, as arrays or lists, among its inputs."""

    @functools.wraps(call)
    def call_with_text(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_has_text, args)):
            args = tuple(map(_with_tensors, map(with_text_as_objects, args)))
        return call(self, *args, **kwargs)

    return call_with_text


def _has_text(inputs: Any) -> bool:
    if isinstance(inputs, dict):
        return any(map(_has_text, inputs.values()))
    if isinstance(inputs, list | tuple):
        return any(isinstance(part, str | bytes) or _has_text(part) for part in inputs)
    return passes_as_text(inputs)


def _with_tensors(inputs: Any) -> Any:
    """Keras accepts tensors among text, but not other arrays."""
    return keras.tree.map_structure(
        lambda part: part if passes_as_text(part) else keras.ops.convert_to_tensor(part), inputs
    )


def counting_text_as_tensor(is_backend_tensor_or_symbolic: _Method) -> _Method:
    """Returns Keras' function that determines what is a tensor, including text."""

    @functools.wraps(is_backend_tensor_or_symbolic)
    def is_tensor(x: Any, allow_none: bool = False) -> bool:
        return is_backend_tensor_or_symbolic(x, allow_none) or passes_as_text(x)

    return is_tensor


def casting_but_text(convert_input: _Method) -> _Method:
    """Returns `DTypePolicy.convert_input` that leaves text unchanged."""

    @functools.wraps(convert_input)
    def convert(self: Any, x: Any, autocast: bool, dtype: Any) -> Any:
        return x if passes_as_text(x) else convert_input(self, x, autocast, dtype)

    return convert


def converting_but_text(convert_inputs_to_tensors: _Method) -> _Method:
    """Returns `Functional._convert_inputs_to_tensors` that leaves text unchanged."""

    @functools.wraps(convert_inputs_to_tensors)
    def convert(self: Any, flat_inputs: Sequence[Any]) -> list[Any]:
        if not any(map(passes_as_text, flat_inputs)):
            return convert_inputs_to_tensors(self, flat_inputs)
        return [
            value
            if value is None or passes_as_text(value)
            else keras.ops.convert_to_tensor(value, dtype=tensor.dtype)
            for value, tensor in zip(flat_inputs, self._inputs, strict=True)
        ]

    return convert


def ranking_but_text(adjust_input_rank: _Method) -> _Method:
    """Returns `Functional._adjust_input_rank` that adds and removes axes of text, too."""

    @functools.wraps(adjust_input_rank)
    def adjust(self: Any, flat_inputs: Sequence[Any]) -> list[Any]:
        if not any(map(passes_as_text, flat_inputs)):
            return adjust_input_rank(self, flat_inputs)
        inputs = zip(flat_inputs, self._inputs, strict=True)
        return adjust_input_rank(self, [_ranked(value, len(t.shape)) for value, t in inputs])

    return adjust


def _ranked(value: Any, rank: int) -> Any:
    """Returns text with `rank` axes, if adding or removing a last axis of size 1 suffices."""
    if not passes_as_text(value):
        return value
    shape = tuple(value.shape)
    if len(shape) == rank - 1:
        shape = (*shape, 1)
    elif len(shape) == rank + 1 and shape[-1] == 1:
        shape = shape[:-1]
    return value.reshaped(shape[1:]) if isinstance(value, EncodedText) else value.reshape(shape)


def build_on_text(model: keras.Model, data_batch: Any) -> None:
    """Builds a model and its compiled losses and metrics, if its inputs are text.

    Args:
        model: A compiled model.
        data_batch: A batch of its data.
    """
    x, y, _ = data_adapter_utils.unpack_x_y_sample_weight(data_batch)
    outputs = model(_first_rows(x))

    def symbolic(rows: Any) -> Any:
        return keras.KerasTensor(
            (None, *rows.shape[1:]), keras.backend.standardize_dtype(rows.dtype)
        )

    arguments = (None, *keras.tree.map_structure(symbolic, (y, outputs)))
    if model._compile_metrics is not None and not model._compile_metrics.built:
        keras.src.backend.compute_output_spec(model.compute_metrics, *arguments)
    if model._compile_loss is not None and not model._compile_loss.built:
        keras.src.backend.compute_output_spec(model._compute_loss, *arguments, training=False)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._post_build()


class TextEncoder:
    """Replaces the text of batches by the outputs of the model's layers.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        #: By structure of a batch: for every text leaf, its layers, and the shape of their inputs.
        self._layers: dict[Any, dict[int, dict[HostLayer, tuple[int, ...]]]] = {}

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with `EncodedText` in place of text."""
        leaves, structure = jax.tree.flatten(batch)
        if not any(map(passes_as_text, leaves)):
            return batch
        if structure not in self._layers:
            self._layers[structure] = self._layers_of(batch, leaves)
        for index, layers in self._layers[structure].items():
            text = text_array(leaves[index])
            arrays = {
                layer: layer.encode(text.reshape(len(text), *shape))
                for layer, shape in layers.items()
            }
            leaves[index] = EncodedText(text.shape[1:], arrays)
        return jax.tree.unflatten(structure, leaves)

    def _layers_of(
        self, batch: Any, leaves: Sequence[Any]
    ) -> dict[int, dict[HostLayer, tuple[int, ...]]]:
        """Finds the layers of each text, by calling the model on an example."""
        rows, structure = jax.tree.flatten(_first_rows(batch))
        layers: dict[int, dict[HostLayer, tuple[int, ...]]] = {
            index: {} for index, leaf in enumerate(leaves) if passes_as_text(leaf)
        }

        def observe(layer: HostLayer, text: Any) -> None:
            for index, seen in layers.items():
                if text.size == rows[index].size and np.shares_memory(text, rows[index]):
                    seen[layer] = text.shape[1:]

        x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(jax.tree.unflatten(structure, rows))
        with observing_calls(observe):
            jax.eval_shape(functools.partial(_call_without_weights, self._model, x))
        useless = [index for index, seen in layers.items() if not seen]
        if useless:
            raise ValueError(
                f"Model {self._model.name!r} gets text (of shape {leaves[useless[0]].shape}) that "
                "no layer converts to numbers directly. Let a StringLookup, "
                "TextVectorization or Hashing take that input, or convert it in dataset.map."
            )
        return layers


def _call_without_weights(model: keras.Model, x: Any) -> Any:
    """Calls `model`, whose weights may be in a running loop: any weights suffice for the shapes."""
    weights = [(weight, np.zeros(weight.shape, weight.dtype)) for weight in model.variables]
    with keras.StatelessScope(state_mapping=weights):
        return model(x)


def _first_rows(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[:1], batch)
