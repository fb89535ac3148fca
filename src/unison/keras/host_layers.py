"""Layers that compute on the host, with NumPy: text is never copied to a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unison.runtime.devices import prepare_backend
from unison.runtime.precision import device_dtype
from unison.runtime.private_jax import backend_is_started
from unison.thread_local import ThreadLocal

#: Keras 2's other names of output modes.
_OTHER_NAMES = {"binary": "multi_hot", "tf-idf": "tf_idf"}


class HostLayer(keras.layers.Layer):
    """A layer whose `encode` converts text, or other data on the host, to numbers.

    Args:
        name: The layer's name.
    """

    def __init__(self, name: str | None = None):
        super().__init__(name=name)
        # Otherwise, Keras would convert what it passes on to tensors.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(with_text_as_objects(inputs), *args, **kwargs)

    def encode(self, inputs: Any) -> np.ndarray:
        """Returns the layer's outputs for `inputs`, on the host."""
        raise NotImplementedError

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, EncodedText):
            return inputs.made_by(self)
        for observer in _observers.value:
            observer(self, inputs)
        return on_device(self.encode(inputs))

    def build(self, input_shape: Any = None) -> None:
        """Creates nothing: the layer's state comes from its arguments, or from `adapt`."""

    def get_build_config(self) -> dict[str, Any]:
        return {}

    def build_from_config(self, config: Any) -> None:
        self.built = True


@jax.tree_util.register_pytree_node_class
class EncodedText:
    """The outputs of layers for a text input of their model: replaces the text in a compiled step.

    Args:
        shape: The shape of the text, without its first axis (the examples).
        arrays: The output of each layer.
    """

    dtype = "string"

    def __init__(self, shape: tuple[int, ...], arrays: Mapping[HostLayer, Any]):
        self._shape = shape
        self._arrays = dict(arrays)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*next(iter(self._arrays.values())).shape[:1], *self._shape)

    def made_by(self, layer: HostLayer) -> Any:
        """Returns the output of `layer` for the text.

        Raises:
            ValueError: The layer's text differs from that for which the step's inputs were encoded.
        """
        if layer not in self._arrays:
            raise ValueError(
                f"Layer {layer.name!r} gets text in a compiled step that it did not get when the "
                "model was called before. A layer must receive the same text input in every call."
            )
        return self._arrays[layer]

    def reshaped(self, shape: tuple[int, ...]) -> EncodedText:
        """Returns the same for text of another shape, without the axis of the examples."""
        return EncodedText(shape, self._arrays)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return tuple(self._arrays.values()), (self._shape, tuple(self._arrays))

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Sequence[Any]) -> EncodedText:
        shape, layers = static
        return cls(shape, dict(zip(layers, arrays, strict=True)))


_observers: ThreadLocal[tuple[Callable[[HostLayer, Any], None], ...]] = ThreadLocal(())


@contextlib.contextmanager
def observing_calls(observer: Callable[[HostLayer, Any], None]) -> Iterator[None]:
    """Calls `observer(layer, inputs)` for every host layer that this thread calls inside."""
    with _observers.bound_to((*_observers.value, observer)):
        yield


def on_device(array: np.ndarray) -> Any:
    """Returns `array` as a JAX array; text stays on the host."""
    if array.dtype == object:
        return array
    if not backend_is_started():
        prepare_backend()
    return jnp.asarray(array, dtype=device_dtype(array.dtype))


def text_array(value: Any) -> np.ndarray:
    """Returns strings (`str` or `bytes`, arrays or nested lists of them) as an array of `bytes`.

    Raises:
        TypeError: `value` contains something that is not a string.
    """
    array = np.asarray(value).view(np.ndarray)
    encoded = np.empty(array.size, dtype=object)
    encoded[:] = [_as_bytes(item) for item in array.ravel().tolist()]
    return encoded.reshape(array.shape)


def is_text(value: Any) -> bool:
    """Whether `value` is a string, or an array or list whose first element is one."""
    if isinstance(value, np.ndarray) and value.ndim:
        has_objects = np.asarray(value).view(np.ndarray).dtype.kind in "OSU"
        return has_objects and value.size > 0 and is_text(value.flat[0])
    if isinstance(value, list | tuple) and value:
        return is_text(value[0])
    if isinstance(value, np.ndarray):
        value = value.item()
    return isinstance(value, str | bytes)


