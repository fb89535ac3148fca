"""One step of a Keras model, compiled for all replicas."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unison.captured import StateCapturedError
from unison.cells import Cell, Layout
from unison.collectives.presence import Presence
from unison.compression.reporting import bytes_in
from unison.data import Shares, count_examples
from unison.data.distribution.own_rows import (
    OwnRows,
    are_own_rows,
    is_divided_for_others,
    rows_of,
    shares_of,
    whole_like,
)
from unison.interrupts import signals_held
from unison.jaxprs import calls_host
from unison.keras.grouping import Trial, group_size_of, grouped, is_measured, stacking
from unison.keras.own_rows import example_of, require_equal_shapes
from unison.keras.step_tracing import METRICS_OF_ALL, StepTrace, StepTracer, flat_logs
from unison.lifting import (
    enter_replica,
    leave_replica,
)
from unison.lockstep import ByClass, operations_that_differ, run_in_lockstep
from unison.lowering.flops import count_flops
from unison.program import (
    MIRRORED,
    PER_REPLICA,
    Executable,
    HomeUpdate,
    cell_spec,
    compile_replicas,
    numerics,
)
from unison.program.building import CellForms, NamedTrace, lower_traces, split_update_at_home
from unison.program.host_errors import HostCalls
from unison.program.recently_used import MOST_PROGRAMS, RecentlyUsed
from unison.program.single_replica import alone, compile_alone, piece_on
from unison.runtime.elastic import ElasticPlacement
from unison.runtime.planned import ProgramPlanned
from unison.runtime.private_jax import evaluated_as_traced
from unison.runtime.process_group import all_gather_json
from unison.runtime.replica_function import ReplicaFunction, StepsInALoop
from unison.strategies import Strategy

logger = logging.getLogger("unison")

#: A step that has been compiled this often is warned about.
_COMPILATIONS_TO_WARN = 8


@dataclasses.dataclass
class _Program:
    """A step compiled for one structure of batch.

    Attributes:
        shares: How the batch is divided.
        execute: Maps the overwritten state, the other state and the batch to the results and the
            new state, with what `update` needs after it. Of grouped steps the batches are stacked,
            and their number comes last.
        donated: The indices, in the flat state, of the state that is overwritten.
        read_only: Those of the rest of the state that replicas look at.
        returned: Those of the state that is returned.
        group_size: How many steps one execution can run.
        layouts: The layouts of the state's cells when it was compiled.
        bytes_sent: What a replica sends in a step, by the step's collectives.
        operations: The floating-point operations of a replica's products in a step.
        update: Computes further new state, at home.
        host_calls: The functions of the host that it calls, if any, which may raise while it runs.
            It leaves the state alone, which is kept until it has ended.
        stacked: Where batches of grouped steps wait. On CPUs, buffers of the stacked batches;
            elsewhere, the batches on the devices, which the program stacks.
        trial: The timing of its first executions, if they decide whether steps run together.
        single: The program of a single step, to which a trial may go back, and its key.
    """

    shares: Shares
    execute: Executable
    donated: list[int]
    read_only: list[int]
    returned: list[int]
    group_size: int
    layouts: CellForms
    bytes_sent: float
    operations: int
    update: HomeUpdate[int] | None = None
    host_calls: HostCalls | None = None
    stacked: list[Any] = dataclasses.field(default_factory=list)
    trial: Trial | None = None
    single: tuple[Any, _Program] | None = None

    def shape_of_group(self, leaf: Any, num_replicas: int) -> tuple[int, ...]:
        """Returns the shape of the batches of a group like `leaf`, for so many replicas.

        Its axes are replica, step, example: what a replica gets is contiguous, so that placing it
        on a CPU device needs no copy.
        """
        return (num_replicas, self.group_size, self.shares.chunk, *leaf.shape[1:])


@dataclasses.dataclass
class _Launched:
    """An execution of which it may not be known whether it has taken effect.

    Attributes:
        number: How many programs had been launched before it.
        batches: What it was for.
        metrics: The metrics of all replicas after it, if the step returns them.
    """

    number: int
    batches: list[Any]
    metrics: list[Any] | None = None


class CompiledStep:
    """A train, test or predict step of `model` as one program on all replicas.

    Args:
        model: A built Keras model.
        strategy: Whose replicas run it.
        step: Maps the state of one replica, a tuple of lists of arrays, and its batch to logs
            (or outputs) and the new state.
        cells: The groups of the model's variables that make up the state, in order.
        returns_examples: Whether the step returns one row an example rather than logs.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        step: Callable[..., Any],
        cells: dict[str, list[Cell]],
        returns_examples: bool = False,
    ):
        self._model = model
        self._strategy = strategy
        self._step = step
        self._tracer = StepTracer(model, strategy, step, cells, returns_examples)
        self._groups = self._tracer.groups
        self._cells = self._tracer.cells
        self._returns_examples = returns_examples
        #: Called with the number of steps that were launched together, and the new state.
        self.on_launch: Callable[[int, list[jax.Array]], None] | None = None
        self._is_eager = model.run_eagerly and strategy.num_replicas_now == 1
        #: Those that may wait and those that may not have entries of their own.
        self._programs: RecentlyUsed[Any, _Program] = RecentlyUsed(2 * MOST_PROGRAMS)
        self._alone: dict[Any, Callable[..., Any]] = {}
        #: Numbers of steps on the devices.
        self._counts: dict[int, jax.Array] = {}
        self._compilations = 0
        self._waiting: tuple[_Program, int] | None = None
        #: The batches that wait, and those of executions that may not have taken effect: in a
        #: group of workers that may change.
        self._waiting_batches: list[Any] = []
        self._arriving: list[Any] = []
        self._launched: collections.deque[_Launched] = collections.deque()
        #: The metrics' variables, combined over the replicas, after the last step that is known to
        #: have taken effect; None: those in the state.
        self.known_metrics: list[Any] | None = None
        self._results: Any = {}
        #: The bytes that a replica has sent in the latest step.
        self.bytes_sent = 0.0
        #: Those of a replica's products in the latest step.
        self.operations = 0

    @property
    def trains(self) -> bool:
        """Whether the step trains the model."""
        return self._tracer.trains

    @property
    def log_names(self) -> list[str]:
        """The names of all logs; known after the first step."""
        return self._tracer.log_names

    @property
    def metric_names(self) -> list[str]:
        """The names of the logs that are results of metrics; known after the first step."""
        return self._tracer.metric_names

    @property
    def cells(self) -> list[Cell]:
        """The cells of the arrays in its state."""
        return self._cells

    def __call__(self, state: list[jax.Array], batch: Any, may_wait: bool = False) -> int:
        """Runs the step on `batch`, and leaves the new state in `state`.

        Args:
            state: The stored arrays of the cells, flat.
            batch: A tree of arrays whose first axes are the examples.
            may_wait: Whether the step may wait for others to run with it. The state is then that
                after the step only once `finish` has been called.

        Returns:
            The number of examples in the batch.
        """
        leaves, structure = jax.tree.flatten(batch)
        leaves = [as_array(leaf) for leaf in leaves]
        if self._is_eager:
            self._execute_eagerly(state, structure, leaves)
            return count_examples(leaves)
        if self._strategy.group is not None:
            self._arriving = [batch]
            placement = self._strategy.placement
            first = placement.local_replicas[0]
            if is_divided_for_others(leaves, placement.num_replicas, first):
                return self(state, leaves[0].again(), may_wait)  # the group has changed since
        # Steps that run together are one operation, in which nothing could be found.
        may_wait = may_wait and not numerics.are_checked()
        try:
            program = self._program_for(structure, leaves, state, may_wait)
        except StateCapturedError:
            self._arriving = []  # another step runs on it
            raise
        self.operations = program.operations
        with signals_held:
            if program.group_size > 1:
                self._wait(program, leaves, state, batch)
            else:
                self.finish(state)
                placed = self._placed(program.shares, leaves)
                self._arriving = []
                self._note([batch])
                if may_wait and program.trial is not None:
                    self._execute_timed(program.trial, program, state, placed)
                else:
                    self._execute(program, state, placed)
        if may_wait and program.group_size == 1:
            self._group_if_it_pays(program, structure, leaves, state)
        return program.shares.examples

    def _placed(self, shares: Shares, leaves: list[Any]) -> list[jax.Array]:
        """Returns the leaves of a batch on the replicas' devices, padded where they are uneven."""
        placement = self._strategy.placement
        if are_own_rows(leaves):
            return [placement.join_rows(leaf.padded()) for leaf in leaves]
        if not shares.are_even:
            local = placement.local_replicas
            leaves = [
                shares.pad(np.asarray(leaf), local)
                if placement.is_host or not isinstance(leaf, jax.Array)
                else _padding_on_devices(shares)(leaf)
                for leaf in leaves
            ]
        placed: list[jax.Array] = placement.divide(leaves)
        return placed

    def _program_for(
        self, structure: Any, leaves: list[Any], state: list[jax.Array], may_wait: bool
    ) -> _Program:
        """Returns the program for batches like this one; a new one is compiled when it is run."""
        key = self._key(structure, leaves, may_wait)
        program = self._programs.get(key)
        if program is None or not program.layouts.hold():
            self.finish(state)
            program = self._made(key, structure, leaves, state)
        return program

    def _key(self, structure: Any, leaves: list[Any], may_wait: bool) -> tuple[Any, ...]:
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        strategy = self._strategy
        division = strategy.placement.num_replicas, strategy.replica_shares.proportions
        if are_own_rows(leaves):
            division = leaves[0].shares.num_replicas, leaves[0].shares.proportions
        return may_wait, structure, shapes, division, strategy.communication_options

    def _made(
        self, key: tuple[Any, ...], structure: Any, leaves: list[Any], state: list[jax.Array]
    ) -> _Program:
        may_wait, *others = key
        if are_own_rows(leaves) and self._strategy.group is None:
            require_equal_shapes(leaves)
        program = self._compile(structure, leaves, state, may_wait)
        self._programs.keep(key, program)
        if program.group_size == 1:
            self._programs.keep((not may_wait, *others), program)
        if self._strategy.tuning is None:
            self._warn_of_retracing()
        return program

    def prepare(
        self, state: list[jax.Array], batch: Any, may_wait: bool, num_replicas: int
    ) -> Callable[[], None] | None:
        """Traces the step for a group of another size.

        Args:
            state: See `__call__`.
            batch: A batch like those that are to come.
            may_wait: See `__call__`.
            num_replicas: The replicas of that group.

        Returns:
            What compiles it, in any thread; None if that is done.
        """
        placement = self._strategy.placement
        assert isinstance(placement, ElasticPlacement)
        leaves, structure = jax.tree.flatten(batch)
        leaves = [whole_like(as_array(leaf)) for leaf in leaves]
        with placement.as_if_of(num_replicas):
            key = self._key(structure, leaves, may_wait)
            if key in self._programs:
                return None
            program = self._made(key, structure, leaves, state)
        local = len(placement.local_replicas)
        shapes = [(local * program.shares.chunk, *leaf.shape[1:]) for leaf in leaves]
        counts = []
        if program.group_size > 1:
            shapes = [program.shape_of_group(leaf, local) for leaf in leaves]
            counts = [jax.ShapeDtypeStruct((), np.int32)]
        of_state = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in state]
        return functools.partial(
            program.execute.prepare,
            num_replicas,
            [of_state[index] for index in program.donated],
            [of_state[index] for index in program.read_only],
            [
                jax.ShapeDtypeStruct(shape, leaf.dtype)
                for shape, leaf in zip(shapes, leaves, strict=True)
            ],
            *counts,
        )

    def _warn_of_retracing(self) -> None:
        self._compilations += 1
        if self._compilations == _COMPILATIONS_TO_WARN:
            logger.warning(
                "%s of model %r has been compiled %d times: every new size of batch makes a new "
                "program. Keep the batches' shapes (pad, or drop the remainder).",
                getattr(self._step, "__name__", "A step"),
                self._model.name,
                self._compilations,
            )

    def forget_programs(self) -> None:
        """Drops the programs, so that the next step recompiles; no step is queued."""
        self._programs.clear()

    def results(self, state: list[jax.Array]) -> Any:
        """Returns the logs or outputs of the latest step."""
        self.finish(state)
        return self._results

    @property
    def is_waiting(self) -> bool:
        """Whether steps wait for others, to run with them."""
        return self._waiting is not None

    def finish(self, state: list[jax.Array]) -> None:
        """Runs the steps that wait."""
        if self._waiting is None:
            return
        with signals_held:
            program, count = self._waiting
            self._waiting = None
            # The device may go on reading the host's buffers: the next group gets new ones.
            stacked, program.stacked = program.stacked, []
            if self._strategy.placement.is_host:
                placed = self._strategy.placement.spread(stacked)
            else:  # the program takes a full group, of which it runs `count` steps
                placed = stacked + stacked[-1:] * (program.group_size - count)
            batches, self._waiting_batches = self._waiting_batches, []
            self._note(batches)
            if program.trial is not None and count == program.group_size:
                self._execute_timed(program.trial, program, state, placed, count)
                self._keep_if_it_pays(program)
            else:
                self._execute(program, state, placed, count)

    def _execute_timed(
        self,
        trial: Trial,
        program: _Program,
        state: list[jax.Array],
        batch: list[Any],
        steps: int = 1,
    ) -> None:
        """Executes a program alone, and takes note of the time."""
        jax.block_until_ready((state, batch))
        begin = time.perf_counter()
        self._execute(program, state, batch, steps)
        launched = time.perf_counter()
        jax.block_until_ready(state)
        trial.note(launched - begin, time.perf_counter() - launched)

    def _group_if_it_pays(
        self, single: _Program, structure: Any, leaves: list[Any], state: list[jax.Array]
    ) -> None:
        """Makes the next steps run together if launching them takes longer than computing them."""
        trial = single.trial
        if trial is None or not trial.is_over:
            return
        single.trial = None
        group_size = min(self._of_all_workers(trial.group_size()))
        if group_size > 1:
            program = self._compile(structure, leaves, state, may_wait=True, group_size=group_size)
            key = self._key(structure, leaves, may_wait=True)
            program.trial, program.single = Trial(trial.launch), (key, single)
            self._programs.keep(key, program)

    def _keep_if_it_pays(self, program: _Program) -> None:
        """Makes the next steps run alone again if groups of them have not been faster."""
        trial = program.trial
        if trial is None or not trial.is_over:
            return
        single, program.trial, program.single = program.single, None, None
        if not all(self._of_all_workers(trial.pays_off(program.group_size))):
            assert single is not None
            self._programs.keep(*single)

    def _of_all_workers(self, value: Any) -> list[Any]:
        """Returns the value of every worker, which measure different times."""
        if not self._strategy.placement.spans_processes:
            return [value]
        return all_gather_json(value, "Whether small steps run together")

    def _note(self, batches: list[Any]) -> None:
        """Notes what is about to be executed, where it may turn out to have no effect."""
        group = self._strategy.group
        if group is None:
            return
        self.settled()
        self._launched.append(_Launched(group.launched, batches))

    def forget_metrics(self) -> None:
        """Takes note that somebody has set the metrics' variables since the last step."""
        self.known_metrics = None
        for launched in self._launched:
            launched.metrics = None

    def know_metrics(self, values: list[np.ndarray]) -> None:
        """Takes note of the metrics of all replicas, received from another worker."""
        self.known_metrics = [jnp.asarray(value) for value in values]
        self._results = {METRICS_OF_ALL: self.known_metrics}

    def take_back(self) -> list[Any]:
        """Returns the batches, in order, of the steps that have not taken effect."""
        self.settled()
        batches = [batch for each in self._launched for batch in each.batches]
        batches += self._waiting_batches + self._arriving
        self._launched.clear()
        self._waiting, self._waiting_batches, self._arriving = None, [], []
        for program in self._programs.values():
            program.stacked = []
        return batches

    def settled(self) -> None:
        """Takes note of what is known of the executions, and of the metrics after them."""
        group = self._strategy.group
        assert group is not None
        while self._launched and self._launched[0].number < group.committed:
            self.known_metrics = self._launched.popleft().metrics
        if self._launched and group.partly_committed:  # some steps of a loop
            first = self._launched[0]
            first.batches = first.batches[group.partly_committed :]
            self.known_metrics = first.metrics
            group.partly_committed = 0

    def _wait(
        self, program: _Program, leaves: list[Any], state: list[jax.Array], batch: Any
    ) -> None:
        if self._waiting is not None and self._waiting[0] is not program:
            self.finish(state)
        position = 0 if self._waiting is None else self._waiting[1]
        if self._strategy.placement.is_host:
            self._stack(program, position, leaves)
        else:
            program.stacked.append(self._placed(program.shares, leaves))
        self._waiting = (program, position + 1)
        if self._strategy.group is not None:
            self._waiting_batches.append(batch)
            self._arriving = []
        if position + 1 == program.group_size:
            self.finish(state)

    def _stack(self, program: _Program, position: int, leaves: list[Any]) -> None:
        """Copies a batch to its position in the stack of its group."""
        local = self._strategy.placement.local_replicas
        if not program.stacked:
            program.stacked = [
                np.empty(program.shape_of_group(leaf, len(local)), leaf.dtype) for leaf in leaves
            ]
        shares = program.shares
        for buffer, leaf in zip(program.stacked, leaves, strict=True):
            if isinstance(leaf, OwnRows):
                buffer[:, position] = leaf.padded()
                continue
            of_replicas = shares.pad(leaf, local).reshape(shares.num_replicas, *buffer.shape[2:])
            buffer[:, position] = of_replicas[local[0] : local[-1] + 1]

    def _execute(
        self, program: _Program, state: list[jax.Array], batch: list[Any], steps: int = 1
    ) -> None:
        count = [self._count_on_devices(steps)] if program.group_size > 1 else []
        from_home = self._strategy.placement.from_home
        donated = from_home([state[index] for index in program.donated])
        read_only = from_home([state[index] for index in program.read_only])
        try:
            run = functools.partial(program.execute, donated, read_only, batch, *count)
            calls = program.host_calls
            self._results, new = run() if calls is None else calls.run(run)
        except ProgramPlanned as planned:
            planned.state = self._bytes_on_each_device(state)
            planned.examples = program.shares.examples
            raise
        self.bytes_sent = program.bytes_sent
        if self._launched and self._tracer.tells_metrics:
            self._launched[-1].metrics = self._results[METRICS_OF_ALL]
        for index, array in zip(program.returned, new, strict=program.update is None):
            state[index] = self._cells[index].to_home(array)
        update = program.update
        if update is not None:
            taken, read = [[state[i] for i in names] for names in (update.taken, update.read)]
            new = update(new[len(program.returned) :], taken, read)
            for index, array in zip(update.written, new, strict=True):
                state[index] = array
        if self.on_launch is not None:
            self.on_launch(steps, state)
        if not self._returns_examples:
            return
        if self._strategy.placement.spans_processes:
            self._results = jax.tree.map(self._strategy.placement.whole, self._results)
        if not program.shares.are_even:
            self._results = self._gather(self._results, program.shares)

    def _count_on_devices(self, steps: int) -> Any:
        """Returns a number of steps as a program takes it, copied to the devices once."""
        if self._strategy.group is not None:  # its devices may change
            return np.int32(steps)
        if steps not in self._counts:
            self._counts[steps] = self._strategy.placement.bring(np.int32(steps))
        return self._counts[steps]

    def _bytes_on_each_device(self, state: list[jax.Array]) -> dict[str, int]:
        """Returns what the groups of the state take."""
        sizes = dict.fromkeys(self._groups, 0)
        for group, array in zip(self._groups, state, strict=True):
            of_device = math.prod(array.sharding.shard_shape(array.shape))
            sizes[group] += of_device * array.dtype.itemsize
        return sizes

    def _execute_eagerly(self, state: list[jax.Array], structure: Any, leaves: list[Any]) -> None:
        """Runs the step in Python, operation by operation, on the only replica."""
        tracer = self._tracer
        is_local = [cell.layout is Layout.LOCAL for cell in self._cells]
        on_devices = self._strategy.placement.from_home(state)
        values = [x[0] if local else x for x, local in zip(on_devices, is_local, strict=True)]
        self._results, new = self._step(
            tracer.regrouped(values),
            jax.tree.unflatten(structure, [jnp.asarray(example_of(leaf)) for leaf in leaves]),
        )
        if not self._returns_examples:
            before, logs = tracer.regrouped(values), flat_logs(self._results)
            own, of_all = tracer.logs_without_metrics(logs, before, new)
            self._results = own | of_all
        flat = [value for group in new for value in group]
        for index, (cell, local) in enumerate(zip(self._cells, is_local, strict=True)):
            sharding = cell.placement.per_replica if local else cell.placement.mirrored
            value = jax.device_put(flat[index][None] if local else flat[index], sharding)
            flat[index] = cell.to_home(value)
        state[:] = flat  # at once: a signal handler may raise between any two calls
        if self.on_launch is not None:
            self.on_launch(1, state)

    def _gather(self, results: Any, shares: Shares) -> Any:
        """Puts the rows of an uneven batch together again."""
        classes = list(dict.fromkeys(shares.counts))

        def gather(by_class: ByClass) -> np.ndarray:
            parts = []
            for replica, count in enumerate(shares.counts):
                of_all = np.asarray(by_class.arrays[classes.index(count)])
                rows = len(of_all) // shares.num_replicas
                parts.append(of_all[replica * rows : (replica + 1) * rows])
            return np.concatenate(parts)

        return jax.tree.map(gather, results, is_leaf=lambda node: isinstance(node, ByClass))

    def parts_alone(
        self, state: list[jax.Array], batch: Any, count: int
    ) -> list[Callable[[], Any]]:
        """Returns for each of this process's replicas what computes its part of a step, alone.

        It does so for the first `count` examples of `batch`, with the present state, which it
        leaves as it is, and waits for it; see `unison.program.single_replica`.
        """
        leaves, structure = jax.tree.flatten(batch)
        leaves = [rows_of(as_array(leaf), count) for leaf in leaves]
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (structure, shapes, tuple(cell.layout for cell in self._cells))
        if key not in self._alone:
            placement = self._strategy.placement
            shares = Shares(count * placement.num_replicas, placement.num_replicas)
            trace = self._tracer.trace(count, shares, structure, leaves, state, set())
            of_trace = alone(trace.jaxpr)

            def part(replica: jax.Array, stored: list[Any], own: list[Any]) -> list[Any]:
                entered = [_enter(c, piece) for c, piece in zip(self._cells, stored, strict=True)]
                return of_trace(replica, *entered, *own)

            self._alone[key] = compile_alone(placement, part)
        run = self._alone[key]

        def part_on(device: jax.Device) -> Callable[[], Any]:
            stored = [piece_on(device, array) for array in state]
            return functools.partial(run, device, stored, jax.device_put(leaves, device))

        return [part_on(device) for device in self._strategy.placement.local_devices]

    # -- compiling -------------------------------------------------------------------------

    def _compile(
        self,
        structure: Any,
        leaves: list[Any],
        state: list[jax.Array],
        may_wait: bool,
        group_size: int | None = None,
    ) -> _Program:
        placement = self._strategy.placement
        proportions = self._strategy.replica_shares.proportions
        shares = shares_of(leaves, placement.num_replicas, proportions)
        classes = list(dict.fromkeys(shares.counts))
        diverging: set[int] = set()

        def trace_all() -> list[StepTrace]:
            return Presence().of_all(
                lambda: [
                    self._tracer.trace(count, shares, structure, leaves, state, diverging)
                    for count in classes
                ],
                lambda traces: operations_that_differ([trace.jaxpr for trace in traces]),
            )

        traces = trace_all()
        if self._tracer.combine_extremes(traces, state):
            traces = trace_all()
        written = sorted(set().union(*(trace.written for trace in traces)))
        self._tracer.localize(written, diverging, state)
        jaxprs = [trace.jaxpr.jaxpr for trace in traces]
        calls = HostCalls(jaxprs, placement.devices) if any(map(calls_host, jaxprs)) else None
        update = None
        if calls is None:
            traces, update = self._with_update_at_home(traces, written)
        of_a_group = traces[0].jaxpr
        operations = count_flops(of_a_group.jaxpr)
        traces, lower = lower_traces(placement, traces)
        cells = self._cells
        returned = list(range(len(cells)))
        if update is not None:
            written = [index for index in written if index not in update.written]
            returned = [index for index in returned if index not in update.written]
        looked_at = set(written).union(*(trace.used(len(cells)) for trace in traces))
        # The logs hold on to a step's metrics until somebody looks; the rest is overwritten.
        donated = [i for i in written if self._groups[i] != "metrics_variables"]
        read_only = sorted(looked_at.difference(donated))

        def body(
            position: int, donated_state: list[Any], read_only_state: list[Any], batch: list[Any]
        ) -> tuple[Any, list[Any]]:
            """Runs the step of a replica of the class at `position`."""
            trace = traces[position]
            inputs: list[Any] = [None] * len(cells)
            pieces = zip([*donated, *read_only], [*donated_state, *read_only_state], strict=True)
            for index, piece in pieces:
                inputs[index] = _enter(cells[index], piece)
            own = [leaf[: trace.rows] for leaf in batch]
            outputs = evaluated_as_traced(trace.jaxpr, [*inputs, *own])
            num_results = trace.results.num_leaves
            results = jax.tree.unflatten(trace.results, outputs[:num_results])
            end = num_results + len(returned)
            new = dict(zip(returned, outputs[num_results:end], strict=True))
            return results, [*(_leave(cells[i], new[i]) for i in written), *outputs[end:]]

        def program(donated_state: list, read_only_state: list, batch: list) -> tuple[Any, list]:
            bodies = [functools.partial(body, position) for position in range(len(classes))]
            of_replica = [classes.index(count) for count in shares.counts]
            return run_in_lockstep(bodies, of_replica)(donated_state, read_only_state, batch)

        program = lower(program)
        place_of = {index: (0, place) for place, index in enumerate(donated)}
        place_of |= {index: (1, place) for place, index in enumerate(read_only)}

        def unchanged(args: Sequence[Any], outputs: tuple[Any, list]) -> tuple[Any, list]:
            """Returns the outputs of a step that leaves the state as it was."""
            before = [args[group][place] for group, place in map(place_of.__getitem__, written)]
            return outputs[0], before + outputs[1][len(written) :]

        # Batches of given shares are as many as even ones; other uneven ones end an epoch.
        repeats = shares.are_even or proportions is not None
        may_be_grouped = may_wait and repeats and update is None and calls is None
        is_tried = may_be_grouped and group_size is None and is_measured(placement)
        if group_size is None:
            of_example = sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves)
            batch_bytes = shares.chunk * of_example
            group_size = group_size_of(operations, batch_bytes, placement) if may_be_grouped else 1
        if group_size > 1:
            program = grouped(program, donated, read_only, written)
            if not placement.is_host:
                program = stacking(program)
        batch_specs = [PER_REPLICA] if group_size == 1 else [PER_REPLICA, MIRRORED]
        part = ReplicaFunction(
            program,
            in_specs=(
                [cell_spec(cells[i]) for i in donated],
                [cell_spec(cells[i]) for i in read_only],
                *batch_specs,
            ),
            out_specs=(
                PER_REPLICA if self._returns_examples else MIRRORED,
                [
                    *(cell_spec(cells[i]) for i in written),
                    *(MIRRORED for _ in (update.crossing if update is not None else ())),
                ],
            ),
            donate=(0,) if calls is None else (),
            unchanged=unchanged if group_size == 1 else StepsInALoop(),
            name=f"{getattr(self._step, '__name__', 'a step')} of model {self._model.name!r}",
            number=0 if calls is None else calls.number,
        )
        execute = compile_replicas(placement, part, self._strategy.communication_options)
        return _Program(
            shares,
            execute,
            donated,
            read_only,
            written,
            group_size,
            layouts=CellForms(self._layouts),
            bytes_sent=bytes_in(of_a_group.jaxpr, placement.num_replicas),
            operations=operations,
            update=update,
            host_calls=calls,
            trial=Trial() if is_tried else None,
        )

    def _with_update_at_home(
        self, traces: list[StepTrace], written: Sequence[int]
    ) -> tuple[list[StepTrace], HomeUpdate[int] | None]:
        """Splits off the update that can be computed at home; see `split_update_at_home`."""
        states = range(len(self._cells))
        mirrored = {i for i, cell in enumerate(self._cells) if cell.layout is Layout.MIRRORED}
        found = split_update_at_home(
            self._strategy.placement,
            [
                NamedTrace(trace.jaxpr, states, [*([None] * trace.results.num_leaves), *states])
                for trace in traces
            ],
            mirrored,
            written,
            # The logs hold on to a step's metrics.
            updated={i for i in written if self._groups[i] != "metrics_variables"} & mirrored,
        )
        if found is None:
            return traces, None
        splits, update = found
        parts = zip(traces, splits, strict=True)
        return [dataclasses.replace(trace, jaxpr=split.replica) for trace, split in parts], update

    def _layouts(self) -> list[tuple[Layout, str | None]]:
        return [(cell.layout, cell.extreme) for cell in self._cells]


