"""`RaggedTensor`: rows of different lengths, as values and the splits between the rows."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from unison.data.leaves import as_leaf
from unison.data.ragged import RaggedArray
from unison.eager_fallback import needs_python
from unison.tf.dispatch import implementations
from unison.tf.dispatch import made as there_are_ragged
from unison.tf.ragged.construction import Constructors, count_of, values_of
from unison.tf.ragged.partitions import (
    Splits,
    known,
    lengths_of,
    partition,
    rowids_of,
    tensor_of,
)
from unison.tf.tensor_spec import TensorShape
from unison.tf.tensors import convert_to_tensor, known_value, tensor_dtype
from unison.tf.text import StringTensor
from unison.unsupported import UnsupportedMember


@jax.tree_util.register_pytree_node_class
class RaggedTensor(Constructors):
    """A tensor with one or more axes whose slices may have different lengths.

    Row `i` of a ragged tensor is `values[row_splits[i]:row_splits[i + 1]]`, where the values are a
    tensor, or ragged again. It is made by one of the class methods, or by `tf.ragged.constant`.

    The splits are on the host, the values on the devices (text, too, is on the host). In JAX it is
    a pytree: it can be an argument and a result of `strategy.run`, of `tf.function` and of JAX's
    transformations. In a compiled program the splits are traced, and values may be padded; see
    `docs/ragged.md`.

    Examples:
        >>> ragged = RaggedTensor.from_row_lengths([3, 1, 4, 1, 5], [2, 0, 3])
        >>> ragged
        <tf.RaggedTensor [[3, 1], [], [4, 1, 5]]>
        >>> ragged.shape, ragged[2].tolist(), (2 * ragged).to_list()
        (TensorShape([3, None]), [4, 1, 5], [[6, 2], [], [8, 2, 10]])

    TF: `tf.RaggedTensor`.
    """

    __slots__ = ("__weakref__", "_exact", "_flat", "_is_padded", "_splits", "_uniform")

    # NumPy's arrays leave operators to it.
    __array_ufunc__ = None
    # As TensorFlow's: it is compared by value.
    __hash__ = None  # type: ignore[assignment]

    _flat: Any
    _splits: tuple[Splits, ...]
    #: For every ragged axis the length of all rows, if it is one by construction.
    _uniform: tuple[int | None, ...]
    #: Whether the values have padding at their end, as those of distributed batches do.
    _is_padded: bool
    _exact: tuple[Any, tuple[Splits, ...]] | None

    consumers = UnsupportedMember("there are no graphs: values do not know what uses them")

    def __init__(self, *args: Any, **kwargs: Any):
        del args, kwargs
        raise ValueError(
            "RaggedTensor constructor is private; please use one of the factory methods instead "
            "(e.g., RaggedTensor.from_row_lengths())"
        )

    @classmethod
    def of(
        cls,
        flat: Any,
        splits: Sequence[Splits],
        uniform: Sequence[int | None] | None = None,
        is_padded: bool = False,
    ) -> RaggedTensor:
        """Returns the ragged tensor of parts that are known to fit.

        Args:
            flat: The values inside of all ragged axes.
            splits: The splits of every ragged axis, outermost first.
            uniform: For every ragged axis the length of all rows; None where they may differ.
            is_padded: Whether the values have padding at their end.
        """
        made = cls.__new__(cls)
        made._flat = flat
        made._splits = tuple(splits)
        made._uniform = (None,) * len(made._splits) if uniform is None else tuple(uniform)
        made._is_padded = is_padded
        made._exact = None
        if not there_are_ragged:
            there_are_ragged.append(True)
        return made

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self._flat, *self._splits), (self._uniform, self._is_padded)

    @classmethod
    def tree_unflatten(cls, known: Any, parts: Sequence[Any]) -> RaggedTensor:
        flat, *splits = parts
        return cls.of(flat, splits, *known)

    def parts(self) -> tuple[Any, ...]:
        return (self.flat, *self.nested_row_splits)

    def of_parts(self, parts: Sequence[Any]) -> RaggedTensor:
        flat, *splits = parts
        return RaggedTensor.of(flat, splits, self._uniform, self._is_padded)

    @property
    def _type_spec(self) -> Any:
        """The `tf.RaggedTensorSpec` that describes it."""
        return implementations["spec"](self)

    @property
    def _own(self) -> tuple[Any, tuple[Splits, ...]]:
        """The values and the splits, without the padding of a batch that was made for devices."""
        if self._exact is None:
            self._exact = _without_padding(self._flat, self._splits)
        return self._exact

    @classmethod
    def around(cls, values: Any, splits: Splits, uniform: int | None = None) -> RaggedTensor:
        if isinstance(values, RaggedTensor):
            return cls.of(
                values.flat,
                (splits.astype(values._splits[0].dtype), *values._own[1]),
                (uniform, *values._uniform),
            )
        return cls.of(values, (splits,), (uniform,))

    # -- parts -----------------------------------------------------------------------------

    @property
    def values(self) -> Any:
        """The rows, one after the other: a tensor, or a ragged one.

        Raises:
            ValueError: In a compiled program they have padding, of a distributed batch.
        """
        self._refuse_padding("values")
        return self.inner

    @property
    def flat_values(self) -> Any:
        """The values inside of all ragged axes.

        Raises:
            ValueError: As `values`.
        """
        self._refuse_padding("flat_values")
        return self.flat

    def _refuse_padding(self, name: str) -> None:
        if self._is_padded and isinstance(self._flat, jax.core.Tracer):
            raise ValueError(
                f"In strategy.run, the {name} of a ragged tensor of a distributed batch end with "
                "padding, which sums and means over them would count. Compute of each value by "
                "tf.ragged.map_flat_values(function, x), and reduce the ragged tensor itself: "
                "tf.reduce_mean(x)."
            )

    @property
    def inner(self) -> Any:
        """The same as `values`, for the operations, which know of padding."""
        flat, splits = self._own
        if len(splits) == 1:
            return flat
        return RaggedTensor.of(flat, splits[1:], self._uniform[1:], self._is_padded)

    @property
    def flat(self) -> Any:
        """The same as `flat_values`, for the operations, which know of padding."""
        return self._own[0]

    @property
    def is_padded(self) -> bool:
        """Whether it is of a distributed batch, whose values have padding at their end."""
        return self._is_padded

    @property
    def row_splits(self) -> Any:
        """The places in `values` at which the rows begin, and that at which the last one ends."""
        return tensor_of(self._own[1][0])

    @property
    def nested_row_splits(self) -> tuple[Any, ...]:
        """The splits of all ragged axes, outermost first."""
        return tuple(map(tensor_of, self._own[1]))

    @property
    def partitions(self) -> tuple[Splits, ...]:
        """The splits of all ragged axes: NumPy's arrays, or traced ones."""
        splits = self._own[1]
        found = map(known, splits)
        return tuple(own if k is None else k for own, k in zip(splits, found, strict=True))

    @property
    def ragged_array(self) -> RaggedArray:
        """The same tensor as an element of a dataset, on the host.

        Raises:
            ValueError: In a compiled program.
        """
        self._known_splits("ragged_array")
        flat = self.flat
        return RaggedArray(as_leaf(flat), self.partitions)

    @property
    def uniform_lengths(self) -> tuple[int | None, ...]:
        """For every ragged axis the length of all rows, if it is one by construction."""
        return self._uniform

    @property
    def uniform_row_length(self) -> Any:
        """The length of all rows, if the tensor was made with one; otherwise None."""
        length = self._uniform[0]
        return None if length is None else tensor_of(np.array(length, self._splits[0].dtype))

    @property
    def ragged_rank(self) -> int:
        """The number of ragged axes."""
        return len(self._splits)

    @property
    def dtype(self) -> Any:
        """The dtype of the values, as that of other tensors: NumPy's, or `tf.string`."""
        return self._flat.dtype

    @property
    def shape(self) -> TensorShape:
        """The sizes, None for ragged axes."""
        nrows = self._splits[0].shape[0] - 1
        return TensorShape([nrows, *self._uniform, *self._flat.shape[1:]])

    def get_shape(self) -> TensorShape:
        """Returns `shape`."""
        return self.shape

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self._splits) + int(self._flat.ndim)

    def nrows(self, out_type: Any = None, name: str | None = None) -> Any:
        """Returns the number of rows."""
        dtype = self._splits[0].dtype if out_type is None else tensor_dtype(out_type)
        return tensor_of(np.array(self._splits[0].shape[0] - 1, dtype))

    def row_starts(self, name: str | None = None) -> Any:
        """Returns the places in `values` at which the rows begin."""
        return tensor_of(self.partitions[0][:-1])

    def row_limits(self, name: str | None = None) -> Any:
        """Returns the places in `values` before which the rows end."""
        return tensor_of(self.partitions[0][1:])

    def row_lengths(self, axis: int = 1, name: str | None = None) -> Any:
        """Returns the lengths of the rows: of axis 2 or later, as a ragged tensor."""
        axis = self._axis(axis)
        if axis == 0:
            return self.nrows()
        if axis == 1:
            return tensor_of(lengths_of(self.partitions[0]))
        if self.ragged_rank > 1:
            return self.with_values(self.inner.row_lengths(axis - 1))
        size = self._flat.shape[axis - 1]
        dtype = self._splits[0].dtype
        return self.with_values(np.full(self._flat.shape[: axis - 1], size, dtype))

    def nested_row_lengths(self, name: str | None = None) -> tuple[Any, ...]:
        """Returns the lengths of the rows of all ragged axes, outermost first."""
        return tuple(tensor_of(lengths_of(splits)) for splits in self.partitions)

    def value_rowids(self, name: str | None = None) -> Any:
        """Returns the row of every value."""
        return tensor_of(rowids_of(self.partitions[0], count_of(self.inner)))

    def nested_value_rowids(self, name: str | None = None) -> tuple[Any, ...]:
        """Returns the row of every value of all ragged axes, outermost first."""
        levels: list[Any] = [self]
        while isinstance(levels[-1].inner, RaggedTensor):
            levels.append(levels[-1].inner)
        return tuple(level.value_rowids() for level in levels)

    def bounding_shape(
        self, axis: Any = None, name: str | None = None, out_type: Any = None
    ) -> Any:
        """Returns the smallest shape that holds all rows, or its size along an axis.

        In a compiled program it is computed by the program, where it is not known.
        """
        dtype = self._splits[0].dtype if out_type is None else tensor_dtype(out_type)
        sizes: list[Any] = [self.shape[0]]
        for splits, uniform in zip(self.partitions, self._uniform, strict=True):
            module: Any = np if isinstance(splits, np.ndarray) else jax.numpy
            longest = module.max(lengths_of(splits).astype(np.int32), initial=0)
            sizes.append(longest if uniform is None else uniform)
        sizes += self._flat.shape[1:]
        if axis is not None:
            sizes = [sizes[index] for index in np.ravel(known_value(axis)).tolist()]
        is_known = not any(isinstance(size, jax.core.Tracer) for size in sizes)
        module = np if is_known else jax.numpy
        shape = module.stack([module.asarray(size).astype(dtype) for size in sizes])
        is_one = axis is not None and np.ndim(axis) == 0
        return tensor_of(module.asarray(shape[0]) if is_one else shape)

    def _axis(self, axis: Any) -> int:
        axis = operator.index(axis)
        rank = self.rank
        if not -rank <= axis < rank:
            raise ValueError(f"axis={axis} out of bounds: expected {-rank}<=axis<{rank}")
        return axis % rank

    # -- with other parts ------------------------------------------------------------------

    def with_values(self, new_values: Any) -> RaggedTensor:
        """Returns the same rows of other values.

        Raises:
            ValueError: There are not as many.
        """
        values = values_of(new_values)
        own, count = count_of(self.inner), count_of(values)
        if own != count:
            raise ValueError(f"Shapes ({own},) and ({count},) are incompatible")
        made = self.around(values, self._own[1][0], self._uniform[0])
        made._is_padded = self._is_padded
        return made

    def with_flat_values(self, new_values: Any) -> RaggedTensor:
        """Returns the same rows of other values inside of all ragged axes.

        Raises:
            ValueError: There are not as many.
        """
        if self.ragged_rank > 1:
            return self.with_values(self.inner.with_flat_values(new_values))
        return self.with_values(new_values)

    def with_row_splits_dtype(self, dtype: Any) -> RaggedTensor:
        """Returns the same tensor with splits of int32 or int64."""
        flat, own = self._own
        splits = [partition(each, "row_splits", dtype) for each in own]
        return RaggedTensor.of(flat, splits, self._uniform, self._is_padded)

    def merge_dims(self, outer_axis: int, inner_axis: int) -> Any:
        """Returns the tensor with consecutive axes merged into one, as by `reshape`."""
        outer, inner = self._axis(outer_axis), self._axis(inner_axis)
        if outer > inner:
            raise ValueError(f"Expected outer_axis <= inner_axis. Received: {outer}, {inner}")
        return implementations["merge_dims"](self, outer, inner)

    # -- as other things -------------------------------------------------------------------

    def to_tensor(
        self, default_value: Any = None, name: str | None = None, shape: Any = None
    ) -> Any:
        """Returns a dense tensor, in which rows are padded at their ends.

        Args:
            default_value: The padding; default: 0, or empty text.
            name: Without effect.
            shape: The shape of the result, None for the smallest size that holds all rows; rows
                that are longer are cut. In a compiled program, the sizes of ragged axes must be
                given: `x.to_tensor(shape=[None, 64])`.

        Raises:
            ValueError: In a compiled program, a size is missing.
        """
        return implementations["to_tensor"](self, default_value, shape)

    def to_sparse(self, name: str | None = None) -> Any:
        """Returns a `tf.SparseTensor` with the same values."""
        return implementations["to_sparse"](self)

    def numpy(self) -> np.ndarray:
        """Returns an array of rows; of the dtype `object`, if their lengths differ.

        Raises:
            ValueError: In a compiled program.
        """
        splits = self._known_splits("numpy()")
        values = _numpy(self.inner)
        rows = [values[start:end] for start, end in itertools.pairwise(splits)]
        if not rows:
            return np.zeros((0, 0, *values.shape[1:]), values.dtype)
        if len({len(row) for row in rows}) == 1:
            return np.array(rows)
        ragged = np.empty(len(rows), object)
        ragged[:] = rows
        return ragged

    def to_list(self) -> list[Any]:
        """Returns nested lists.

        Raises:
            ValueError: In a compiled program.
        """
        splits = self._known_splits("to_list()")
        values = self.inner
        items = values.to_list() if isinstance(values, RaggedTensor) else _numpy(values).tolist()
        return [items[start:end] for start, end in itertools.pairwise(splits)]

    def _known_splits(self, what: str) -> list[int]:
        splits = self.partitions
        values = (*splits, self._flat)
        if any(isinstance(part, jax.core.Tracer) for part in values):
            needs_python(f"RaggedTensor.{what}")
            raise ValueError(f"RaggedTensor.{what} is only supported outside compiled programs.")
        return splits[0].tolist()

    def __repr__(self) -> str:
        flat, splits = self._own
        parts = (flat, *splits)
        if not all(isinstance(part, jax.Array | np.ndarray) for part in parts) or any(
            isinstance(part, jax.core.Tracer) for part in parts
        ):
            return f"tf.RaggedTensor(values={self.inner}, row_splits={splits[0]})"
        with np.printoptions(formatter={"all": _written}):
            return f"<tf.RaggedTensor {_written(self.numpy())}>"

    __str__ = __repr__

    def __getitem__(self, key: Any) -> Any:
        return implementations["getitem"](self, key)

    def __iter__(self) -> Iterator[Any]:
        count = len(self._known_splits("__iter__")) - 1
        return (self[index] for index in range(count))

    def __bool__(self) -> NoReturn:
        raise TypeError("RaggedTensor may not be used as a boolean.")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise TypeError(
            "A RaggedTensor is not an array. Use x.numpy() (rows of different lengths), "
            "x.to_tensor() (padded) or x.flat_values; a layer of Keras is called by "
            "tf.ragged.map_flat_values(layer, x)."
        )