def _as_bytes(item: Any) -> bytes:
    if isinstance(item, np.ndarray) and item.ndim == 0:
        item = item.item()
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    raise TypeError(f"Expected text: str or bytes. Received: {item!r} of {type(item).__name__}")


def with_text_as_objects(data: Any) -> Any:
    """Returns data for `fit` in which all text, lists too, are arrays that Keras can slice."""
    is_fixed_width = isinstance(data, np.ndarray) and data.view(np.ndarray).dtype.kind in "SU"
    if is_fixed_width or _is_list_of_text(data):
        return text_array(data)
    if isinstance(data, dict):
        return {name: with_text_as_objects(part) for name, part in data.items()}
    if type(data) in (list, tuple):
        return type(data)(map(with_text_as_objects, data))
    return data


def _is_list_of_text(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(item, str | bytes) or _is_list_of_text(item) for item in value)


def adapt(layer: Any, data: Any, steps: int | None = None) -> None:
    """Calls `layer.update_state` with `data`: one array or list, or the batches of a dataset."""
    layer.reset_state()
    if isinstance(data, list | tuple | np.ndarray | jax.Array):
        array = np.asarray(data)
        layer.update_state(array[:, None] if array.ndim == 1 else array)
    elif isinstance(data, Iterable):
        for index, batch in enumerate(data):
            if steps is not None and index >= steps:
                break
            layer.update_state(batch)
    else:
        raise TypeError(
            f"adapt() takes an array, a list, or an iterable of batches. Received: {data!r}"
        )
    layer.finalize_state()


def output_mode_of(mode: str) -> str:
    """Returns Keras 3's name of an output mode.

    Raises:
        ValueError: Unknown mode.
    """
    mode = _OTHER_NAMES.get(mode, mode)
    if mode not in ("int", "one_hot", "multi_hot", "count", "tf_idf"):
        raise ValueError(
            "output_mode must be 'int', 'one_hot', 'multi_hot', 'count' or 'tf_idf'. "
            f"Received: {mode!r}"
        )
    return mode


def encoded_categories(indices: np.ndarray, mode: str, depth: int) -> np.ndarray:
    """Returns indices as vectors of `depth`; a negative index is ignored.

    Args:
        indices: An array whose last axis (except for "one_hot") is that of the values of an
            example.
        mode: "one_hot", "multi_hot" or "count".
        depth: The number of categories.
    """
    if mode == "one_hot":
        if indices.ndim > 1 and indices.shape[-1] == 1:
            indices = indices[..., 0]
        return (indices[..., None] == np.arange(depth)).astype(keras.config.floatx())
    indices = np.atleast_1d(indices)
    counts = np.zeros((*indices.shape[:-1], depth), dtype=keras.config.floatx())
    rows = counts.reshape(-1, depth)
    examples = np.broadcast_to(
        np.arange(len(rows))[:, None], (len(rows), indices.shape[-1])
    ).ravel()
    columns = indices.reshape(-1)
    counted = (columns >= 0) & (columns < depth)
    np.add.at(rows, (examples[counted], columns[counted]), 1)
    return np.minimum(counts, 1) if mode == "multi_hot" else counts


def traced_categories(indices: jax.Array, mode: str, depth: int) -> jax.Array:
    """The same as `encoded_categories`, for traced indices."""
    if mode == "one_hot" and indices.ndim > 1 and indices.shape[-1] == 1:
        indices = indices[..., 0]
    one_hot = jax.nn.one_hot(indices, depth, dtype=keras.config.floatx())
    if mode == "one_hot":
        return one_hot
    return jnp.max(one_hot, axis=-2) if mode == "multi_hot" else jnp.sum(one_hot, axis=-2)


def encoded_shape(shape: Sequence[int | None], mode: str, depth: int) -> tuple[int | None, ...]:
    """Returns the shape of the result of `encoded_categories` for indices of `shape`."""
    shape = tuple(shape)
    if mode == "int":
        return shape
    if mode == "one_hot":
        return (*(shape[:-1] if len(shape) > 1 and shape[-1] == 1 else shape), depth)
    return (*shape[:-1], depth)
