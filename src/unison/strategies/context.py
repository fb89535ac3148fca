"""The strategy, and the kind of context, that the calling thread is in.

A thread is in *cross-replica context* (it sees all replicas; the default) or in *replica
context* (inside a function that `run` traces: it is one replica).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from unison.collectives import CommunicationOptions, ReduceOp, all_gather, all_reduce
from unison.eager_fallback import needs_python
from unison.lifting import current_lift
from unison.runtime.placement import REPLICA_AXIS, scoped_placement
from unison.slices import IndexedSlices
from unison.thread_local import ThreadLocal
from unison.values import ReplicaLocal

if TYPE_CHECKING:
    from unison.strategies.base import Strategy


@dataclasses.dataclass(frozen=True)
class _Frame:
    strategy: Strategy
    replica_context: ReplicaContext | None


class FillerCombinedError(RuntimeError):
    """Values of a replica that has filler would be combined with those of other replicas."""


#: The message of a `FillerCombinedError`, where the replica that is traced has filler.
_refusal: ThreadLocal[str | None] = ThreadLocal(None)

_frames: ThreadLocal[list[_Frame]] = ThreadLocal(default_factory=list)
_lasting_scope: ThreadLocal[contextlib.ExitStack | None] = ThreadLocal(None)


@contextlib.contextmanager
def entered(strategy: Strategy, replica_context: ReplicaContext | None = None) -> Iterator[None]:
    """Context manager that puts the thread into `strategy`: into `replica_context`, or into
    cross-replica context if that is None.
    """
    _frames.value.append(_Frame(strategy, replica_context))
    try:
        with scoped_placement(strategy.placement):
            yield
    finally:
        _frames.value.pop()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes `strategy` the current one from here on, as if the rest were in its scope.

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
    lasting = _lasting_scope.value
    if len(_frames.value) > (lasting is not None):
        raise RuntimeError(
            "experimental_set_strategy() sets the strategy for the program as a whole, and this is "
            "inside a scope. Call it outside `with strategy.scope():`."
        )
    if lasting is not None:
        _lasting_scope.value = None
        lasting.close()
    if strategy is not None:
        scope = contextlib.ExitStack()
        scope.enter_context(strategy.scope())
        _lasting_scope.value = scope


@contextlib.contextmanager
def with_filler(error: Exception | None = None) -> Iterator[None]:
    """Inside, the replica computes with a row of zeros, since it has no examples. Combining what
    comes of it with the values of other replicas is refused.

    Args:
        error: What the function raised when it was given no rows, if it was.

    Raises:
        FillerCombinedError: The function combines values of the replicas.
        RuntimeError: The same, and it cannot compute with no rows.
    """
    raised = "" if error is None else f" but raised {type(error).__name__}: {error}."
    refusal = (
        "A replica has no examples of a batch. The step combines values of the replicas, and must "
        f"be able to compute with no examples,{raised} Give every replica examples (drop_remainder="
        "True leaves out a small last batch), or let the step compute with empty arrays."
    )
    with _refusal.bound_to(refusal):
        try:
            yield
        except FillerCombinedError as refused:
            if error is None:
                raise
            raise RuntimeError(str(refused)) from error


def has_filler() -> bool:
    """Whether the replica computes with a row of zeros, since it has no examples."""
    return _refusal.value is not None


def strategy_in_scope() -> Strategy | None:
    """Returns the strategy of the innermost scope; None outside any."""
    frames = _frames.value
    return frames[-1].strategy if frames else None


def replica_context_in_scope() -> ReplicaContext | None:
    """Returns the context of the replica that is being traced; None if none is."""
    frames = _frames.value
    return frames[-1].replica_context if frames else None


def in_cross_replica_context() -> bool:
    """Whether the thread sees all replicas: inside a scope, and not inside a replica program.

    TF: `tf.distribute.in_cross_replica_context`.
    """
    frames = _frames.value
    return bool(frames) and frames[-1].replica_context is None


def require_cross_replica_context(what: str) -> None:
    """Raises a RuntimeError if the thread is in replica context."""
    if replica_context_in_scope() is not None:
        needs_python(what)
        raise RuntimeError(
            f"{what} must be called in cross-replica context, and this is inside a function that "
            "strategy.run is tracing. Call it outside run, or inside "
            "get_replica_context().merge_call(fn)."
        )


def require_own_cross_replica_context(strategy: Strategy, what: str) -> None:
    """Raises a RuntimeError in replica context, and in the scope of another strategy."""
    frames = _frames.value
    if not frames or (frames[-1].strategy is strategy and frames[-1].replica_context is None):
        return
    require_cross_replica_context(what)
    raise RuntimeError(
        f"{what} of {strategy!r} is called inside the scope of another strategy, "
        f"{frames[-1].strategy!r}. Leave that scope first, or use one strategy for both."
    )


class ReplicaContext:
    """A function's view of its replica, returned by `get_replica_context()`.

    Args:
        strategy: The strategy.
        replica_id_in_sync_group: Which replica this is, in a context that is entered manually
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
        return self._strategy.num_replicas_now

    @property
    def replica_id_in_sync_group(self) -> jax.Array | int:
        """The replica's index: an int32 scalar, or 0 outside a replica program.

        It is traced, or a Python number if Python code of the replicas depends on it (`if`, an
        index into a list): each replica is then traced separately.
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

        It is a Python value that depends on the replica: each replica is then traced separately.
        """
        return (self._strategy.extended.worker_devices[int(self.replica_id_in_sync_group)],)

    @property
    def _is_traced(self) -> bool:
        return replica_context_in_scope() is self and self._replica_id is None

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
            options: Accepted for compatibility with TensorFlow; arrays are gathered one by one.

        TF: `tf.distribute.ReplicaContext.all_gather`.
        """
        del options
        return all_gather(value, axis) if self._meets_others() else value

    def _meets_others(self) -> bool:
        """Whether there are other replicas to combine values with.

        Raises:
            RuntimeError: There are others, but this is outside the program that they run, or the
                replica has filler; see `with_filler`.
        """
        if _refusal.value is not None:
            raise FillerCombinedError(_refusal.value)
        if self._is_traced:
            return True
        if self.num_replicas_in_sync > 1:
            raise RuntimeError(
                "Collective operations only work inside the functions that strategy.run calls. "
                f"Received: a call of {self!r} outside of these. Use strategy.reduce or "
                "strategy.gather there."
            )
        return False

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple = (), kwargs: Any = None) -> Any:
        """Calls `merge_fn(strategy, *args, **kwargs)` in cross-replica context.

        Arrays are passed as `ReplicaLocal` values, which represent the values of all replicas;
        `strategy.reduce`, `strategy.gather` and `strategy.extended` accept them. Values that are
        the same on all replicas (such as Python numbers) are passed unchanged, and so is everything
        if there is only one replica. Variables are read and assigned as outside of `strategy.run`:
        an assignment sets all copies of a variable. The result of `merge_fn` is returned on each
        replica (for a `ReplicaLocal`, the replica's own component).

        TF: `tf.distribute.ReplicaContext.merge_call`.
        """
        args, kwargs = tuple(args), kwargs or {}
        if not self._is_traced:
            with entered(self._strategy):
                return merge_fn(self._strategy, *args, **kwargs)
        if self.num_replicas_in_sync > 1:
            args, kwargs = jax.tree.map(_of_all_replicas, (args, kwargs), is_leaf=_is_merged_leaf)
        lift = current_lift()
        outside = lift.cross_replica() if lift is not None else contextlib.nullcontext()
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
    """Returns this replica's component of a `ReplicaLocal`; other values unchanged."""
    return value.local if isinstance(value, ReplicaLocal) else value


def _is_merged_leaf(value: Any) -> bool:
    return isinstance(value, ReplicaLocal | IndexedSlices)


def _of_all_replicas(leaf: Any) -> Any:
    """Returns an argument of `merge_call` in its cross-replica form."""
    lift = current_lift()
    is_traced = isinstance(leaf, jax.core.Tracer | IndexedSlices)
    # Replicas that are traced one by one may have different numbers.
    is_number = isinstance(leaf, int | float | complex | np.ndarray | np.generic | jax.Array)
    knows_replica = lift is not None and lift.replica_id is not None
    return ReplicaLocal(leaf) if is_traced or (knows_replica and is_number) else leaf
