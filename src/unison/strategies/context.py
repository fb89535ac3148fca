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
from jax import lax

from unison.cells import has_cell
from unison.collectives import ReduceOp, all_gather, all_reduce
from unison.lifting import current_lift
from unison.runtime.placement import REPLICA_AXIS, scoped_placement

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
        raise RuntimeError(
            f"{what} must be called in cross-replica context, and this is inside a function that "
            "strategy.run is tracing. Call it outside run, or inside "
            "get_replica_context().merge_call(fn)."
        )


class ReplicaContext:
    """What a function knows of its replica; from `get_replica_context()`.

    TF: `tf.distribute.ReplicaContext`.
    """

    def __init__(self, strategy: Strategy):
        self._strategy = strategy

    @property
    def strategy(self) -> Strategy:
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array | int:
        """The replica's index: a traced int32 scalar, or 0 outside a replica program."""
        return lax.axis_index(REPLICA_AXIS) if self._is_traced else 0

    @property
    def _is_traced(self) -> bool:
        return bool(_stack()) and _stack()[-1].replica_context is self

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Combines `value` over the replicas; see `unison.collectives.all_reduce`."""
        op = ReduceOp.parse(reduce_op)
        return all_reduce(op, value) if self._is_traced else value

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values; see `unison.collectives.all_gather`."""
        return all_gather(value, axis) if self._is_traced else value

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple = (), kwargs: Any = None) -> Any:
        """Calls `merge_fn(strategy, *args, **kwargs)` in cross-replica context.

        The arguments arrive as `ReplicaLocal` values, which stand for the values of all
        replicas; `strategy.reduce` and `strategy.gather` take them. Variables arrive as they
        are, and assigning to one gives all of its copies the value. What `merge_fn` returns is
        each replica's result (of a `ReplicaLocal`, the replica's own component).

        TF: `tf.distribute.ReplicaContext.merge_call`.
        """
        if not self._is_traced:
            with entered(self._strategy):
                return merge_fn(self._strategy, *args, **(kwargs or {}))
        wrapped_args, wrapped_kwargs = jax.tree.map(
            lambda leaf: leaf if has_cell(leaf) else ReplicaLocal(leaf), (args, kwargs or {})
        )
        lift = current_lift()
        # Outside the replicas an assignment is one assignment: nothing is left to combine.
        writes = lift.equal_writes() if lift is not None else contextlib.nullcontext()
        with entered(self._strategy), writes:
            merged = merge_fn(self._strategy, *wrapped_args, **wrapped_kwargs)
        return jax.tree.map(
            lambda leaf: leaf.local if isinstance(leaf, ReplicaLocal) else leaf,
            merged,
            is_leaf=lambda leaf: isinstance(leaf, ReplicaLocal),
        )

    def __repr__(self) -> str:
        return f"ReplicaContext({self._strategy!r})"


@dataclasses.dataclass(frozen=True)
class ReplicaLocal:
    """The values of all replicas, inside a traced `merge_call`, known by this replica's own.

    Attributes:
        local: This replica's component.
    """

    local: Any

    @property
    def values(self) -> tuple[Any, ...]:
        """All replicas' components; reading them gathers."""
        gathered = lax.all_gather(self.local, REPLICA_AXIS)
        return tuple(gathered)
