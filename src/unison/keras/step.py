"""One step of a Keras model, compiled for all replicas."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from unison.cells import Cell, Layout, VariableAggregation
from unison.collectives import all_reduce, all_reduce_packed
from unison.compression.reporting import bytes_in
from unison.data import Shares, count_examples
from unison.jaxprs import calls_host
from unison.keras.grouping import group_size_of, grouped
from unison.keras.losses import with_global_reductions
from unison.keras.metric_states import Update, updates_of
from unison.keras.optimizers import scaled_in_keras_steps, values_known_equal
from unison.keras.sharded_update import own_state, whole_state
from unison.keras.share_notes import note_share
from unison.keras.stateful_step import StatefulStep
from unison.lifting import (
    combine_writes,
    combines_writes,
    enter_replica,
    leave_replica,
    seen_from_outside,
)
from unison.lockstep import ByClass, run_in_lockstep
from unison.lowering import has_shard_map, lower_for_cpu, lowered_trace
from unison.program import (
    MIRRORED,
    PER_REPLICA,
    Executable,
    HomeUpdate,
    cell_spec,
    compile_replicas,
    numerics,
    split_off_update,
)
from unison.program.host_errors import errors_of_callbacks
from unison.program.recently_used import MOST_PROGRAMS, RecentlyUsed
from unison.program.single_replica import alone, compile_alone, piece_on
from unison.runtime.elastic import ElasticPlacement
from unison.runtime.interrupts import signals_held
from unison.runtime.placement import REPLICA_AXIS, StepsInALoop
from unison.runtime.planned import ProgramPlanned
from unison.strategies import Strategy
from unison.strategies.replica_share import ScaledBy, replica_share

logger = logging.getLogger("unison")

#: A step that has been compiled this often is warned about.
_COMPILATIONS_TO_WARN = 8

#: The groups whose copies the replicas write differently (the others change by the summed
#: gradients only, and stay equal).
_LOCAL_GROUPS = ("non_trainable_variables", "metrics_variables")

#: The group of what a step that assigns touches beside the model's state. What the replicas write
#: to it is combined when the step returns.
OTHERS = "other_variables"

#: For which updates averaging is exact, where a step assigns variables and where it returns them.
_EXACT_IF_ASSIGNED = (
    "what is the same on all replicas. A replica's gradients are its part of the global gradient: "
    'sum them before, by tf.distribute.get_replica_context().all_reduce("SUM", gradients).'
)
_EXACT_IF_RETURNED = (
    "an update that is linear in the gradients. Use self.optimizer.stateless_apply for others."
)

#: The states of metrics that are neither sums nor extremes.
_warned_of: weakref.WeakSet[Cell] = weakref.WeakSet()

#: How replicas combine the states of metrics that are no sums.
_EXTREMES = {Update.MAX: "MAX", Update.MIN: "MIN"}

#: Where a step's results have the metrics of all replicas, if they have them.
METRICS_OF_ALL = "metrics of all replicas"


@dataclasses.dataclass
class _Program:
    """A step compiled for one structure of batch.

    Attributes:
        shares: How the batch is divided.
        execute: Maps the overwritten state, the other state and the batch to the results and the
            new state, with what `update` needs after it. Of grouped steps the batches are stacked,
            and their number comes last.
        donated: The indices, in the flat state, of the state that is overwritten.
        kept: Those of the rest of the state that replicas look at.
        returned: Those of the state that is returned.
        group_size: How many steps one execution can run.
        layouts: What it relies on of the cells of the state; see `CompiledStep._layouts`.
        layout_changes: `Cell.layout_changes` when they were compared last.
        bytes_sent: What a replica sends in a step, by the step's collectives.
        update: Computes further new state, at home.
        may_fail: Whether a function of the host that it calls may raise while it runs. It leaves
            the state alone, which is kept until it has ended.
        stacked: Where batches of grouped steps wait.
    """

    shares: Shares
    execute: Executable
    donated: list[int]
    kept: list[int]
    returned: list[int]
    group_size: int
    layouts: list[tuple[Layout, str | None]]
    layout_changes: int
    bytes_sent: float
    update: HomeUpdate[int] | None = None
    may_fail: bool = False
    stacked: list[np.ndarray] = dataclasses.field(default_factory=list)

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
        metrics: The metrics of all replicas after it, if the step tells them.
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
        self._assigns = isinstance(step, StatefulStep)
        self._groups = [group for group, members in cells.items() for _ in members]
        self._cells = [cell for members in cells.values() for cell in members]
        self._sizes = [len(members) for members in cells.values()]
        #: Whether the step trains the model.
        self.trains = "optimizer_variables" in cells
        self._returns_examples = returns_examples
        #: Called with the number of steps that were launched together, and the new state.
        self.on_launch: Callable[[int, list[jax.Array]], None] | None = None
        #: Whether the steps' results have the metrics of all replicas. Combining them takes all
        #: processes, who need not look at the same logs.
        has_others = strategy.placement.spans_processes or strategy.placement.is_elastic
        self._tells_metrics = has_others and not returns_examples
        self._is_eager = model.run_eagerly and strategy.num_replicas_in_sync == 1
        #: Those that may wait and those that may not have entries of their own.
        self._programs: RecentlyUsed[Any, _Program] = RecentlyUsed(2 * MOST_PROGRAMS)
        self._alone: dict[Any, Callable[..., Any]] = {}
        self._compilations = 0
        self._waiting: tuple[_Program, int] | None = None
        #: The batches that wait, and those of executions that may not have taken effect: in a
        #: group of workers that may change.
        self._waiting_batches: list[Any] = []
        self._arriving: list[Any] = []
        self._launched: collections.deque[_Launched] = collections.deque()
        #: What the metrics' variables were over all replicas after the last step that is known to
        #: have taken effect; None: as the state says.
        self.known_metrics: list[Any] | None = None
        self._results: Any = {}
        #: The names of the logs that are results of metrics; known after the first step.
        self.metric_names: list[str] = []
        #: What a replica has sent in the latest step, in bytes.
        self.bytes_sent = 0.0
        #: The names of all logs.
        self.log_names: list[str] = []

    @property
    def num_cells(self) -> int:
        """How many arrays its state has."""
        return len(self._cells)

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
        leaves = [_as_array(leaf) for leaf in leaves]
        if self._is_eager:
            self._execute_eagerly(state, structure, leaves)
            return count_examples(leaves)
        placement = self._strategy.placement
        if self._strategy.group is not None:
            self._arriving = [batch]
        # Steps that run together are one operation, in which nothing could be found.
        may_wait = may_wait and not numerics.are_checked()
        program = self._program_for(structure, leaves, state, may_wait)
        with signals_held:
            if program.group_size > 1:
                self._wait(program, leaves, state, batch)
            else:
                self.finish(state)
                if not program.shares.are_even:
                    local = placement.local_replicas
                    leaves = [program.shares.pad(np.asarray(leaf), local) for leaf in leaves]
                placed = placement.divide(leaves)
                self._arriving = []
                self._note([batch])
                self._execute(program, state, placed)
        return program.shares.examples

    def _program_for(
        self, structure: Any, leaves: list[Any], state: list[jax.Array], may_wait: bool
    ) -> _Program:
        """Returns the program for batches like this one; a new one is compiled when it is run."""
        key = self._key(structure, leaves, may_wait)
        program = self._programs.get(key)
        if program is None or not self._has_layouts_of(program):
            self.finish(state)
            program = self._made(key, structure, leaves, state)
        return program

    def _key(self, structure: Any, leaves: list[Any], may_wait: bool) -> tuple[Any, ...]:
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        proportions = self._strategy.replica_shares.proportions
        num_replicas = self._strategy.placement.num_replicas
        options = self._strategy.communication_options
        return may_wait, structure, shapes, proportions, num_replicas, options

    def _made(
        self, key: tuple[Any, ...], structure: Any, leaves: list[Any], state: list[jax.Array]
    ) -> _Program:
        may_wait, *others = key
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
        leaves = [_as_array(leaf) for leaf in leaves]
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
            [of_state[index] for index in program.kept],
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
        """Lets the next step be compiled anew; none waits."""
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
            placed = self._strategy.placement.spread(program.stacked)
            # The device may go on reading the host's buffers: the next group gets new ones.
            program.stacked = []
            batches, self._waiting_batches = self._waiting_batches, []
            self._note(batches)
            self._execute(program, state, placed, np.int32(count))

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
        """Takes note of what another worker's last step has told of the metrics of all."""
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
        local = self._strategy.placement.local_replicas
        if not program.stacked:
            program.stacked = [
                np.empty(program.shape_of_group(leaf, len(local)), leaf.dtype) for leaf in leaves
            ]
        shares = program.shares
        for buffer, leaf in zip(program.stacked, leaves, strict=True):
            of_replicas = shares.pad(leaf, local).reshape(shares.num_replicas, *buffer.shape[2:])
            buffer[:, position] = of_replicas[local[0] : local[-1] + 1]
        self._waiting = (program, position + 1)
        if self._strategy.group is not None:
            self._waiting_batches.append(batch)
            self._arriving = []
        if position + 1 == program.group_size:
            self.finish(state)

    def _execute(
        self, program: _Program, state: list[jax.Array], batch: list[jax.Array], *count: Any
    ) -> None:
        lend = self._strategy.placement.lend
        donated = lend([state[index] for index in program.donated])
        kept = lend([state[index] for index in program.kept])
        try:
            with errors_of_callbacks() if program.may_fail else contextlib.nullcontext():
                results, new = program.execute(donated, kept, batch, *count)
                if program.may_fail:
                    jax.block_until_ready((results, new))
            self._results = results
        except ProgramPlanned as planned:
            planned.state = self._bytes_on_each_device(state)
            planned.examples = program.shares.examples
            raise
        self.bytes_sent = program.bytes_sent
        if self._launched and self._tells_metrics:
            self._launched[-1].metrics = self._results[METRICS_OF_ALL]
        for index, array in zip(program.returned, new, strict=program.update is None):
            state[index] = self._cells[index].keep(array)
        update = program.update
        if update is not None:
            taken, read = [[state[i] for i in names] for names in (update.taken, update.read)]
            new = update(new[len(program.returned) :], taken, read)
            for index, array in zip(update.written, new, strict=True):
                state[index] = array
        if self.on_launch is not None:
            self.on_launch(int(count[0]) if count else 1, state)
        if not self._returns_examples:
            return
        if self._strategy.placement.spans_processes:
            self._results = jax.tree.map(self._strategy.placement.whole, self._results)
        if not program.shares.are_even:
            self._results = self._gather(self._results, program.shares)

    def _bytes_on_each_device(self, state: list[jax.Array]) -> dict[str, int]:
        """Returns what the groups of the state take."""
        sizes = dict.fromkeys(self._groups, 0)
        for group, array in zip(self._groups, state, strict=True):
            of_device = math.prod(array.sharding.shard_shape(array.shape))
            sizes[group] += of_device * array.dtype.itemsize
        return sizes

    def _execute_eagerly(self, state: list[jax.Array], structure: Any, leaves: list[Any]) -> None:
        """Runs the step in Python, operation by operation, on the only replica."""
        is_local = [cell.layout is Layout.LOCAL for cell in self._cells]
        lent = self._strategy.placement.lend(state)
        values = [x[0] if local else x for x, local in zip(lent, is_local, strict=True)]
        self._results, new = self._step(
            self._regroup(values), jax.tree.unflatten(structure, map(jnp.asarray, leaves))
        )
        if not self._returns_examples:
            before = self._regroup(values)[-1]
            self._results = self._name_logs(_flat_logs(self._results), before, new[-1])
        flat = [value for group in new for value in group]
        for index, (cell, local) in enumerate(zip(self._cells, is_local, strict=True)):
            sharding = cell.placement.per_replica if local else cell.placement.mirrored
            value = jax.device_put(flat[index][None] if local else flat[index], sharding)
            flat[index] = cell.keep(value)
        state[:] = flat  # at once: a signal handler may raise between any two calls
        if self.on_launch is not None:
            self.on_launch(1, state)

    def _regroup(self, flat: Sequence[Any]) -> tuple[list[Any], ...]:
        groups = []
        start = 0
        for size in self._sizes:
            groups.append(list(flat[start : start + size]))
            start += size
        return tuple(groups)

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
        leaves = [_as_array(leaf)[:count] for leaf in leaves]
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (structure, shapes, tuple(cell.layout for cell in self._cells))
        if key not in self._alone:
            placement = self._strategy.placement
            shares = Shares(count * placement.num_replicas, placement.num_replicas)
            trace, _ = self._trace(count, shares, structure, leaves, state, set())
            of_trace = alone(trace)

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
        self, structure: Any, leaves: list[Any], state: list[jax.Array], may_wait: bool
    ) -> _Program:
        placement = self._strategy.placement
        proportions = self._strategy.replica_shares.proportions
        shares = Shares(count_examples(leaves), placement.num_replicas, proportions)
        classes = list(dict.fromkeys(shares.counts))
        diverging: set[int] = set()

        def trace_all() -> list[tuple[ClosedJaxpr, Any]]:
            return [
                self._trace(count, shares, structure, leaves, state, diverging) for count in classes
            ]

        traces = trace_all()
        if self._combine_extremes(traces, state):
            traces = trace_all()
        written = sorted(set().union(*(_written(trace, len(state)) for trace, _ in traces)))
        for index in written:
            if self._groups[index] in _LOCAL_GROUPS or index in diverging:
                self._localize(index, state)
        may_fail = any(calls_host(trace.jaxpr) for trace, _ in traces)
        update = None
        if not may_fail:
            traces, update = self._with_update_at_home(traces, written)
        of_a_group = traces[0][0]
        is_lowered = placement.platform == "cpu" and not any(
            has_shard_map(trace.jaxpr) for trace, _ in traces
        )
        if is_lowered:
            traces = [(lowered_trace(trace), tree) for trace, tree in traces]
        cells = self._cells
        returned = list(range(len(cells)))
        if update is not None:
            written = [index for index in written if index not in update.written]
            returned = [index for index in returned if index not in update.written]
        looked_at = set(written).union(*(_read(*trace, len(cells)) for trace in traces))
        # The logs hold on to a step's metrics until somebody looks; the rest is overwritten.
        donated = [i for i in written if self._groups[i] != "metrics_variables"]
        kept = sorted(looked_at.difference(donated))

        def body(
            position: int, donated_state: list[Any], kept_state: list[Any], batch: list[Any]
        ) -> tuple[Any, list[Any]]:
            """Runs the step of a replica of the class at `position`."""
            trace, result_tree = traces[position]
            inputs: list[Any] = [None] * len(cells)
            pieces = zip([*donated, *kept], [*donated_state, *kept_state], strict=True)
            for index, piece in pieces:
                inputs[index] = _enter(cells[index], piece)
            rows = max(classes[position], 1)
            outputs = jaxpr_as_fun(trace)(*inputs, *(leaf[:rows] for leaf in batch))
            num_results = result_tree.num_leaves
            results = jax.tree.unflatten(result_tree, outputs[:num_results])
            end = num_results + len(returned)
            new = dict(zip(returned, outputs[num_results:end], strict=True))
            return results, [*(_leave(cells[i], new[i]) for i in written), *outputs[end:]]

        def program(donated_state: list, kept_state: list, batch: list) -> tuple[Any, list]:
            bodies = [functools.partial(body, position) for position in range(len(classes))]
            of_replica = [classes.index(count) for count in shares.counts]
            return run_in_lockstep(bodies, of_replica)(donated_state, kept_state, batch)

        if placement.platform == "cpu" and not is_lowered:
            program = lower_for_cpu(program)
        place_of = {index: (0, place) for place, index in enumerate(donated)}
        place_of |= {index: (1, place) for place, index in enumerate(kept)}

        def unchanged(args: Sequence[Any], outputs: tuple[Any, list]) -> tuple[Any, list]:
            """Returns the outputs of a step that leaves the state as it was."""
            before = [args[group][place] for group, place in map(place_of.__getitem__, written)]
            return outputs[0], before + outputs[1][len(written) :]

        group_size = 1
        # Batches of given shares are as many as even ones; other uneven ones end an epoch.
        repeats = shares.are_even or proportions is not None
        if may_wait and repeats and update is None and not may_fail:
            group_size = group_size_of(of_a_group, placement)
        if group_size > 1:
            program = grouped(program, donated, kept, written)
        batch_specs = [PER_REPLICA] if group_size == 1 else [PER_REPLICA, MIRRORED]
        execute = compile_replicas(
            placement,
            program,
            in_specs=(
                [cell_spec(cells[i]) for i in donated],
                [cell_spec(cells[i]) for i in kept],
                *batch_specs,
            ),
            out_specs=(
                PER_REPLICA if self._returns_examples else MIRRORED,
                [
                    *(cell_spec(cells[i]) for i in written),
                    *(MIRRORED for _ in (update.crossing if update is not None else ())),
                ],
            ),
            donate=() if may_fail else (0,),
            unchanged=unchanged if group_size == 1 else StepsInALoop(),
            name=f"{getattr(self._step, '__name__', 'a step')} of model {self._model.name!r}",
        )
        return _Program(
            shares,
            execute,
            donated,
            kept,
            written,
            group_size,
            layouts=self._layouts(),
            layout_changes=Cell.layout_changes,
            bytes_sent=bytes_in(of_a_group.jaxpr, placement.num_replicas),
            update=update,
            may_fail=may_fail,
        )

    def _with_update_at_home(
        self, traces: list[tuple[ClosedJaxpr, Any]], written: Sequence[int]
    ) -> tuple[list[tuple[ClosedJaxpr, Any]], HomeUpdate[int] | None]:
        """Divides off what can be updated at home, where variables have their one copy.

        It is the first replica's: that of all others is the same.
        """
        placement = self._strategy.placement
        if placement.home is None:
            return traces, None
        mirrored = {i for i, cell in enumerate(self._cells) if cell.layout is Layout.MIRRORED}
        # The logs hold on to a step's metrics.
        updated = [i for i in written if i in mirrored and self._groups[i] != "metrics_variables"]
        splits = []
        for trace, tree in traces:
            for_home = {tree.num_leaves + index for index in updated}
            splits.append(split_off_update(trace, at_home=mirrored, arriving=(), for_home=for_home))
        first = splits[0]
        if not first.outputs or any(
            (split.outputs, split.crossing) != (first.outputs, first.crossing) for split in splits
        ):
            return traces, None
        num_results = traces[0][1].num_leaves
        states = range(len(self._cells))
        update = HomeUpdate(placement, first, states, [*range(-num_results, 0), *states])
        # What it is to see as it was before must not be overwritten by the replicas.
        if not set(written).difference(update.written).isdisjoint(update.read):
            return traces, None
        return [(s.replica, tree) for s, (_, tree) in zip(splits, traces, strict=True)], update

    def _layouts(self) -> list[tuple[Layout, str | None]]:
        """Returns what a program relies on of the cells."""
        return [(cell.layout, cell.extreme) for cell in self._cells]

    def _has_layouts_of(self, program: _Program) -> bool:
        """Whether the state still has the layouts for which `program` was compiled."""
        if program.layout_changes == Cell.layout_changes:
            return True
        if self._layouts() != program.layouts:
            return False
        program.layout_changes = Cell.layout_changes
        return True

    def _trace(
        self,
        count: int,
        shares: Shares,
        structure: Any,
        leaves: list[Any],
        flat: list[Any],
        diverging: set[int],
    ) -> tuple[ClosedJaxpr, Any]:
        """Traces the step of a replica that gets `count` examples.

        Returns its jaxpr (of the flat state and batch) and the structure of its results. The
        indices of other variables whose copies it leaves different are added to `diverging`.
        """
        share = count / shares.examples
        trees = []

        def local(*args: Any) -> list[Any]:
            batch = args[len(flat) :]
            with (
                replica_of_step(self._model, self._strategy, share, self._assigns),
                values_known_equal() as equal,
                whole_state(self._cells, args[: len(flat)]) as state,
            ):
                if not self.trains:
                    state = self._united(state)
                results, new = self._step(
                    self._regroup(state), jax.tree.unflatten(structure, batch)
                )
                if isinstance(self._step, StatefulStep):
                    equal += self._step.equal_values
                    diverging.update(map(self._cells.index, self._step.diverging))
                new_flat = [value for group in new for value in group]
                if not self._returns_examples:
                    before = self._regroup(state)[-1]
                    results = self._global_logs(_flat_logs(results), before, new[-1], share)
                new_flat = [
                    old if value is seen else value
                    for old, seen, value in zip(args, state, new_flat, strict=False)
                ]
                new_flat = self._with_equal_updates(args, new_flat, equal, share)
                new_flat = own_state(self._cells, args, new_flat)
            combining = self._combining(args, new_flat)
            statistics = self._statistics(args, new_flat) if 0 in shares.counts else []
            if count == 0:
                results, new_flat = self._without_example(results, args, new_flat)
            if shares.proportions is not None and statistics:
                self._share_statistics(new_flat, statistics, shares, has_examples=count > 0)
            new_flat = self._combine_writes(combining, new_flat)
            new_flat = [
                value if cell.extreme is None else all_reduce(cell.extreme, value)
                for cell, value in zip(self._cells, new_flat, strict=True)
            ]
            if self._tells_metrics:
                results = {**results, METRICS_OF_ALL: self._metrics_of_all(new_flat)}
            results, tree = jax.tree.flatten(results)
            trees.append(tree)
            return [*results, *new_flat]

        avals = [_replica_aval(c, a) for c, a in zip(self._cells, flat, strict=True)]
        rows = max(count, 1)
        avals += [jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in leaves]
        axis_env = [(REPLICA_AXIS, shares.num_replicas)]
        with self._strategy.placement.tracing():
            try:
                trace = jax.make_jaxpr(local, axis_env=axis_env)(*avals)
            except (TypeError, ValueError) as error:
                note_share(error, [x.shape for x in leaves], rows, shares)
                raise
        return trace, trees[0]

    def _name_logs(self, logs: Any, before: list[Any], metrics: list[Any]) -> dict[str, Any]:
        """Sorts the names of the logs, and returns those logs that no metric tells."""
        variables = self._model.metrics_variables
        with keras.StatelessScope(state_mapping=list(zip(variables, metrics, strict=True))):
            results = self._model.get_metrics_result()
            silent = self._silent_metrics(before, metrics)
        self.log_names = list(logs)
        self.metric_names = [name for name in logs if name in results and name not in silent]
        return {name: value for name, value in logs.items() if name not in self.metric_names}

    def _silent_metrics(self, before: list[Any], after: list[Any]) -> set[str]:
        """Returns the names under which metrics speak that the step did not update.

        A step of the user's may log something else under such a name: a `loss` of its own.
        """
        names: set[str] = set()
        updated = iter([new is not old for old, new in zip(before, after, strict=True)])
        for metric in self._model.metrics:
            changed = [next(updated) for _ in metric.variables]
            if not any(changed):
                result = metric.result()
                names.update(result if isinstance(result, dict) else [metric.name])
        return names

    def _global_logs(
        self, logs: Any, before: list[Any], metrics: list[Any], share: float
    ) -> dict[str, Any]:
        """Leaves to `StepLogs` what metrics tell, and averages the rest over the examples."""
        other = self._name_logs(logs, before, metrics)
        weighted = jax.tree.map(
            lambda value: jnp.asarray(value) * share if share else jnp.zeros_like(value), other
        )
        return all_reduce("SUM", weighted) if other else {}

    def _without_example(
        self, results: Any, state: Sequence[Any], new: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Undoes what a replica without examples computed from the row of zeros that it got.

        Its random streams go on: they stay in step with those of the other replicas.
        """
        if self._returns_examples:
            results = jax.tree.map(lambda rows: rows[:0], results)
        keep = [
            group in _LOCAL_GROUPS and cell.layout is not Layout.STREAM
            for group, cell in zip(self._groups, self._cells, strict=True)
        ]
        merged = zip(keep, state[: len(new)], new, strict=True)
        return results, [old if unchanged else value for unchanged, old, value in merged]

    def _statistics(self, before: Sequence[Any], after: Sequence[Any]) -> list[int]:
        """Returns which of the written variables are means over the replicas' examples."""
        return [
            index
            for index, (group, cell) in enumerate(zip(self._groups, self._cells, strict=True))
            if group == "non_trainable_variables"
            and after[index] is not before[index]
            and jnp.issubdtype(after[index].dtype, jnp.inexact)
            and cell.aggregation is not VariableAggregation.SUM
        ]

    def _share_statistics(
        self, state: list[Any], statistics: list[int], shares: Shares, has_examples: bool
    ) -> None:
        """Gives a replica without examples the mean of the others' statistics.

        It may never get any, and its statistics, the initial ones, would count for ever.
        """
        own = [state[index] for index in statistics]
        sums = all_reduce_packed(own if has_examples else [jnp.zeros_like(x) for x in own])
        if not has_examples:
            num_sharing = sum(count > 0 for count in shares.counts)
            for index, total in zip(statistics, sums, strict=True):
                state[index] = (total / num_sharing).astype(state[index].dtype)

    def _united(self, state: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns `state` with the means of copies that have diverged (moving statistics).

        Evaluation and prediction see what is read and saved, not each replica its own copy.
        """
        diverged = [
            index
            for index, cell in enumerate(self._cells)
            if cell.layout is Layout.LOCAL
            and not cell.is_on_read
            and cell.aggregation is VariableAggregation.MEAN
        ]
        united = list(state)
        sums = all_reduce_packed([state[index] for index in diverged])
        for index, total in zip(diverged, sums, strict=True):
            united[index] = total / self._strategy.num_replicas_in_sync
        return united

    def _with_equal_updates(
        self, before: Sequence[Any], after: list[Any], equal: list[Any], share: float
    ) -> list[Any]:
        """Returns `after` with equal weights on all replicas, whoever updated them.

        What an optimizer returns is equal already. The results of a step that changes weights in
        a way of its own are averaged by the examples (of integers, the first replica's are taken).
        """
        known = set(map(id, equal))
        own = [
            index
            for index, (group, value) in enumerate(zip(self._groups, after, strict=True))
            if group not in (*_LOCAL_GROUPS, OTHERS)
            and value is not before[index]
            and id(value) not in known
        ]
        if not own or self._strategy.num_replicas_in_sync == 1:
            return after
        logger.warning(
            "The step of model %r changes %d variables without its optimizer, by what each "
            "replica computed alone. The results are averaged over the replicas, weighted by "
            "examples: exact for %s",
            self._model.name,
            len(own),
            _EXACT_IF_ASSIGNED if self._assigns else _EXACT_IF_RETURNED,
        )
        is_first = lax.axis_index(REPLICA_AXIS) == 0

        def contribution(value: jax.Array) -> jax.Array:
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                return jnp.where(is_first, value, jnp.zeros_like(value))
            return jnp.zeros_like(value) if share == 0 else (value * share).astype(value.dtype)

        totals = all_reduce_packed([contribution(after[index]) for index in own])
        for index, total in zip(own, totals, strict=True):
            after[index] = total
        return after

    def _combining(self, before: Sequence[Any], after: Sequence[Any]) -> list[int]:
        """Returns which of the written variables have copies that stay equal (`ON_WRITE`)."""
        return [
            index
            for index, (group, cell) in enumerate(zip(self._groups, self._cells, strict=True))
            if group in _LOCAL_GROUPS
            and after[index] is not before[index]
            and combines_writes(cell)
        ]

    def _combine_writes(self, combining: list[int], values: Sequence[Any]) -> list[Any]:
        """Returns `values` with what all replicas wrote to the `combining` variables."""
        cells = [self._cells[index] for index in combining]
        combined = combine_writes(cells, [values[index] for index in combining])
        everything = list(values)
        for index, value in zip(combining, combined, strict=True):
            everything[index] = value
        return everything

    def _combine_extremes(
        self, traces: list[tuple[ClosedJaxpr, Any]], state: list[jax.Array]
    ) -> bool:
        """Has steps combine the states of metrics that are maxima or minima, not sums.

        Warns of those that are neither. Returns whether the step has to be traced again.
        """
        if self._strategy.num_replicas_in_sync == 1:
            return False
        sums = [
            index
            for index, (group, cell) in enumerate(zip(self._groups, self._cells, strict=True))
            if group == "metrics_variables"
            and cell.is_on_read
            and cell.reading_aggregation is VariableAggregation.SUM
        ]
        found: dict[int, set[Update]] = {index: set() for index in sums}
        for trace, tree in traces:
            outputs = {index: tree.num_leaves + index for index in sums}
            for index, update in updates_of(trace.jaxpr, outputs).items():
                found[index].add(update)
        extremes = False
        for index, updates in found.items():
            updates -= {Update.NONE}
            (update,) = updates if len(updates) == 1 else (Update.OTHER,)
            if update in _EXTREMES:
                extremes = True
                with self._returned(index, state):
                    self._cells[index].keep_equal_by(_EXTREMES[update])
            elif not updates <= {Update.SUM} and self._cells[index] not in _warned_of:
                _warned_of.add(self._cells[index])
                logger.warning(
                    "A metric updates its state %r in another way than by adding to it, or by a "
                    "maximum or minimum. Its result on %d replicas is not that of one device: the "
                    "replicas' states are added up. Write the update as a sum (state.assign_add), "
                    "or create the state with add_variable(..., aggregation='mean').",
                    self._cells[index].name,
                    self._strategy.num_replicas_in_sync,
                )
        return extremes

    def _metrics_of_all(self, state: Sequence[Any]) -> list[Any]:
        """Returns the values of the metrics' variables, combined over the replicas."""
        pairs = zip(self._cells, self._groups, state, strict=True)
        return [
            seen_from_outside(cell, value)
            for cell, group, value in pairs
            if group == "metrics_variables"
        ]

    def _localize(self, index: int, flat: list[Any]) -> None:
        """Gives the replicas copies of their own of the state that they write differently."""
        cell = self._cells[index]
        if combines_writes(cell):
            return
        if cell.layout is Layout.MIRRORED:
            with self._returned(index, flat):
                cell.localize()

    @contextlib.contextmanager
    def _returned(self, index: int, state: list[jax.Array]) -> Iterator[None]:
        """Inside, a cell of which the step has the array has it itself, and may change its form."""
        cell = self._cells[index]
        with signals_held:
            borrower = cell.borrower
            cell.put(state[index])
            yield
            state[index] = cell.take()
            if borrower is not None:
                cell.lend(borrower)


def _flat_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs in which a metric of several results has an entry for each, as Keras shows."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


@contextlib.contextmanager
def replica_of_step(
    model: keras.Model, strategy: Strategy, share: float, assigns: bool
) -> Iterator[None]:
    """Inside, the thread is a replica of `strategy` that runs a step of `model`.

    Args:
        model: A compiled model.
        strategy: Its strategy.
        share: The replica's share of the global batch's examples.
        assigns: Whether the step assigns variables, as `train_step(self, data)` does.
    """
    optimizer = getattr(model, "optimizer", None)
    scaled_by = ScaledBy.LOSSES if assigns else scaled_in_keras_steps(optimizer)
    with (
        strategy.replica_context(),
        replica_share(share, scaled_by),
        with_global_reductions(model, share),
    ):
        yield


def _written(trace: ClosedJaxpr, state_size: int) -> set[int]:
    """Returns the indices of the state that the traced step changes."""
    inputs = trace.jaxpr.invars[:state_size]
    outputs = trace.jaxpr.outvars[len(trace.jaxpr.outvars) - state_size :]
    return {index for index in range(state_size) if outputs[index] is not inputs[index]}


def _read(trace: ClosedJaxpr, result_tree: Any, state_size: int) -> set[int]:
    """Returns the indices of the state that the traced step looks at."""
    jaxpr = trace.jaxpr
    results = jaxpr.outvars[: result_tree.num_leaves]
    atoms = [*results, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
    used = set(map(id, atoms))
    return {index for index in range(state_size) if id(jaxpr.invars[index]) in used}


def _replica_aval(cell: Cell, stored: jax.Array) -> jax.ShapeDtypeStruct:
    shape = stored.shape
    if cell.layout is Layout.LOCAL:
        shape = shape[1:]
    elif cell.layout is Layout.SHARDED:
        axis = cell.divided_axis
        size = shape[axis] // cell.placement.num_replicas
        shape = (*shape[:axis], size, *shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, stored.dtype)


def _enter(cell: Cell, stored: jax.Array) -> jax.Array:
    # Of sharded state, a traced step takes and returns the replica's part.
    return stored if cell.layout is Layout.SHARDED else enter_replica(cell, stored)


def _leave(cell: Cell, value: jax.Array) -> jax.Array:
    return value if cell.layout is Layout.SHARDED else leave_replica(cell, value)


def _as_array(leaf: Any) -> Any:
    array = leaf if isinstance(leaf, np.ndarray | jax.Array) else np.asarray(leaf)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return array if array.dtype == dtype else array.astype(dtype)
