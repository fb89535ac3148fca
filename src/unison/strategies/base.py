"""`Strategy`: what all strategies share. A strategy itself only chooses the devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from unison.cells import Layout, has_cell
from unison.collectives import ReduceOp, all_gather, all_reduce
from unison.data import DistributedBatches
from unison.program import ProgramCache
from unison.runtime.placement import Placement
from unison.strategies import context
from unison.strategies.context import ReplicaContext, ReplicaLocal
from unison.values import DistributedValues, PerReplica, is_distributed


class ScopeObserver(Protocol):
    """Something that acts while scopes are open, in any thread."""

    def opened(self) -> None:
        """The first scope has been opened."""

    def closed(self) -> None:
        """The last scope has been closed."""


_observers: list[ScopeObserver] = []
_open_scopes = 0
_scopes_lock = threading.RLock()


def observe_scopes(observer: ScopeObserver) -> None:
    """Tells `observer` when the first scope opens (or that one is), and when the last closes."""
    with _scopes_lock:
        _observers.append(observer)
        if _open_scopes:
            observer.opened()


@contextlib.contextmanager
def _observed_scope() -> Iterator[None]:
    global _open_scopes
    with _scopes_lock:
        _open_scopes += 1
        if _open_scopes == 1:
            # Over a copy: an observer may bring another one, which is told at once.
            for observer in _observers.copy():
                observer.opened()
    try:
        yield
    finally:
        with _scopes_lock:
            _open_scopes -= 1
            if not _open_scopes:
                for observer in reversed(_observers):
                    observer.closed()


class Strategy:
    """Runs functions on several replicas and keeps their variables.

    Use one of the subclasses. TF: `tf.distribute.Strategy`.

    Args:
        devices: One device a replica.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._placement = Placement(devices)
        self._programs = ProgramCache(self._placement, self.replica_context)
        self._extended = StrategyExtended(self)

    @property
    def placement(self) -> Placement:
        """The replicas' devices, and how arrays lie on them."""
        return self._placement

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are combined."""
        return self._placement.num_replicas

    @property
    def extended(self) -> StrategyExtended:
        """What is seldom needed: `worker_devices`, `reduce_to`, ..."""
        return self._extended

    @property
    def trace_count(self) -> int:
        """How many replica programs `run` has traced; a steady state does not change it."""
        return self._programs.trace_count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self._placement.devices))})"

    # -- contexts --------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the current strategy: variables and Keras models created inside are its own.

        Raises:
            RuntimeError: Inside another strategy's scope, or inside a replica program.
        """
        context.require_cross_replica_context("strategy.scope()")
        current = context.get_strategy()
        if current is not self and context.in_cross_replica_context():
            raise RuntimeError(
                f"The scope of {self!r} cannot be entered inside the scope of another strategy, "
                f"{current!r}. Leave the outer scope first, or use one strategy for both."
            )
        with context.entered(self), _observed_scope():
            yield self

    @contextlib.contextmanager
    def replica_context(self) -> Iterator[ReplicaContext]:
        replica_context = ReplicaContext(self)
        # What is made while a program is traced (an optimizer's slots) is made in the scope.
        with context.entered(self, replica_context), _observed_scope():
            yield replica_context

    # -- running ---------------------------------------------------------------------------

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple | list = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls `fn` on every replica, as one compiled program.

        `fn` is traced once a signature; its Python side effects happen then. A new program is
        made for new shapes, dtypes, strings or Booleans among the arguments, and for new objects
        that `fn` closes over.

        Args:
            fn: A function of one replica's values. It may read and assign variables, and use
                `get_replica_context()` and the collectives.
            args: Positional arguments: pytrees of arrays and numbers, which every replica gets,
                and of `PerReplica` values, of which each gets its component.
            kwargs: Keyword arguments, likewise.
            options: Accepted for TensorFlow's sake (`tf.distribute.RunOptions`); tracing is
                always on.

        Returns:
            What `fn` returned, with a `PerReplica` for every leaf; with one replica, the leaf.

        Raises:
            RuntimeError: Inside a replica program.
            TypeError: An argument is neither array, number, string nor distributed value.

        Example:
            >>> import unison
            >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.run(lambda x: x * 2, args=(unison.PerReplica([1.0, 10.0]),)).values
            (Array(2., dtype=float32), Array(20., dtype=float32))
        """
        del options
        context.require_cross_replica_context("strategy.run()")
        if not callable(fn):
            raise TypeError(f"strategy.run needs a function to call. Received: {fn!r}")
        if not isinstance(args, tuple | list):
            raise TypeError(
                "strategy.run takes the positional arguments as a tuple: run(fn, args=(x,)). "
                f"Received: args={args!r}"
            )
        return self._programs(fn, tuple(args), kwargs or {})

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Combines the components of `value` into one.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or the name.
            value: A tree of `PerReplica` values, of variables that were written without
                aggregation, or of what `merge_call` got.
            axis: None: component by component. Otherwise each component is reduced along this
                axis as well; `MEAN` divides by the true number of elements on all replicas.

        Returns:
            The tree, with one array for each distributed value.

        Raises:
            ValueError: `reduce_op` is `SUM`, there are several replicas, and a leaf is the same on
                all of them (a plain array, `Mirrored`, a variable whose copies are equal).
            RuntimeError: Inside a replica program; use `get_replica_context().all_reduce`.

        TF: `tf.distribute.Strategy.reduce`.
        """
        context.require_cross_replica_context("strategy.reduce()")
        op = ReduceOp.parse(reduce_op)
        return jax.tree.map(
            lambda leaf: self._reduce_leaf(op, leaf, axis), value, is_leaf=_is_components
        )

    def _reduce_leaf(self, op: ReduceOp, value: Any, axis: int | None) -> Any:
        if isinstance(value, ReplicaLocal):
            return _reduce_traced(op, value.local, axis)
        if has_cell(value) and value.cell.layout is Layout.LOCAL:
            value = PerReplica(value.cell.copies())
        if isinstance(value, PerReplica):
            stacked = value.stacked(self._placement) if axis is None else None
            if stacked is not None:
                with self._placement.launch_lock:
                    return _reduce_stacked(op, stacked)
            return _reduce_components(op, [np.asarray(v) for v in value.values], axis)
        whole = np.asarray(self.experimental_local_results(value)[0])
        if op is ReduceOp.MEAN or self.num_replicas_in_sync == 1 or np.all(whole == 0):
            return _reduce_components(op, [whole], axis)
        raise ValueError(
            f"A value that is the same on all {self.num_replicas_in_sync} replicas has no SUM over "
            f"them that is not a guess. Received: {value!r}. Pass what strategy.run returned, or "
            "use ReduceOp.MEAN."
        )

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the components of `value` along `axis`; their other axes must agree.

        Raises:
            ValueError: `axis` is not an axis of the components, or their ranks or other axes
                differ.

        TF: `tf.distribute.Strategy.gather`.
        """
        context.require_cross_replica_context("strategy.gather()")

        def gather_leaf(leaf: Any) -> jax.Array:
            if isinstance(leaf, ReplicaLocal):
                return all_gather(leaf.local, axis)
            parts = [np.asarray(part) for part in self.experimental_local_results(leaf)]
            if not parts[0].ndim or not -parts[0].ndim <= axis < parts[0].ndim:
                raise ValueError(
                    "gather concatenates along an axis of the components. Received: "
                    f"axis={axis}, components of shape {parts[0].shape}"
                )
            if len(parts) == 1:
                parts *= self.num_replicas_in_sync
            return jnp.asarray(np.concatenate(parts, axis))

        return jax.tree.map(gather_leaf, value, is_leaf=_is_components)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of `value` on this process, `(value,)` if it has none.

        Those of a variable are its copies.
        """
        if isinstance(value, DistributedValues):
            return value.values
        if has_cell(value):
            return tuple(jnp.asarray(copy) for copy in value.cell.copies())
        return (value,)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Returns the `PerReplica` value whose component r is `value_fn` of replica r's context.

        TF: `tf.distribute.Strategy.experimental_distribute_values_from_function`.
        """
        context.require_cross_replica_context("experimental_distribute_values_from_function()")
        count = self.num_replicas_in_sync
        values = [value_fn(ValueContext(index, count)) for index in range(count)]
        if count == 1:
            return values[0]
        return jax.tree.map(lambda *components: PerReplica(components), *values)

    def experimental_distribute_dataset(self, dataset: Iterable[Any]) -> DistributedBatches:
        """Returns the global batches of `dataset`, each divided between the replicas.

        Replica r gets the r-th contiguous chunk of ceil(n / replicas) examples of a batch of n;
        the last replicas may get fewer, or none. With one replica batches stay as they are.

        Args:
            dataset: An iterable of batches (a list, a generator, a Keras `PyDataset`): pytrees of
                arrays with the examples along their first axes.

        Returns:
            An iterable of the same trees with a `PerReplica` for every array, for
            `run(fn, args=(batch,))`. It can be iterated again, and has a length, if `dataset` does.

        Raises:
            TypeError: `dataset` is no iterable of batches.
            RuntimeError: Inside a replica program.

        Example:
            >>> import numpy as np, unison
            >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> for batch in strategy.experimental_distribute_dataset([np.arange(5.0)]):
            ...     print([component.tolist() for component in batch.values])
            [[0.0, 1.0, 2.0], [3.0, 4.0]]

        TF: `tf.distribute.Strategy.experimental_distribute_dataset`.
        """
        context.require_cross_replica_context("experimental_distribute_dataset()")
        return DistributedBatches(dataset, self._placement)


class ValueContext:
    """Which replica's value a function is to make.

    TF: `tf.distribute.experimental.ValueContext`.
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1):
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync


class StrategyExtended:
    """The part of a strategy that libraries use. TF: `tf.distribute.StrategyExtended`."""

    def __init__(self, strategy: Strategy):
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the replicas' devices, as TensorFlow writes them."""
        from unison.runtime.device_strings import canonical_name

        return tuple(canonical_name(device) for device in self._strategy.placement.devices)

    parameter_devices = worker_devices

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any = None) -> Any:
        """Combines `value` over the replicas; the result is on all of them."""
        del destinations
        return self._strategy.reduce(reduce_op, value)

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Whether `variable` belongs to this strategy."""
        return has_cell(variable) and variable.cell.placement == self._strategy.placement


def _is_components(value: Any) -> bool:
    return is_distributed(value) or isinstance(value, ReplicaLocal) or has_cell(value)


def _mean_dtype(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def _sum_dtype(dtype: Any) -> Any:
    """Truth values are counted; other values keep their dtype."""
    return jnp.int32 if dtype == jnp.bool_ else dtype


def _reduce_stacked(op: ReduceOp, stacked: jax.Array) -> jax.Array:
    return (_mean_over_replicas if op is ReduceOp.MEAN else _sum_over_replicas)(stacked)


@jax.jit
def _sum_over_replicas(stacked: jax.Array) -> jax.Array:
    return jnp.sum(stacked, axis=0, dtype=_sum_dtype(stacked.dtype))


@jax.jit
def _mean_over_replicas(stacked: jax.Array) -> jax.Array:
    return jnp.mean(stacked, axis=0, dtype=_mean_dtype(stacked.dtype))


def _reduce_components(op: ReduceOp, parts: list[np.ndarray], axis: int | None) -> jax.Array:
    dtype = parts[0].dtype
    # Wide, because NumPy adds halves as halves, and the sum behind a mean may not fit.
    wide = np.result_type(dtype, np.float64) if op is ReduceOp.MEAN else _wide_sum_dtype(dtype)
    if axis is None:
        total, count = np.sum(np.stack(parts), axis=0, dtype=wide), len(parts)
    else:
        total = np.sum([part.sum(axis, dtype=wide) for part in parts], axis=0)
        count = sum(part.shape[axis] for part in parts)
    if op is ReduceOp.SUM:
        return jnp.asarray(total.astype(_sum_dtype(dtype)))
    return jnp.asarray((total / count).astype(_mean_dtype(dtype)))


def _wide_sum_dtype(dtype: Any) -> Any:
    is_half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if is_half else np.dtype(_sum_dtype(dtype))


def _reduce_traced(op: ReduceOp, local: Any, axis: int | None) -> Any:
    if axis is None:
        return all_reduce(op, local)
    total = all_reduce(ReduceOp.SUM, jnp.sum(local, axis))
    if op is ReduceOp.SUM:
        return total
    return total / all_reduce(ReduceOp.SUM, jnp.asarray(local.shape[axis]))