# -- operators -----------------------------------------------------------------------------


def _operator(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    def compute(self: RaggedTensor, *other: Any) -> Any:
        operands = (*other, self) if is_reflected else (self, *other)
        return implementations[f"operator {name}"](*operands)

    return compute


for _name in ("abs", "neg", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(RaggedTensor, f"__{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(RaggedTensor, f"__{_name}__", _operator(_name))
    setattr(RaggedTensor, f"__r{_name}__", _operator(_name, is_reflected=True))
RaggedTensor.__hash__ = None  # type: ignore[assignment]  # setting __eq__ afterwards keeps it


def _without_padding(flat: Any, splits: Sequence[Splits]) -> tuple[Any, tuple[Splits, ...]]:
    """Returns values and splits that end where the outermost splits say, if they are known."""
    if any(
        not isinstance(part, jax.Array | np.ndarray) or isinstance(part, jax.core.Tracer)
        for part in (flat, *splits)
    ) or any(part.dtype.kind not in "iu" for part in splits):  # JAX has gradients by splits
        return flat, tuple(splits)
    exact: list[Splits] = []
    for given in splits:
        own = np.asarray(given).view(np.ndarray)
        exact.append(own[: int(exact[-1][-1]) + 1] if exact else own)
    count = int(exact[-1][-1])
    if flat.shape[0] > count:
        # On the host: for every length, JAX would compile a slice of its own.
        flat = convert_to_tensor(np.asarray(flat)[:count])
    return flat, tuple(exact)


def _numpy(values: Any) -> Any:
    if isinstance(values, RaggedTensor | StringTensor):
        return values.numpy()
    return np.asarray(values)


def _written(item: Any) -> str:
    """Writes an array of rows as TensorFlow does, with commas."""
    if not isinstance(item, np.ndarray):
        return str(item)
    return np.array2string(item, separator=", ") if item.size else repr(item.tolist())


def is_ragged(value: Any) -> bool:
    """Whether `value` is a ragged tensor."""
    return isinstance(value, RaggedTensor)
