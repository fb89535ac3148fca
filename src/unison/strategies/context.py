"""Which strategy, and which side of it, the calling thread is in.

A thread is in *cross-replica context* (it sees all replicas; the default) or in *replica
context* (inside a function that `run` traces: it is one replica).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from unison.collectives import CommunicationOptions, ReduceOp, all_gather, all_reduce
from unison.lifting import current_lift
from unison.runtime.placement import REPLICA_AXIS, scoped_placement
from unison.slices import IndexedSlices
from unison.stepping import needs_python
from unison.values import ReplicaLocal

if TYPE_CHECKING:
    from unison.strategies.base import Strategy

_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class _Frame:
    strategy: Strategy
    replica_context: ReplicaContext | None


def _stack() -> list[_Frame]:
    if not hasattr(_thread, "frames"):
        _thread.frames = []
    return _thread.frames


@contextlib.contextmanager
def entered(strategy: Strategy, replica_context: ReplicaContext | None = None) -> Iterator[None]:
    """Puts the thread into `strategy`, on the side that `replica_context` says."""
    _stack().append(_Frame(strategy, replica_context))
    try:
        with scoped_placement(strategy.placement):
            yield
    finally:
        _stack().pop()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes `strategy` the current one from here on, as if the rest stood in its scope.

    Args:
        strategy: The strategy; None ends the effect of an earlier call.

    Raises:
        RuntimeError: Inside a scope.

    Examples:
        >>> import unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> experimental_set_strategy(strategy)
        >>> unison.get_strategy() is strategy
        True
        >>> experimental_set_strategy(None)

    TF: `tf.distribute.experimental_set_strategy`.
    """
    lasting = _lasting_scope()
    if len(_stack()) > (lasting is not None):
        raise RuntimeError(
            "experimental_set_strategy() sets the strategy for the program as a whole, and this is "
            "inside a scope. Call it outside `with strategy.scope():`."
        )
    if lasting is not None:
        _thread.lasting_scope = None
        lasting.close()
    if strategy is not None:
        scope = contextlib.ExitStack()
        scope.enter_context(strategy.scope())
        _thread.lasting_scope = scope


def _lasting_scope() -> contextlib.ExitStack | None:
    return getattr(_thread, "lasting_scope", None)


def get_strategy() -> Strategy:
    """Returns the strategy of the innermost scope, else the default one.

    The default strategy has one replica, on the default device.

    TF: `tf.distribute.get_strategy`.
    """
    frames = _stack()
    if frames:
        return frames[-1].strategy
    from unison.strategies.default import default_strategy

    return default_strategy()


def has_strategy() -> bool:
    """Whether the thread is in a scope of a strategy other than the default one.

    TF: `tf.distribute.has_strategy`.
    """
    from unison.strategies.default import DefaultStrategy

    return not isinstance(get_strategy(), DefaultStrategy)


