"""`Strategy`: the base class of all strategies. Most subclasses only choose the devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from unison.cells import live_cells
from unison.collectives import (
    Communication,
    CommunicationOptions,
    CrossDeviceOps,
    ReduceOp,
    adding_by,
    communicating,
)
from unison.data import (
    Dataset,
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
    InputWorkers,
    distribute_dataset,
    distribute_from_function,
)
from unison.program import ProgramCache
from unison.runtime import logs, process_group, uncaught
from unison.runtime.elastic import ElasticGroup, ElasticOptions
from unison.runtime.host_memory import workers_at_start
from unison.runtime.placement import Placement
from unison.runtime.planned import PlannedPlacement, placement_on
from unison.runtime.precision import device_array
from unison.strategies import context, observing, reduction
from unison.strategies.alone import require_no_others
from unison.strategies.batch_shares import (
    MeasuredShares,
    examples_of,
    replica_shares,
    with_examples,
)
from unison.strategies.context import ReplicaContext
from unison.strategies.equal_copies import EqualCopies
from unison.strategies.extended import StrategyExtended
from unison.strategies.scope_observers import observed_scope
from unison.strategies.tuning import Tuning, arrays_of_run, key_of_run
from unison.tracebacks import end_contexts, filter_traceback, shorten
from unison.unsupported import UnsupportedMember
from unison.values import PerReplica, is_distributed, is_numeric


class Strategy:
    """Runs functions on several replicas and keeps their variables.

    Use one of the subclasses. TF: `tf.distribute.Strategy`.

    Args:
        devices: The replicas' devices.
        cross_device_ops: How the values of the devices are combined. Default: XLA chooses.
        home: Where the one copy of each variable is kept. Default: each device keeps one.
        batch_shares: The proportions in which a global batch is divided among the replicas; see
            `MirroredStrategy`.
        core_axes: The mesh of the devices of one replica; see `Placement`.
        group: The group of workers that these replicas belong to, if its members may change.
        input_workers: This process's place among the workers that share datasets. Default: it is
            the only worker.
        may_be_alone: Whether these may be all replicas even if the process belongs to a
            multi-process job, because that was requested. Otherwise it is an error.

    Raises:
        RuntimeError: There are other processes, which would each train their own model.

    Attributes:
        cluster_resolver: Describes the cluster of a multi-worker strategy; otherwise None.
        input_workers: This process's place among the workers that share datasets.
        replica_shares: The shares of a global batch that all replicas get.
    """

    cluster_resolver: Any = None
    #: The workers that share the input.
    input_workers = InputWorkers()
    #: The behaviour when the number of workers changes.
    elastic_options = ElasticOptions()
    #: Compares the workers' variables after steps, if requested.
    equal_copies: EqualCopies | None = None
    #: Chooses how gradients are communicated, by measuring the first steps, if requested.
    tuning: Tuning | None = None

    colocate_vars_with = UnsupportedMember("use strategy.extended.colocate_vars_with")
    configure = UnsupportedMember(
        "there are no sessions: pass cluster_resolver= to a multi-worker strategy, or set TF_CONFIG"
    )
    experimental_run = UnsupportedMember("use strategy.run(fn, args=(next(iterator),))")
    update_config_proto = UnsupportedMember("there are no sessions: set tf.config.threading, ...")

    def __init__(
        self,
        devices: Sequence[jax.Device],
        cross_device_ops: CrossDeviceOps | None = None,
        home: SingleDeviceSharding | None = None,
        batch_shares: Sequence[float] | str | None = None,
        core_axes: Mapping[str, int] | None = None,
        group: ElasticGroup | None = None,
        input_workers: InputWorkers | None = None,
        may_be_alone: bool = False,
        communication_options: CommunicationOptions | None = None,
    ):
        logs.show_what_is_asked_for()
        uncaught.install()
        #: The group of workers of these replicas, if it may change while the program runs.
        self.group = group
        if group is None:
            self._placement = placement_on(devices, home, core_axes)
        else:
            self._placement = group.placement
        is_planned = isinstance(self._placement, PlannedPlacement)
        if not (may_be_alone or group or is_planned or self._placement.spans_processes):
            require_no_others(type(self).__name__)
        self._communication = Communication(CommunicationOptions())
        self._programs = ProgramCache(
            self._placement, self.replica_context, communication=lambda: self.communication_options
        )
        self._cross_device_ops = cross_device_ops
        self._extended = StrategyExtended(self, cross_device_ops)
        if input_workers is not None:
            self.input_workers = input_workers
        self.replica_shares = replica_shares(
            batch_shares, self.num_replicas_now, self.input_workers
        )
        if communication_options is not None:
            if not isinstance(communication_options, CommunicationOptions):
                raise TypeError(
                    "communication_options must be CommunicationOptions(...). Received: "
                    f"{communication_options!r}"
                )
            self._communicate_by(communication_options)
        for observe in observing.strategy_observers:
            observe(self)

    def keras_trainer(self) -> Callable[[Any, Strategy], Any] | None:
        """Returns a factory of trainers for Keras models; None: the replicas train them."""
        return None

    @property
    def placement(self) -> Placement:
        """The replicas' devices, and how arrays are placed on them."""
        return self._placement

    @property
    def communication_options(self) -> CommunicationOptions:
        """The current communication options of gradients; with `auto_tune`, those chosen so far."""
        return self._communication.options

    def _communicate_by(self, options: CommunicationOptions) -> None:
        self._communication.options = options
        if options.auto_tune:
            self.tuning = Tuning(self._communication, self._programs.forget_other_communication)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are combined.

        On a worker that joins a running job, it is the number at the job's start until the worker
        takes part; so it is on all workers of a job that goes on with another number of them, but
        not inside `run`.
        """
        if self.group is not None and self.group.is_joining:
            return self.group.replicas_at_start
        workers = workers_at_start()
        is_inside = workers is not None and context.replica_context_in_scope() is not None
        if workers is None or self.cluster_resolver is None or is_inside:
            return self.num_replicas_now
        count = process_group.count()
        is_of_all = self._placement.spans_processes or count == 1
        return self.num_replicas_now * workers // count if is_of_all else self.num_replicas_now

    @property
    def num_replicas_now(self) -> int:
        """The number of replicas that compute now, for this package's own programs."""
        return self._placement.num_replicas

    @property
    def batch_shares(self) -> tuple[float, ...]:
        """The fraction of a global batch that each replica currently gets; they sum to 1."""
        proportions = self.replica_shares.proportions or (1,) * self.num_replicas_now
        return tuple(share / sum(proportions) for share in proportions)

    @property
    def extended(self) -> StrategyExtended:
        """The less frequently used methods: `worker_devices`, `reduce_to`, ..."""
        return self._extended

    @property
    def trace_count(self) -> int:
        """The number of replica programs that `run` has traced; constant in a steady state."""
        return self._programs.trace_count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self._placement.devices))})"

    # -- contexts --------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the current strategy: variables and Keras models created inside belong to it.

        Raises:
            RuntimeError: Inside another strategy's scope, or inside a replica program.
        """
        context.require_own_cross_replica_context(self, "strategy.scope()")
        with context.entered(self), observed_scope():
            yield self

    @contextlib.contextmanager
    def replica_context(self) -> Iterator[ReplicaContext]:
        replica_context = ReplicaContext(self)
        ops = self._cross_device_ops
        adding = contextlib.nullcontext() if ops is None else adding_by(ops.sum_over_replicas)
        # Objects created while a program is traced (an optimizer's slots) are created in the scope.
        tracing = self._placement.tracing()
        by = communicating(self._communication)
        with context.entered(self, replica_context), observed_scope(), adding, by, tracing:
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

        `fn` is traced once per signature; its Python side effects happen then. A new program is
        made for new shapes, dtypes, strings or Booleans among the arguments, and for new objects
        that `fn` closes over.

        Args:
            fn: A function of one replica's values. It may read and assign variables, and use
                `get_replica_context()` and the collectives.
            args: Positional arguments: pytrees of arrays and numbers, which every replica gets,
                and of `PerReplica` values, of which each gets its component.
            kwargs: Keyword arguments, likewise.
            options: Accepted for compatibility with TensorFlow (`tf.distribute.RunOptions`);
                tracing is always on.

        Returns:
            The result of `fn`, with a `PerReplica` for every leaf; with one replica, the leaf
            itself.

        Raises:
            RuntimeError: Inside a replica program, or in the scope of another strategy.
            TypeError: An argument is not an array, number, string, variable or distributed value.

        Examples:
            >>> import unison
            >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.run(lambda x: x * 2, args=(unison.PerReplica([1.0, 10.0]),)).values
            (Array(2., dtype=float32), Array(20., dtype=float32))
        """
        try:
            del options
            context.require_own_cross_replica_context(self, "strategy.run()")
            if not callable(fn):
                raise TypeError(f"strategy.run needs a function to call. Received: {fn!r}")
            if not isinstance(args, tuple | list):
                raise TypeError(
                    "strategy.run takes the positional arguments as a tuple: run(fn, args=(x,)). "
                    f"Received: args={args!r}"
                )
            observer = observing.step_observer
            programs = self._programs if observer is None else observer.running(self._programs)
            given = (tuple(args), kwargs or {})
            tuning = self.tuning
            if tuning is None or tuning.has_settled:
                result = programs(fn, *given)
            else:
                result = tuning.step(
                    key_of_run(fn, *given, self._placement),
                    lambda: programs(fn, *given),
                    lambda result: arrays_of_run(result, self._placement),
                )
            if self.equal_copies is not None and self.equal_copies.is_due():
                cells = [cell for cell in live_cells(self._placement) if not cell.is_alone]
                self.equal_copies.check((cell, cell.stored()) for cell in cells)
            return result
        except BaseException as error:
            # `filter_traceback` would cost another call.
            end_contexts(error)
            shorten(error)
            raise

    @filter_traceback
    def measure_batch_shares(
        self, fn: Callable[..., Any], args: tuple | list = (), kwargs: dict[str, Any] | None = None
    ) -> tuple[float, ...]:
        """Measures how long the replicas need for `fn`, and changes `batch_shares` if worthwhile.

        For custom loops with `batch_shares="measured"`; Keras' `fit` does this automatically. Each
        replica computes `fn` for two sizes of its part of the batch, for some tenths of a second,
        without waiting for the others; variables are not assigned. Batches that an iterator over a
        distributed dataset has prefetched keep their old division. All workers must call this after
        the same step.

        Args:
            fn: The function that `run` runs in a step.
            args: Its arguments, including a batch of a distributed dataset.
            kwargs: Likewise.

        Returns:
            The `batch_shares` from now on.

        Raises:
            ValueError: The strategy was not made with `batch_shares="measured"`, or there is no
                batch.
            RuntimeError: Inside a replica program.
        """
        context.require_cross_replica_context("strategy.measure_batch_shares()")
        if not isinstance(self.replica_shares, MeasuredShares):
            raise ValueError(
                'measure_batch_shares() needs a strategy of several replicas with batch_shares="'
                f'measured". Received: {self.replica_shares.proportions}, of '
                f"{self.num_replicas_now} replicas."
            )
        given = (tuple(args), kwargs or {})
        placement = self._placement

        def parts(count: int) -> list[Callable[[], Any]]:
            return self._programs.parts_alone(fn, *with_examples(given, count, placement))

        self.replica_shares.measure(examples_of(given, placement), parts)
        return self.batch_shares

    @filter_traceback
    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None
    ) -> Any:
        """Combines the components of `value` into one.

        Args:
            reduce_op: A `ReduceOp` or its name.
            value: A tree of `PerReplica` values, of variables that were written without
                aggregation, of `IndexedSlices`, or of the values that `merge_call` passes.
            axis: If None, the components are combined elementwise. Otherwise each component is
                reduced along this axis (or these) as well; `MEAN` divides by the true number of
                elements on all replicas.

        Returns:
            The tree, with one array for each distributed value.

        Raises:
            ValueError: `reduce_op` is `SUM` or `PROD`, there are several replicas, and a leaf is
                the same on all of them (a plain array, `Mirrored`, a variable whose copies are
                equal).
            RuntimeError: Inside a replica program; use `get_replica_context().all_reduce`.

        TF: `tf.distribute.Strategy.reduce`.
        """
        context.require_cross_replica_context("strategy.reduce()")
        op = ReduceOp.parse(reduce_op)

        def reduce_leaf(leaf: Any) -> Any:
            return reduction.reduced(op, leaf, axis, self._placement, self._cross_device_ops)

        return jax.tree.map(reduce_leaf, value, is_leaf=reduction.is_leaf)

    @filter_traceback
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the components of `value` along `axis`; their other axes must agree.

        A value without components is returned as it is.

        Raises:
            ValueError: `axis` is not an axis of the components, or their ranks or other axes
                differ.

        TF: `tf.distribute.Strategy.gather`.
        """
        context.require_cross_replica_context("strategy.gather()")
        return jax.tree.map(
            lambda leaf: reduction.gathered(leaf, axis, self._placement),
            value,
            is_leaf=reduction.is_leaf,
        )

    @filter_traceback
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of `value` on this process, `(value,)` if it has none.

        The components of a variable are its copies. Those of a list, tuple or dict are as many as
        there are replicas, as in TensorFlow.
        """
        components = reduction.components_of(value)
        if components is not None:
            return components
        leaves, structure = jax.tree.flatten(value, is_leaf=is_distributed)
        is_nested = isinstance(value, list | tuple | dict)
        if not is_nested and not any(map(is_distributed, leaves)):
            return (value,)
        columns = [
            leaf.values if is_distributed(leaf) else (leaf,) * len(self._placement.local_replicas)
            for leaf in leaves
        ]
        if not columns:
            return (value,) * len(self._placement.local_replicas)
        return tuple(jax.tree.unflatten(structure, own) for own in zip(*columns, strict=True))

    #: The name in TensorFlow 1.
    unwrap = experimental_local_results

    @filter_traceback
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Returns the `PerReplica` value whose component r is `value_fn` of replica r's context.

        NumPy arrays are copied to their replicas' devices, once. With one replica, the value is
        returned without a `PerReplica`.

        TF: `tf.distribute.Strategy.experimental_distribute_values_from_function`.
        """
        context.require_cross_replica_context("experimental_distribute_values_from_function()")
        count = self.num_replicas_now
        placement = self._placement
        values = []
        replicas = zip(placement.local_replicas, placement.local_devices, strict=True)
        for index, device in replicas:
            with jax.default_device(device):
                values.append(jax.tree.map(_on_device, value_fn(ValueContext(index, count))))
        if count == 1:
            return jax.tree.map(
                lambda leaf: placement.bring(leaf) if isinstance(leaf, jax.Array) else leaf,
                values[0],
            )
        return jax.tree.map(lambda *components: PerReplica(components), *values)

    @filter_traceback
    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Returns the global batches of `dataset`, each divided among the replicas.

        Replica r gets the r-th contiguous chunk of ceil(n / replicas) examples of a batch of n; the
        last replicas may get fewer, or none; with `batch_shares`, the chunks have those
        proportions. With one replica, batches are not divided.

        Args:
            dataset: A `unison.data.Dataset`, or any iterable of batches (a list, a generator, a
                Keras `PyDataset`): pytrees of arrays with the examples along their first axes.
            options: How batches are transferred to the devices. Unless specified otherwise, a
                thread transfers those of datasets, one batch ahead.

        Returns:
            An iterable of the same trees with a `PerReplica` for every array, for
            `run(fn, args=(batch,))`. It can be iterated again, and has a length, if `dataset` does.

        Raises:
            TypeError: `dataset` is not an iterable of batches.
            RuntimeError: Inside a replica program.

        Examples:
            >>> import numpy as np, unison
            >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> for batch in strategy.experimental_distribute_dataset([np.arange(5.0)]):
            ...     print([component.tolist() for component in batch.values])
            [[0.0, 1.0, 2.0], [3.0, 4.0]]

        TF: `tf.distribute.Strategy.experimental_distribute_dataset`.
        """
        context.require_cross_replica_context("experimental_distribute_dataset()")
        return distribute_dataset(
            dataset, self._placement, options, self.input_workers, self.replica_shares
        )

    @filter_traceback
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Returns the batches of a dataset that a function creates; each replica gets whole ones.

        Args:
            dataset_fn: Takes an `InputContext`; returns a `unison.data.Dataset` in batches of a
                replica's size (`context.get_per_replica_batch_size(global_size)`, which respects
                the strategy's `batch_shares`). The replicas take its batches in turn.
            options: How batches are transferred to the devices. `InputReplicationMode.PER_REPLICA`
                calls the function once for each replica.

        Raises:
            TypeError: The function does not return a dataset.
            RuntimeError: Inside a replica program.

        Examples:
            >>> import unison
            >>> from unison.data import Dataset
            >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> batches = strategy.distribute_datasets_from_function(
            ...     lambda context: Dataset.range(6).batch(context.get_per_replica_batch_size(4))
            ... )
            >>> for batch in batches:
            ...     print([component.tolist() for component in batch.values])
            [[0, 1], [2, 3]]
            [[4, 5], []]

        TF: `tf.distribute.Strategy.distribute_datasets_from_function`.
        """
        context.require_cross_replica_context("distribute_datasets_from_function()")
        return distribute_from_function(
            dataset_fn, self._placement, options, self.input_workers, self.replica_shares
        )

    #: The name before TensorFlow 2.4.
    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def make_dataset_iterator(self, dataset: Iterable[Any]) -> DistributedIterator:
        """Returns an iterator of `experimental_distribute_dataset`.

        TF: `tf.compat.v1.distribute.Strategy.make_dataset_iterator`.
        """
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Dataset],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """Returns an iterator of `distribute_datasets_from_function`.

        TF: `tf.compat.v1.distribute.Strategy.make_input_fn_iterator`.
        """
        options = InputOptions(experimental_replication_mode=replication_mode)
        return iter(self.distribute_datasets_from_function(input_fn, options))


def _on_device(leaf: Any) -> Any:
    """Returns a NumPy value as an array on the default device; any other one, as it is."""
    if isinstance(leaf, np.ndarray | np.generic) and is_numeric(leaf.dtype):
        return device_array(np.array(leaf))  # copied: its memory may be reused
    return leaf


class ValueContext:
    """The replica for which a function creates a value.

    TF: `tf.distribute.experimental.ValueContext`.
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1):
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync
