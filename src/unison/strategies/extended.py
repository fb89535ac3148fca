"""`StrategyExtended`: the part of a strategy that libraries (such as optimizers) use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from unison.cells import has_cell
from unison.collectives import CommunicationOptions, CrossDeviceOps, NcclAllReduce, ReduceOp
from unison.eager_fallback import needs_python
from unison.lifting import current_lift
from unison.program.identity import Calling
from unison.runtime import process_group
from unison.runtime.device_strings import canonical_name, resolve
from unison.runtime.placement import scoped_placement
from unison.strategies import context
from unison.strategies.context import own_component
from unison.values import Mirrored, ReplicaLocal, is_distributed

if TYPE_CHECKING:
    from unison.strategies.base import Strategy

#: The destinations of a result: devices (or their names), or a value or variable on them.
Destinations = Any


class StrategyExtended:
    """The interface of a strategy for libraries, available as `strategy.extended`.

    Its methods work in cross-replica context: around `strategy.run`, and in the function given to
    `merge_call` inside it.

    TF: `tf.distribute.StrategyExtended`.
    """

    def __init__(self, strategy: Strategy, cross_device_ops: CrossDeviceOps | None = None):
        self._strategy = strategy
        self._cross_device_ops = cross_device_ops

    # -- the devices -----------------------------------------------------------------------

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the replicas' devices, as TensorFlow writes them."""
        return tuple(canonical_name(device) for device in self._strategy.placement.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that store variables: those of the replicas."""
        return self.worker_devices

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Returns the devices for state that does not belong to a single variable."""
        del var_list
        return self.parameter_devices

    # -- combining -------------------------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Destinations = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines `value` over the replicas.

        Args:
            reduce_op: A `ReduceOp` or its name.
            value: As for `strategy.reduce`.
            destinations: Where the result is needed: devices or their names, a distributed value or
                a variable.
            options: Accepted for compatibility with TensorFlow: values are sent one at a time.

        Returns:
            The result: a tree like `value`, with one array for each distributed value, as a
            `Mirrored` if there are several destinations.

        Raises:
            ValueError: As `strategy.reduce`; or there is no such device.
            RuntimeError: In replica context; use `all_reduce` or `merge_call` there.

        TF: `tf.distribute.StrategyExtended.reduce_to`.
        """
        context.require_cross_replica_context("strategy.extended.reduce_to()")
        del options
        _check_destinations(destinations)
        reduced = self._strategy.reduce(reduce_op, value, axis=None)
        return jax.tree.map(lambda leaf: self.broadcast_to(leaf, destinations), reduced)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several values, given with their destinations; see `reduce_to`.

        TF: `tf.distribute.StrategyExtended.batch_reduce_to`.
        """
        context.require_cross_replica_context("strategy.extended.batch_reduce_to()")
        return [
            self.reduce_to(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_to(self, tensor: Any, destinations: Destinations) -> Any:
        """Returns `tensor` on all `destinations`: a `Mirrored`, if there are several.

        TF: `tf.distribute.StrategyExtended.broadcast_to`.
        """
        context.require_cross_replica_context("strategy.extended.broadcast_to()")
        if isinstance(tensor, jax.core.Tracer):
            return tensor  # in a program it is on all devices already
        return self.cross_device_ops.broadcast(tensor, destinations)

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The combination of values on the strategy's devices."""
        return self._cross_device_ops or NcclAllReduce()

    # -- updating --------------------------------------------------------------------------

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(var, *args, **kwargs)` for each copy of a variable, on its device.

        `fn` reads and assigns the copy; nothing is combined. For distributed values, each call gets
        the component of its device; if there are any, the copies may differ afterwards. `fn` is
        traced once, like a function given to `strategy.run`. In replica context, the variable and
        the arguments first go through `merge_call`.

        Args:
            var: A variable of this strategy.
            fn: The function.
            args: Further arguments: trees of arrays, numbers and distributed values.
            kwargs: Further keyword arguments.
            group: Whether to return the results as distributed values; otherwise as tuples with a
                component for each device.

        Returns:
            The result of `fn`.

        Raises:
            ValueError: `var` is not a variable of this strategy.

        Examples:
            >>> import unison
            >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> with strategy.scope():
            ...     v = unison.Variable(1.0)
            >>> _ = strategy.extended.update(v, lambda v, x: v.assign_sub(x), args=(0.25,))
            >>> float(v)
            0.75

        TF: `tf.distribute.StrategyExtended.update`.
        """
        if not self.variable_created_in_scope(var):
            raise ValueError(
                f"update() takes a variable of {self._strategy!r}. Received: {var!r}. Create it "
                "inside `with strategy.scope():`."
            )
        return self._call_for_each_copy(fn, (var, *args), kwargs or {}, group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(*args, **kwargs)` once on each device; see `update`.

        Args:
            colocate_with: The devices: from `non_slot_devices`, or variables of this strategy.
            fn: The function.
            args: Arguments: trees of arrays, numbers and distributed values.
            kwargs: Keyword arguments.
            group: As in `update`.

        TF: `tf.distribute.StrategyExtended.update_non_slot`.
        """
        context.require_cross_replica_context("strategy.extended.update_non_slot()")
        _check_destinations(colocate_with)
        return self._call_for_each_copy(fn, tuple(args), kwargs or {}, group)

    def _call_for_each_copy(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], group: bool
    ) -> Any:
        lift = current_lift()
        replica = context.replica_context_in_scope()
        if context.strategy_in_scope() is None:  # the default strategy's only replica
            replica = context.ReplicaContext(self._strategy)
        if lift is None:
            updating = _Updating(fn, self._strategy, _has_components((args, kwargs)))
            results = self._strategy.run(updating, args, kwargs)
        elif lift.placement != self._strategy.placement:
            needs_python("strategy.extended.update()")
            raise RuntimeError(
                f"update() of {self._strategy!r} is called inside a program that runs on "
                f"{lift.placement}. Call it outside of that program."
            )
        elif replica is not None:
            return replica.merge_call(
                lambda _, args, kwargs: self._call_for_each_copy(fn, args, kwargs, group),
                args=(args, kwargs),
            )
        else:
            results = self._call_on_own_copy(fn, args, kwargs)
        if group:
            return results
        local_results = self._strategy.experimental_local_results
        return jax.tree.map(local_results, results, is_leaf=is_distributed)

    def _call_on_own_copy(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls `fn` inside the `merge_call` of a program."""
        lift = current_lift()
        assert lift is not None
        differ = _has_components((args, kwargs))
        args, kwargs = jax.tree.map(own_component, (args, kwargs), is_leaf=is_distributed)
        with lift.updating_copies(differ):
            results = jax.tree.map(
                lambda leaf: leaf.value() if has_cell(leaf) else leaf, fn(*args, **kwargs)
            )
        return jax.tree.map(ReplicaLocal, results) if self._has_several else results

    @property
    def _has_several(self) -> bool:
        return self._strategy.num_replicas_now > 1

    # -- variables -------------------------------------------------------------------------

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether `v` is a variable of this strategy."""
        return has_cell(v) and v.cell.placement == self._strategy.placement

    def value_container(self, value: Any) -> Any:
        """Returns the variable that `value` is a copy of, which is `value` itself here."""
        return value

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Context manager in which new variables are on the devices of `colocate_with_variable`.

        Raises:
            ValueError: That is not a variable of this strategy.

        TF: `tf.distribute.StrategyExtended.colocate_vars_with`.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                f"colocate_vars_with() takes a variable of {self._strategy!r}. "
                f"Received: {colocate_with_variable!r}"
            )
        with scoped_placement(colocate_with_variable.cell.placement):
            yield

    def read_var(self, v: Any) -> Any:
        """Returns the value of a variable: the copies combined."""
        return v.read_value()

    # -- running ---------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `fn` on every replica: `strategy.run`."""
        return self._strategy.run(fn, args, kwargs)

    @property
    def experimental_between_graph(self) -> bool:
        """Whether every worker runs a copy of the program: False with a single worker."""
        return process_group.count() > 1

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether the replicas must get equal shapes: they need not."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Whether this worker initializes variables: each one does its own."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this worker writes checkpoints: the first one does."""
        return process_group.is_first()

    @property
    def should_save_summary(self) -> bool:
        """Whether this worker writes summaries: the first one does."""
        return process_group.is_first()


class _Updating(Calling):
    """A function that `strategy.run` calls for each copy of a variable, outside the replicas."""

    def __init__(self, fn: Callable[..., Any], strategy: Strategy, differently: bool):
        super().__init__(fn, differently)
        self._strategy = strategy
        self._differently = differently

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lift = current_lift()
        assert lift is not None
        with context.entered(self._strategy), lift.updating_copies(self._differently):
            return super().__call__(*args, **kwargs)


def _has_components(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=is_distributed)
    return any(is_distributed(leaf) and not isinstance(leaf, Mirrored) for leaf in leaves)


def _check_destinations(destinations: Destinations) -> None:
    """Raises a ValueError if `destinations` names a device that does not exist."""
    if isinstance(destinations, str):
        destinations = [destinations]
    if isinstance(destinations, list | tuple):
        for device in destinations:
            if isinstance(device, str):
                resolve(device)
