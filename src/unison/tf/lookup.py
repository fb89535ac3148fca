"""`tf.lookup`: tables from keys to values, kept on the host.

Text is looked up outside compiled programs; integers also inside, in tables that do not change.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.errors import FailedPreconditionError
from unison.tf import dtypes
from unison.tf.dispatch import CompositeTensor
from unison.tf.dtypes import DType, as_dtype
from unison.tf.missing import names_missing_from, namespace
from unison.tf.sparse import SparseTensor
from unison.tf.tensors import convert_to_tensor, tensor_dtype
from unison.tf.text import StringTensor
from unison.unsupported import UnsupportedMember

__getattr__ = names_missing_from(__name__)


class KeyValueTensorInitializer:
    """The keys and values of a table.

    Args:
        keys: A vector.
        values: A vector of as many values.
        key_dtype: The keys' dtype. Default: that of `keys`.
        value_dtype: The values' dtype. Default: that of `values`.
        name: Without effect.

    TF: `tf.lookup.KeyValueTensorInitializer`.
    """

    initialize = UnsupportedMember("there are no graphs: tables are filled when they are made")

    def __init__(
        self,
        keys: Any,
        values: Any,
        key_dtype: Any = None,
        value_dtype: Any = None,
        name: str | None = None,
    ):
        self.keys = convert_to_tensor(keys, key_dtype)
        self.values = convert_to_tensor(values, value_dtype)
        if self.keys.shape != self.values.shape:
            raise ValueError(
                f"A table needs a value for every key. Received: {self.keys.size} keys and "
                f"{self.values.size} values."
            )

    @property
    def key_dtype(self) -> DType:
        return as_dtype(self.keys.dtype)

    @property
    def value_dtype(self) -> DType:
        return as_dtype(self.values.dtype)


def _items(tensor: Any) -> list[Any]:
    return np.asarray(tensor).reshape(-1).tolist()


class _Table:
    """The common part of the tables: a dictionary, and the dtypes of keys and values."""

    name = UnsupportedMember("there are no graphs, and tables have no names")

    def __init__(self, key_dtype: Any, value_dtype: Any, default_value: Any):
        self.key_dtype = as_dtype(key_dtype)
        self.value_dtype = as_dtype(value_dtype)
        self._entries: dict[Any, Any] = {}
        self._default = convert_to_tensor(default_value, self.value_dtype)

    @property
    def default_value(self) -> Any:
        """The value of keys that are not there."""
        return self._default

    def size(self, name: str | None = None) -> jax.Array:
        """Returns the number of keys, as int64."""
        return convert_to_tensor(np.int64(len(self._entries)))

    def lookup(self, keys: Any, name: str | None = None) -> Any:
        """Returns the values of the keys; of keys that are not there, the default.

        Args:
            keys: A tensor, or one that is ragged or sparse, as the result is then.
            name: Without effect.

        Raises:
            TypeError: The keys have another dtype than the table's.
        """
        if isinstance(keys, SparseTensor):
            return keys.with_values(self.lookup(keys.values))
        if isinstance(keys, CompositeTensor):
            return keys.with_flat_values(self.lookup(keys.flat_values))
        keys = convert_to_tensor(keys)
        if as_dtype(keys.dtype) != self.key_dtype:
            raise TypeError(
                f"Signature mismatch. Keys must be dtype {self.key_dtype}, got {keys.dtype}."
            )
        if isinstance(keys, jax.core.Tracer):
            return self._lookup_in_program(keys)
        (default,) = _items(self._default)
        found = [self._entries.get(key, default) for key in _items(keys)]
        return self._values(found, keys.shape)

    __getitem__ = lookup

    def _lookup_in_program(self, keys: jax.Array) -> jax.Array:
        if self.value_dtype == dtypes.string:
            raise TypeError(
                "A table of text cannot be looked up in a compiled program: JAX has no arrays of "
                "strings. Look it up before, for instance in Dataset.map."
            )
        if not self._entries:
            return jnp.full(keys.shape, self._default)
        known = np.array(sorted(self._entries), dtypes.named(self.key_dtype))
        values = self._values([self._entries[key] for key in known.tolist()], known.shape)
        places = jnp.clip(
            jnp.searchsorted(jnp.asarray(known, known.dtype), keys), 0, len(known) - 1
        )
        return jnp.where(
            jnp.asarray(known, known.dtype)[places] == keys, values[places], self._default
        )

    def _values(self, values: list[Any], shape: tuple[int, ...]) -> Any:
        if self.value_dtype == dtypes.string:
            return StringTensor(np.array(values, dtype=object).reshape(shape))
        return convert_to_tensor(np.array(values, tensor_dtype(self.value_dtype)).reshape(shape))

    def export(self, name: str | None = None) -> tuple[Any, Any]:
        """Returns all keys and all values."""
        keys, values = list(self._entries), list(self._entries.values())
        if self.key_dtype == dtypes.string:
            all_keys: Any = StringTensor(np.array(keys, dtype=object))
        else:
            all_keys = convert_to_tensor(np.array(keys, tensor_dtype(self.key_dtype)))
        return all_keys, self._values(values, (len(values),))

    def _insert(self, keys: Any, values: Any) -> None:
        keys = convert_to_tensor(keys, self.key_dtype)
        values = convert_to_tensor(values, self.value_dtype)
        self._entries.update(zip(_items(keys), _items(values), strict=True))


class StaticHashTable(_Table):
    """A table that does not change.

    Args:
        initializer: A `KeyValueTensorInitializer`.
        default_value: The value of keys that are not there.
        name: Without effect.
        experimental_is_anonymous: Without effect.

    Raises:
        FailedPreconditionError: A key has two values.

    Examples:
        >>> keys, values = ["a", "b"], [1, 2]
        >>> table = StaticHashTable(KeyValueTensorInitializer(keys, values), -1)
        >>> table.lookup(["b", "c"]).tolist()
        [2, -1]

    TF: `tf.lookup.StaticHashTable`.
    """

    def __init__(
        self,
        initializer: KeyValueTensorInitializer,
        default_value: Any,
        name: str | None = None,
        experimental_is_anonymous: bool = False,
    ):
        super().__init__(initializer.key_dtype, initializer.value_dtype, default_value)
        for key, value in zip(_items(initializer.keys), _items(initializer.values), strict=True):
            if self._entries.setdefault(key, value) != value:
                raise FailedPreconditionError(
                    message=f"HashTable has different value for same key. Key {key!r} has "
                    f"{self._entries[key]!r} and trying to add value {value!r}"
                )


class _MutableHashTable(_Table):
    """A table that can be changed, outside compiled programs.

    TF: `tf.lookup.experimental.MutableHashTable`.
    """

    def __init__(
        self,
        key_dtype: Any,
        value_dtype: Any,
        default_value: Any,
        name: str = "MutableHashTable",
        checkpoint: bool = True,
        experimental_is_anonymous: bool = False,
    ):
        super().__init__(key_dtype, value_dtype, default_value)

    def insert(self, keys: Any, values: Any, name: str | None = None) -> None:
        """Gives the keys these values."""
        self._insert(keys, values)

    def remove(self, keys: Any, name: str | None = None) -> None:
        """Takes keys out; those that are not there are no error."""
        for key in _items(convert_to_tensor(keys, self.key_dtype)):
            self._entries.pop(key, None)

    def _lookup_in_program(self, keys: jax.Array) -> jax.Array:
        raise TypeError(
            "A MutableHashTable cannot be looked up in a compiled program. Use a StaticHashTable, "
            "or look it up before."
        )


experimental = namespace("unison.tf.lookup.experimental", MutableHashTable=_MutableHashTable)