def _enter(cell: Cell, stored: jax.Array) -> jax.Array:
    # Of sharded state, a traced step takes and returns the replica's part.
    return stored if cell.layout is Layout.SHARDED else enter_replica(cell, stored)


def _leave(cell: Cell, value: jax.Array) -> jax.Array:
    return value if cell.layout is Layout.SHARDED else leave_replica(cell, value)


@functools.lru_cache(maxsize=64)
def _padding_on_devices(shares: Shares) -> Callable[[jax.Array], jax.Array]:
    """Returns `shares.pad` for an array that lies on a device, and stays there."""
    rows = np.full((shares.num_replicas, shares.chunk), shares.examples)  # which is past the end
    for replica, count in enumerate(shares.counts):
        own = shares.of(range(replica, replica + 1))
        rows[replica, :count] = range(own.start, own.stop)
    flat = rows.reshape(-1)
    return jax.jit(lambda batch: jnp.take(batch, flat, axis=0, mode="fill", fill_value=0))


def as_array(leaf: Any) -> Any:
    """Returns a leaf of a batch as an array of NumPy, of JAX or of own rows, of a dtype that
    devices have.
    """
    array = leaf if isinstance(leaf, np.ndarray | jax.Array | OwnRows) else np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if array.dtype == dtype else array.astype(dtype)