def in_cross_replica_context() -> bool:
    """Whether the thread sees all replicas: inside a scope, and not inside a replica program.

    TF: `tf.distribute.in_cross_replica_context`.
    """
    frames = _stack()
    return bool(frames) and frames[-1].replica_context is None


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica that is being traced.

    Outside any scope it is that of the default strategy's only replica; in cross-replica context
    it is None.

    TF: `tf.distribute.get_replica_context`.
    """
    frames = _stack()
    if frames:
        return frames[-1].replica_context
    return ReplicaContext(get_strategy())


def require_cross_replica_context(what: str) -> None:
    """Raises a RuntimeError where the thread is one replica."""
    frames = _stack()
    if frames and frames[-1].replica_context is not None:
        needs_python(what)
        raise RuntimeError(
            f"{what} must be called in cross-replica context, and this is inside a function that "
            "strategy.run is tracing. Call it outside run, or inside "
            "get_replica_context().merge_call(fn)."
        )


class ReplicaContext:
    """What a function knows of its replica; from `get_replica_context()`.

    Args:
        strategy: The strategy.
        replica_id_in_sync_group: Which replica this is, in a context that is entered by hand
            (`with ReplicaContext(strategy, 0):`), outside replica programs.

    TF: `tf.distribute.ReplicaContext`.
    """

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int | None = None):
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> ReplicaContext:
        entrance = contextlib.ExitStack()
        entrance.enter_context(entered(self._strategy, self))
        self._entered.append(entrance)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._entered.pop().close()

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array | int:
        """The replica's index: an int32 scalar, or 0 outside a replica program.

        It is traced, or a number where Python code of the replicas depends on it (`if`, an index
        into a list): each replica is then traced on its own.
        """
        if self._replica_id is not None:
            return self._replica_id
        lift = current_lift()
        if lift is not None and lift.replica_id is not None:
            return lift.replica_id
        return lax.axis_index(REPLICA_AXIS) if self._is_traced else 0

    @property
    def devices(self) -> tuple[str]:
        """The name of the replica's device, as TensorFlow writes it.

        It is Python that depends on the replica: each replica is then traced on its own.
        """
        return (self._strategy.extended.worker_devices[int(self.replica_id_in_sync_group)],)

    @property
    def _is_traced(self) -> bool:
        is_current = bool(_stack()) and _stack()[-1].replica_context is self
        return is_current and self._replica_id is None

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines `value` over the replicas; see `unison.collectives.all_reduce`.

        Args:
            reduce_op: A `ReduceOp` or its name.
            value: A pytree of arrays and numbers, `IndexedSlices` among them.
            options: Whether the tree is packed into several buffers.

        TF: `tf.distribute.ReplicaContext.all_reduce`.
        """
        op = ReduceOp.parse(reduce_op)
        return all_reduce(op, value, options=options) if self._meets_others() else value

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenates the replicas' values; see `unison.collectives.all_gather`.

        Args:
            value: A pytree of arrays.
            axis: The axis to concatenate along.
            options: For TensorFlow's sake; arrays are gathered one by one.

        TF: `tf.distribute.ReplicaContext.all_gather`.
        """
        del options
        return all_gather(value, axis) if self._meets_others() else value

    def _meets_others(self) -> bool:
        """Whether there are other replicas to combine values with.

        Raises:
            RuntimeError: There are, but this is outside the program that they run.
        """
        if self._is_traced:
            return True
        if self.num_replicas_in_sync > 1:
            raise RuntimeError(
                "Replicas meet in collective operations inside the functions that strategy.run "
                f"calls only. Received: a call of {self!r} outside of these. Use strategy.reduce "
                "or strategy.gather there."
            )
        return False

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple = (), kwargs: Any = None) -> Any:
        """Calls `merge_fn(strategy, *args, **kwargs)` in cross-replica context.

        Arrays arrive as `ReplicaLocal` values, which stand for the values of all replicas;
        `strategy.reduce`, `strategy.gather` and `strategy.extended` take them. What is the same on
        all replicas (a Python number, say) arrives as it is, and so does everything where there is
        one replica. Variables are read and assigned as outside of `strategy.run`: assigning to one
        gives all of its copies the value. What `merge_fn` returns is each replica's result (of a
        `ReplicaLocal`, the replica's own component).

        TF: `tf.distribute.ReplicaContext.merge_call`.
        """
        args, kwargs = tuple(args), kwargs or {}
        if not self._is_traced:
            with entered(self._strategy):
                return merge_fn(self._strategy, *args, **kwargs)
        if self.num_replicas_in_sync > 1:
            args, kwargs = jax.tree.map(_of_all_replicas, (args, kwargs), is_leaf=_is_merged_leaf)
        lift = current_lift()
        outside = lift.outside() if lift is not None else contextlib.nullcontext()
        with entered(self._strategy), outside:
            merged = merge_fn(self._strategy, *args, **kwargs)
        return jax.tree.map(own_component, merged, is_leaf=_is_merged_leaf)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn` on each copy of a variable; see `StrategyExtended.update`."""
        return self._strategy.extended.update(var, fn, args, kwargs, group)

    def __repr__(self) -> str:
        return f"ReplicaContext({self._strategy!r})"


def own_component(value: Any) -> Any:
    """Returns this replica's component of a `ReplicaLocal`; other values as they are."""
    return value.local if isinstance(value, ReplicaLocal) else value


def _is_merged_leaf(value: Any) -> bool:
    return isinstance(value, ReplicaLocal | IndexedSlices)


def _of_all_replicas(leaf: Any) -> Any:
    """Returns an argument of `merge_call` as it is known outside the replicas."""
    lift = current_lift()
    is_traced = isinstance(leaf, jax.core.Tracer | IndexedSlices)
    # Replicas that are traced one by one may have different numbers.
    is_number = isinstance(leaf, int | float | complex | np.ndarray | np.generic | jax.Array)
    knows_replica = lift is not None and lift.replica_id is not None
    return ReplicaLocal(leaf) if is_traced or (knows_replica and is_number) else leaf
