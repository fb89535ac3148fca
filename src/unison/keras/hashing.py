"""`Hashing` and `HashedCrossing`: buckets of strings and integers by FarmHash, as in TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unison.fingerprint import concatenated_fingerprints, fingerprint64
from unison.keras import host_layers
from unison.keras.host_layers import HostLayer
from unison.runtime.precision import device_array

#: The key with which `tf.sparse.cross_hashed` begins.
_CROSS_KEY = 0xDECAFCAFFE


class _Buckets(HostLayer):
    """The common part: a layer that assigns what it is given to `num_bins` buckets."""

    def __init__(self, num_bins: int, output_mode: str, name: str | None, **kwargs: Any):
        for ignored in ("trainable", "dtype"):
            kwargs.pop(ignored, None)
        if num_bins is None or num_bins <= 0:
            raise ValueError(f"num_bins must be positive. Received: {num_bins}")
        super().__init__(name, **kwargs)
        self.num_bins = num_bins
        self.output_mode = output_mode

    def _bin(self, value: Any) -> int:
        """Returns the bucket of one value."""
        raise NotImplementedError

    def _encoded(self, values: Iterable[Any], shape: tuple[int, ...]) -> np.ndarray:
        """Returns the outputs for values, which have this shape."""
        bins = np.array([self._bin(value) for value in values], dtype=np.int64).reshape(shape)
        if self.output_mode == "int":
            return bins
        return host_layers.encoded_categories(bins, self.output_mode, self.num_bins)

    def _spec(self, shape: Sequence[int | None]) -> keras.KerasTensor:
        """Returns the description of the outputs for values of this shape."""
        dtype = "int64" if self.output_mode == "int" else keras.config.floatx()
        encoded = host_layers.encoded_shape(shape, self.output_mode, self.num_bins)
        return keras.KerasTensor(encoded, dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_bins": self.num_bins,
            "output_mode": self.output_mode,
            "sparse": False,
        }


@keras.saving.register_keras_serializable("unison")
class Hashing(_Buckets):
    """Assigns strings or integers to buckets by FarmHash, as TensorFlow does; on the host.

    Args:
        num_bins: The number of buckets.
        mask_value: The value of bucket 0, which has no other values.
        salt: Must be None.
        output_mode: "int", "one_hot", "multi_hot" or "count".
        sparse: Must be False.
        name: The layer's name.
        kwargs: Further entries of a saved configuration.

    Examples:
        >>> Hashing(num_bins=3)([["A"], ["B"], ["C"], ["D"], ["E"]]).tolist()
        [[1], [0], [1], [1], [2]]

    TF: `tf.keras.layers.Hashing`.
    """

    def __init__(
        self,
        num_bins: int,
        mask_value: Any = None,
        salt: Any = None,
        output_mode: str = "int",
        sparse: bool = False,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(num_bins, host_layers.output_mode_of(output_mode), name, **kwargs)
        if sparse or salt is not None:
            raise ValueError(
                "Sparse outputs and salted hashing are not supported. Received: "
                f"sparse={sparse}, salt={salt}. Leave them at False and None."
            )
        self.mask_value = mask_value

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, jax.core.Tracer):
            raise TypeError(
                "Hashing works on the host: hash in the input pipeline (dataset.map), or put "
                "the layer where the model gets its inputs."
            )
        return super().call(inputs)

    def encode(self, inputs: Any) -> np.ndarray:
        if host_layers.is_text(inputs):
            values = host_layers.text_array(inputs)
        else:
            values = np.asarray(inputs).astype(np.int64)
        return self._encoded(values.ravel().tolist(), values.shape)

    def _bin(self, value: bytes | int) -> int:
        text = value if isinstance(value, bytes) else str(value).encode()
        if self.mask_value is None or self.num_bins == 1:
            return fingerprint64(text) % self.num_bins
        mask = self.mask_value
        if value == (mask.encode() if isinstance(mask, str) else mask):
            return 0
        return fingerprint64(text) % (self.num_bins - 1) + 1

    def compute_output_shape(self, input_shape: Any) -> Any:
        return host_layers.encoded_shape(input_shape, self.output_mode, self.num_bins)

    def compute_output_spec(self, inputs: Any) -> Any:
        return self._spec(inputs.shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "salt": None, "mask_value": self.mask_value}


@keras.saving.register_keras_serializable("unison")
class HashedCrossing(_Buckets):
    """Assigns combinations of features to buckets by FarmHash, as TensorFlow does; on the host.

    It is called with a list of two or more features: strings or integers of the same shape, which
    is `()`, `(batch,)` or `(batch, 1)`.

    Args:
        num_bins: The number of buckets.
        output_mode: "int" or "one_hot".
        sparse: Must be False.
        name: The layer's name.
        kwargs: Further entries of a saved configuration.

    Examples:
        >>> letters, numbers = ["A", "B", "A", "C", "A"], [101, 101, 101, 102, 102]
        >>> HashedCrossing(num_bins=5)((letters, numbers)).tolist()
        [1, 4, 1, 2, 3]

    TF: `tf.keras.layers.HashedCrossing`.
    """

    def __init__(
        self,
        num_bins: int,
        output_mode: str = "int",
        sparse: bool = False,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(num_bins, output_mode, name, **kwargs)
        if output_mode not in ("int", "one_hot"):
            raise ValueError(f"output_mode must be 'int' or 'one_hot'. Received: {output_mode!r}")
        if sparse:
            raise ValueError("Sparse outputs are not supported. Received: sparse=True.")

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, list | tuple):  # Keras refuses tensors beside other arrays
            inputs = [_tensor(each) for each in inputs]
        return super().__call__(inputs, *args, **kwargs)

    def call(self, inputs: Any) -> Any:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs)):
            raise TypeError(
                "HashedCrossing works on the host: cross features in the input pipeline "
                "(dataset.map)."
            )
        return super().call(inputs)

    def encode(self, inputs: Any) -> np.ndarray:
        if not isinstance(inputs, list | tuple) or len(inputs) < 2:
            raise ValueError(f"HashedCrossing takes a list of two or more features. Got: {inputs}")
        features = [_feature(each) for each in inputs]
        shapes = [feature.shape for feature in features]
        if len(set(shapes)) > 1 or len(shapes[0]) > 2 or shapes[0][1:] not in ((), (1,)):
            raise ValueError(
                "HashedCrossing takes features of one shape: (), (batch,) or (batch, 1). "
                f"Received: shapes {shapes}"
            )
        rows = zip(*(feature.ravel().tolist() for feature in features), strict=True)
        return self._encoded(rows, shapes[0])

    def _bin(self, row: Sequence[bytes | int]) -> int:
        crossed = _CROSS_KEY
        for value in row:
            own = fingerprint64(value) if isinstance(value, bytes) else value % 2**64
            crossed = concatenated_fingerprints(crossed, own)
        return crossed % self.num_bins

    def compute_output_shape(self, input_shape: Any) -> Any:
        return host_layers.encoded_shape(input_shape[0], self.output_mode, self.num_bins)

    def compute_output_spec(self, inputs: Any) -> Any:
        return self._spec(inputs[0].shape)


def _tensor(values: Any) -> Any:
    if host_layers.is_text(values) or not isinstance(values, np.ndarray | list | tuple):
        return values
    return device_array(np.asarray(values))


def _feature(values: Any) -> np.ndarray:
    """Returns a feature as an array of bytes or of integers."""
    if host_layers.is_text(values):
        return host_layers.text_array(values)
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"HashedCrossing takes text and integers. Received: dtype {array.dtype}")
    return array.astype(np.int64)
