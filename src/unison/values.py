"""Values with one component per replica: `PerReplica` and `Mirrored`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.runtime.precision import device_array, device_dtype
from unison.runtime.process_group import all_gather_json
from unison.runtime.transfers import host_view
from unison.unsupported import UnsupportedMember


class DistributedValues:
    """A value with one component per replica; see `PerReplica` and `Mirrored`.

    TF: `tf.distribute.DistributedValues`.
    """

    __slots__ = ("_components", "_values")
    _components: tuple[Any, ...] | None

    numpy = UnsupportedMember(
        "it has one value for each replica: use strategy.experimental_local_results(value), or "
        "strategy.reduce(...)"
    )

    def __init__(self, values: Sequence[Any]):
        components = tuple(values)
        if not components:
            raise ValueError(
                f"{type(self).__name__} needs one value a replica. Received: no values."
            )
        self._components = components
        self._values: tuple[Any, ...] | None = None

    @property
    def components(self) -> tuple[Any, ...]:
        """The components, ordered by replica index, each where it is stored."""
        assert self._components is not None
        return self._components

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, ordered by replica index, all on one device, so that they can be used
        together. They are copied there on first access.
        """
        if self._values is None:
            self._values = _on_one_device(self.components)
        return self._values

    def __repr__(self) -> str:
        lines = [f"  {index}: {value!r}" for index, value in enumerate(self.values)]
        return "\n".join([f"{type(self).__name__}:{{", *lines, "}"])


#: Python's operators, including the reflected ones.
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS = (
    *(f"__{name}__" for name in _BINARY),
    *(f"__r{name}__" for name in _BINARY),
    *("__neg__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__"),
)


def no_common_value(use: str, value: DistributedValues) -> str:
    """Returns the message of the error that a value is used as if the replicas had a common one."""
    return (
        f"{use} of a {type(value).__name__}: it has one value for each replica. Combine them by "
        "strategy.reduce(), get them by strategy.experimental_local_results(), or compute with "
        "them in a function that strategy.run calls."
    )


def _refusing(use: str) -> Callable[..., Any]:
    def refuse(self: DistributedValues, *others: Any, **options: Any) -> Any:
        raise TypeError(no_common_value(use, self))

    return refuse


for _operator in (*_OPERATORS, "__getitem__", "__float__", "__int__"):
    setattr(DistributedValues, _operator, _refusing(_operator))
DistributedValues.__array__ = _refusing("A function of NumPy")  # type: ignore[attr-defined]
DistributedValues.__jax_array__ = _refusing("A function of JAX")  # type: ignore[attr-defined]


@jax.tree_util.register_pytree_node_class
class PerReplica(DistributedValues):
    """One value per replica; the values may differ, including in shape.

    If it is an argument of `strategy.run`, each replica gets its own component. A result of `run`
    is kept as one array sharded over the devices, and is split into `.components` on first access.

    If a strategy's replicas belong to several processes, the components are those of this process's
    replicas, as in TensorFlow.

    Args:
        values: One array (or number) per replica, in order.
        shapes: The shapes of the components of all replicas, if other processes have replicas as
            well. If omitted, the processes exchange them when the value is used.

    Examples:
        >>> PerReplica([1, 2])
        PerReplica:{
          0: 1
          1: 2
        }

    TF: `tf.distribute.DistributedValues` (`PerReplica`).
    """

    __slots__ = ("_placement", "_shapes", "_stacked")

    def __init__(self, values: Sequence[Any], shapes: Sequence[tuple[int, ...]] | None = None):
        super().__init__(values)
        self._shapes = None if shapes is None else tuple(shapes)
        self._stacked: jax.Array | None = None
        self._placement: Placement | None = None

    @classmethod
    def from_stacked(cls, stacked: jax.Array, placement: Placement) -> PerReplica:
        """Returns the value whose component r is `stacked[r]`, which is on device r."""
        value = cls.__new__(cls)
        value._components = value._values = value._shapes = None
        value._stacked = stacked
        value._placement = placement
        return value

    @property
    def components(self) -> tuple[Any, ...]:
        if self._components is None:
            assert self._placement is not None and self._stacked is not None
            self._components = self._placement.slices(self._stacked)
        return self._components

    def stacked(self, placement: Placement) -> jax.Array | None:
        """Returns the components as one array sharded over `placement`, or None if their shapes or
        dtypes differ.

        Raises:
            ValueError: The number of components differs from the number of this process's replicas.
            TypeError: A component is neither an array nor a number.
        """
        if self._stacked is not None and self._placement == placement:
            return self._stacked
        values = self._local_arrays(placement)
        if len({value.dtype for value in values}) > 1 or len(set(self.shapes(placement))) > 1:
            return None
        views = [view for value in values if (view := host_view(value)) is not None]
        if len(views) == len(values):
            stacked = placement.spread(np.stack(views))
        else:
            pairs = zip(values, placement.local_devices, strict=True)
            stacked = placement.assemble([jax.device_put(value, to)[None] for value, to in pairs])
        if not any(isinstance(value, np.ndarray) for value in self.components):
            # Immutable components are placed only once.
            self._stacked, self._placement = stacked, placement
        return stacked

    def shapes(self, placement: Placement) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the components of all replicas."""
        if self._stacked is not None and self._placement == placement:
            return (self._stacked.shape[1:],) * placement.num_replicas
        if not placement.spans_processes:
            return tuple(value.shape for value in self._local_arrays(placement))
        if self._shapes is None:
            arrays = zip(placement.local_replicas, self._local_arrays(placement), strict=True)
            own = [(replica, (value.shape, value.dtype.name)) for replica, value in arrays]
            of_all = all_gather_json(own, "The shapes of a PerReplica value")
            # Workers that compute a replica together all say it.
            by_replica = dict(pair for of_worker in of_all for pair in of_worker)
            kinds = [by_replica[replica] for replica in range(placement.num_replicas)]
            if len({dtype for _, dtype in kinds}) > 1:
                raise TypeError(_of_several_dtypes([f"{d}{shape}" for shape, d in kinds]))
            self._shapes = tuple(tuple(shape) for shape, _ in kinds)
        return self._shapes

    def padded(self, placement: Placement) -> tuple[jax.Array, tuple[tuple[int, ...], ...]]:
        """Returns the components, padded with zeros to a common shape, as one array sharded over
        `placement`; and the shapes of the components of all replicas.

        Raises:
            TypeError: Their ranks or dtypes differ.
        """
        parts = [np.asarray(value) for value in self.values]
        shapes = self.shapes(placement)
        if len(set(map(len, shapes))) > 1 or len({part.dtype for part in parts}) > 1:
            raise TypeError(
                _of_several_dtypes([f"{part.dtype}{list(part.shape)}" for part in parts])
            )
        padded = np.zeros((len(parts), *np.max(shapes, axis=0)), parts[0].dtype)
        for row, part in zip(padded, parts, strict=True):
            row[tuple(slice(size) for size in part.shape)] = part
        return placement.spread(device_array(padded)), shapes

    def of_all_replicas(self, placement: Placement) -> tuple[Any, ...]:
        """Returns the components of all replicas; those of other processes are gathered.

        With several processes, each must call this.
        """
        if not placement.spans_processes:
            return self.values
        stacked = self.stacked(placement)
        if stacked is not None:
            return tuple(placement.whole(stacked))
        padded, shapes = self.padded(placement)
        return tuple(
            whole[tuple(slice(size) for size in shape)]
            for whole, shape in zip(placement.whole(padded), shapes, strict=True)
        )

    def _local_arrays(self, placement: Placement) -> list[Any]:
        values = [_as_array(value) for value in self.components]
        count = len(placement.local_replicas)
        if len(values) != count:
            of_process = " of this process" if placement.spans_processes else ""
            raise ValueError(
                f"A PerReplica value needs one component for each of the {count} "
                f"replicas{of_process}. Received: {len(values)} components."
            )
        return values

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.values, None

    @classmethod
    def tree_unflatten(cls, _: None, values: Sequence[Any]) -> PerReplica:
        return cls(values)


@jax.tree_util.register_pytree_node_class
class Mirrored(DistributedValues):
    """The same value on every replica, which stands for it in operators and functions of JAX.

    TF: `tf.distribute.DistributedValues` (`Mirrored`).
    """

    __slots__ = ()

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.values[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values[0], dtype=dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.values[0])

    @property
    def dtype(self) -> Any:
        return jnp.result_type(self.values[0])

    def numpy(self) -> Any:
        """Returns the value as a NumPy array or number."""
        return np.array(self.values[0])[()]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"A {type(self).__name__} has no {name!r}", name=name, obj=self)
        return getattr(self.values[0], name)

    def __getitem__(self, index: Any) -> Any:
        return self.values[0][index]

    def __len__(self) -> int:
        return len(self.values[0])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values[0])

    def __format__(self, spec: str) -> str:
        return format(self.values[0], spec) if spec else str(self)

    def __float__(self) -> float:
        return float(self.values[0])

    def __int__(self) -> int:
        return int(self.values[0])

    def __index__(self) -> int:
        return operator.index(self.values[0])

    def __bool__(self) -> bool:
        return bool(self.values[0])

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.values, None

    @classmethod
    def tree_unflatten(cls, _: None, values: Sequence[Any]) -> Mirrored:
        return cls(values)


def _of_the_value(operator: str) -> Callable[..., Any]:
    def apply(self: Mirrored, *others: Any) -> Any:
        others = tuple(o.values[0] if isinstance(o, Mirrored) else o for o in others)
        return getattr(jnp.asarray(self.values[0]), operator)(*others)

    return apply


for _operator in _OPERATORS:
    setattr(Mirrored, _operator, _of_the_value(_operator))


class ReplicaLocal(DistributedValues):
    """The values of all replicas inside a traced `merge_call`, represented by this replica's own.

    Args:
        local: This replica's component.
    """

    __slots__ = ("local",)

    def __init__(self, local: Any):
        super().__init__([local])
        self.local = local

    @property
    def components(self) -> tuple[Any, ...]:
        """The components of all replicas; accessing them performs an all-gather."""
        gathered = lax.all_gather(self.local, REPLICA_AXIS)
        count = lax.axis_size(REPLICA_AXIS)
        return tuple(jax.tree.map(operator.itemgetter(index), gathered) for index in range(count))

    def __repr__(self) -> str:
        return f"ReplicaLocal({self.local!r})"


class NotCombined:
    """Base of pytrees that are not combined over replicas array by array: ragged tensors."""

    __slots__ = ()


def refuse_to_combine(value: Any) -> None:
    """Raises TypeError if `value` is not combined over replicas array by array."""
    if isinstance(value, NotCombined):
        raise TypeError(
            f"A {type(value).__name__} has rows of its own on every replica, and is not reduced or "
            "gathered. Reduce what the replicas compute of it (sums of its rows, say), or take "
            "each replica's by strategy.experimental_local_results()."
        )


def _of_several_dtypes(kinds: Sequence[str]) -> str:
    return (
        f"The components of a PerReplica value must have one rank and one dtype. Received: {kinds}"
    )


def _on_one_device(components: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `components` with all concrete arrays on the device of the first."""
    arrays = [value for value in components if _is_concrete(value)]
    if len({value.sharding for value in arrays}) < 2:
        return components
    home = arrays[0].sharding
    return tuple(
        jax.device_put(value, home) if _is_concrete(value) else value for value in components
    )


def _is_concrete(value: Any) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def _as_array(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    if not is_numeric(array.dtype):
        raise TypeError(
            f"The components of a PerReplica value must be arrays or numbers. Received: {value!r}"
        )
    return array.astype(device_dtype(array.dtype), copy=False)


def is_numeric(dtype: np.dtype) -> bool:
    """Whether programs can compute with arrays of `dtype`."""
    return jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_


def is_distributed(value: Any) -> bool:
    """Whether `value` has one component per replica."""
    return isinstance(value, DistributedValues)
