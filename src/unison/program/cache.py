"""`ProgramCache`: finds a function's variables, compiles once per signature, and runs programs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from unison.cells import Cell, Layout, unfinished_steps
from unison.collectives.communication import CommunicationOptions
from unison.collectives.presence import Presence, from_the_first_operation
from unison.collectives.uneven import GatherSizes, SizeWanted
from unison.conversion import called
from unison.eager_fallback import needs_python
from unison.interrupts import is_of_a_signal_handler, signals_held
from unison.jaxprs import calls_host
from unison.lifting import Lift, current_lift, enter_replica, leave_replica
from unison.lockstep import ByClass, LockstepError, operations_that_differ, run_in_lockstep
from unison.lowering.flops import count_flops
from unison.program import numerics
from unison.program.arguments import (
    INSIDE_A_TRANSFORMATION,
    Arguments,
    Static,
    Whole,
    classes_of,
    describe,
)
from unison.program.building import CellForms, NamedTrace, lower_traces, split_update_at_home
from unison.program.central_storage import HomeUpdate, SplitTrace
from unison.program.compiling import (
    MIRRORED,
    PER_REPLICA,
    Executable,
    cell_spec,
    compile_replicas,
)
from unison.program.control_flow import (
    VALUE_WANTED,
    converted,
    converted_if_needed,
    raising_caught,
)
from unison.program.host_errors import HostCalls
from unison.program.identity import Calling, identity
from unison.program.recently_used import MOST_PROGRAMS, RecentlyUsed
from unison.program.single_replica import alone, compile_alone, enter_alone, piece_on
from unison.program.smaller_group import described_for, shapes_of
from unison.program.tracing import called_on, trace_over_cells, used_cells
from unison.runtime.elastic import ElasticPlacement
from unison.runtime.launches import LAUNCH_LOCK
from unison.runtime.placement import Placement
from unison.runtime.private_jax import evaluated_as_traced
from unison.runtime.replica_function import ReplicaFunction
from unison.values import PerReplica

logger = logging.getLogger("unison")

#: The number of first runs of a program that may do more than call JAX's compiled code: one
#: compiles it, and one has the first one's results as arguments, whose placement differs from that
#: of the variables' initial values.
_SLOW_RUNS = 2

#: The number of traces of a function at which a warning is logged.
_RETRACES_TO_WARN = 8


@dataclasses.dataclass
class _Trace:
    """A function as traced for the replicas of one class.

    Attributes:
        jaxpr: Maps the values of `cells` and the arguments, on one replica, to the leaves of the
            result, the new values of `written` and what the update at home needs.
        cells: The cells whose values it uses; None for an input that it does not use.
        structure: The structure of the result.
        written: The cells that it wrote, in order.
        diverging: The mirrored cells whose copies may now differ.
        crossing: Shapes and dtypes of what the update at home needs.
    """

    jaxpr: ClosedJaxpr
    cells: list[Cell | None]
    structure: Any
    written: list[Cell]
    diverging: list[Cell]
    crossing: list[tuple[tuple[int, ...], Any]] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of leaves of the result."""
        return self.structure.num_leaves

    def __call__(
        self, values: dict[Cell, jax.Array], leaves: list[jax.Array]
    ) -> tuple[list[jax.Array], dict[Cell, jax.Array], list[jax.Array]]:
        """Returns the leaves of the result, the new values of the written cells, and what the
        update at home needs.
        """
        inputs = [0 if cell is None else values[cell] for cell in self.cells]
        outputs = [
            # For a constant, the jaxpr may return a plain number.
            output if isinstance(output, jax.Array) else jnp.asarray(output, aval.dtype)
            for output, aval in zip(
                evaluated_as_traced(self.jaxpr, [*inputs, *leaves]),
                self.jaxpr.out_avals,
                strict=True,
            )
        ]
        end = self.count + len(self.written)
        new = dict(zip(self.written, outputs[self.count : end], strict=True))
        return outputs[: self.count], new, outputs[end:]

    def replica_part(self, split: SplitTrace) -> _Trace:
        """Returns the part of this trace that replicas compute, given the split."""
        written = [self.written[i - self.count] for i in split.remaining[self.count :]]
        return dataclasses.replace(
            self,
            jaxpr=split.replica,
            cells=used_cells(split.replica, self.cells),
            written=written,
            crossing=split.crossing,
        )


@dataclasses.dataclass
class _Program:
    """A compiled program, the cells it lifts, and how its results are put together.

    Attributes:
        read: The cells that are only read.
        written: The cells that are overwritten.
        execute: Maps the stored arrays of `written` and `read`, and the arguments, to the
            results, the new stored arrays of `written` and what `update` needs.
        structure: The structure of the function's result.
        results: Where the leaves of the result are; known once the program has been executed.
        update: Updates further cells, at home.
        runs: The number of runs.
        taken: The arrays that an unfinished run has taken from `written`.
        returned: The results that XLA has returned in that run: at most one element.
        host_calls: Its host callbacks, if it has any, which may raise while it runs. Then it does
            not overwrite the old values, which are kept until it has ended.
        operations: The floating-point operations of a replica's products.
        forms: The forms of `cells` when it was compiled.
    """

    read: list[Cell]
    written: list[Cell]
    execute: Executable
    structure: Any
    results: _Results
    update: HomeUpdate[Cell] | None = None
    runs: int = 0
    taken: list[jax.Array] = dataclasses.field(default_factory=list)
    returned: list[Any] = dataclasses.field(default_factory=list)
    host_calls: HostCalls | None = None
    operations: int = 0
    forms: CellForms = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        cells = self.cells
        self.forms = CellForms(lambda: [cell.form for cell in cells])

    def give_back(self) -> None:
        """Ends a run that was interrupted: puts the arrays that XLA has returned into the cells."""
        if self.returned:
            _, new_values, _ = self.returned[0]
            for cell, old, new in zip(self.written, self.taken, new_values, strict=True):
                cell.exchange(old, new)
        unfinished_steps.clear()
        self.taken, self.returned = [], []

    @property
    def cells(self) -> list[Cell]:
        """All cells that are read or written."""
        update = self.update
        at_home = [] if update is None else [*update.read, *update.written]
        return [*self.read, *self.written, *at_home]


@dataclasses.dataclass
class _Results:
    """The positions of the leaves of a program's result among its outputs."""

    #: For every leaf and replica, the index of the output that holds the value.
    holders: list[tuple[int, ...]] = dataclasses.field(default_factory=list)


class ProgramCache:
    """Traces, compiles, caches and runs the functions given to `strategy.run`.

    It is thread-safe: threads compile one after the other, and the programs that they launch access
    the variables as if run one after the other.

    Args:
        placement: The replicas' devices.
        replica_context: Creates the context manager in which functions are traced.
        capacity: The maximum number of compiled programs; the least recently used one is evicted
            first.
        communication: Returns the current communication options, which are part of the key of a
            program.
    """

    def __init__(
        self,
        placement: Placement,
        replica_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        capacity: int = MOST_PROGRAMS,
        communication: Callable[[], CommunicationOptions] = CommunicationOptions,
    ):
        #: The replicas' devices.
        self.placement = placement
        self._replica_context = replica_context
        self._communication = communication
        self._programs: RecentlyUsed[Any, _Program] = RecentlyUsed(capacity)
        self._retraces: collections.Counter[Any] = collections.Counter()
        #: The number of programs traced so far; it does not change in a steady state.
        self.trace_count = 0
        #: The floating-point operations of a replica's products in the latest run.
        self.operations = 0

    def __len__(self) -> int:
        return len(self._programs)

    def __call__(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if current_lift() is not None:
            needs_python("strategy.run()")
            raise RuntimeError(
                "strategy.run() cannot be called inside a function that strategy.run is tracing, "
                "not even in merge_call: the replicas run already. Call the function itself."
            )
        return self.call(function, Arguments.of(args, kwargs, self.placement, describe))

    def call(
        self, function: Callable[..., Any], arguments: Arguments, may_create: bool = True
    ) -> Any:
        """Runs `function` on `arguments`.

        Args:
            function: What every replica computes.
            arguments: Those of every replica.
            may_create: Whether tracing the function may create variables.
        """
        key = self._key(function, arguments)
        # The lock guards the cache, and keeps two programs from taking the same arrays.
        with LAUNCH_LOCK:
            program = self._programs.get(key)
            if program is None or not program.forms.hold():
                program = self._compile(function, arguments, may_create)
                self._programs.keep(key, program)
                self._warn_of_retracing(function)
            program.runs += 1
            if program.runs == 2 and isinstance(self.placement, ElasticPlacement):
                self._prepare_for_fewer(function, arguments, self.placement)
            outputs = self._execute(program, arguments.operands)
            self.operations = program.operations
        results = [self._result(outputs, holders) for holders in program.results.holders]
        return jax.tree.unflatten(program.structure, results)

    def _key(self, function: Callable[..., Any], arguments: Arguments) -> Any:
        made_for = self.placement.num_replicas, self._communication()
        return identity(function), arguments.structure, arguments.descriptions, *made_for

    def forget_other_communication(self) -> None:
        """Drops the programs compiled for communication options other than the current ones."""
        options = self._communication()
        with LAUNCH_LOCK:
            for key in [key for key in self._programs if key[-1] != options]:
                self._programs.remove(key)

    def _prepare_for_fewer(
        self, function: Callable[..., Any], arguments: Arguments, placement: ElasticPlacement
    ) -> None:
        """Traces a program for a group with one worker less, and compiles it in the background."""
        fewer = placement.num_without_a_worker
        described = described_for(fewer, arguments.descriptions, placement) if fewer else None
        if described is None:
            return
        expected = Arguments(arguments.structure, described, [])
        with placement.as_if_of(fewer):
            key = self._key(function, expected)
            if key in self._programs:
                return
            try:
                program = self._compile(function, expected, may_create=False)
            except Exception as error:
                if is_of_a_signal_handler(error):
                    raise
                # Any other is raised again if that group runs it.
                logger.debug("A program was not traced ahead.", exc_info=True)
                return
        self._programs.keep(key, program)
        placement.group.compile_ahead(
            functools.partial(
                program.execute.prepare,
                fewer,
                [_shape(cell.stored()) for cell in program.written],
                [
                    _shape(cell.stored()) if self._is_own(cell) else cell.aval
                    for cell in program.read
                ],
                shapes_of(described, len(placement.local_devices)),
            )
        )

    def shapes_of_result(self, function: Callable[..., Any], arguments: Arguments) -> Any:
        """Returns what `function` returns on the first replica, as `jax.ShapeDtypeStruct`s."""
        trace = self._trace_as_first(function, arguments)
        leaves = trace.jaxpr.out_avals[: trace.structure.num_leaves]
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in leaves]
        return jax.tree.unflatten(trace.structure, shapes)

    def parts_alone(
        self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> list[Callable[[], Any]]:
        """Returns, for each of this process's replicas, a call of `function` on it alone.

        Each call waits for its results. No variable is assigned; see
        `unison.program.single_replica`. The arguments must have the same shapes on all replicas.
        """
        arguments = Arguments.of(args, kwargs, self.placement, describe)
        trace = self._trace_as_first(function, arguments)
        cells = [cell for cell in trace.cells if cell is not None]
        kinds = [kind for kind in arguments.descriptions if not isinstance(kind, Static)]
        operands = [operand for operand in arguments.operands if operand is not None]
        of_trace = alone(trace.jaxpr)

        def part(replica: jax.Array, stored: list[jax.Array], own: list[Any]) -> list[Any]:
            values = dict(zip(cells, map(enter_alone, cells, stored), strict=True))
            inputs = [0 if cell is None else values[cell] for cell in trace.cells]
            leaves = [kind.of_replica(leaf, 0) for kind, leaf in zip(kinds, own, strict=True)]
            return of_trace(replica, *inputs, *leaves)

        run = compile_alone(self.placement, part)

        def part_on(device: jax.Device) -> Callable[[], Any]:
            stored = [piece_on(device, cell.stored()) for cell in cells]
            return functools.partial(run, device, stored, [piece_on(device, x) for x in operands])

        return [part_on(device) for device in self.placement.local_devices]

    def _execute(self, program: _Program, operands: list[Any]) -> list[jax.Array]:
        jitted = program.execute.jitted
        is_slow = program.host_calls is not None or program.runs <= _SLOW_RUNS
        is_at_home = program.update is not None or self.placement.home is not None
        if jitted is None or is_slow or is_at_home or numerics.are_checked():
            with signals_held:
                return self._execute_held(program, operands)
        donated: list[jax.Array] = []
        read_only: list[jax.Array] = []
        try:
            while True:
                if unfinished_steps:
                    unfinished_steps[-1].give_back()
                brought = [
                    None if self._is_own(cell) else self.placement.bring(cell.read())
                    for cell in program.read
                ]
                program.taken, program.returned = [], []
                unfinished_steps.append(program)
                read_only = [
                    cell.stored_for_step() if array is None else array
                    for cell, array in zip(program.read, brought, strict=True)
                ]
                donated = program.taken = [cell.take() for cell in program.written]
                returned = program.returned = []
                # Not by an assignment: after a call, Python may run a signal handler before it
                # assigns. When `extend` returns, it has stored the result of the call, and JAX's
                # call is not Python code, or holds signals. It is called only if no handler has
                # ended this step, by reading a variable or running a program: then the step begins
                # again.
                returned.extend(
                    map(jitted, compress((donated,), unfinished_steps), (read_only,), (operands,))
                )
                if returned:
                    break
            outputs, new_values, _ = returned[0]
            if isinstance(next(iter(new_values or outputs), None), jax.core.Tracer):
                returned.clear()
                raise RuntimeError(INSIDE_A_TRANSFORMATION)
            for cell, old, value in zip(program.written, donated, new_values, strict=True):
                cell.exchange(old, value)
            program.execute.held.release()
        except BaseException as error:
            program.give_back()
            program.execute.held.release()
            if isinstance(error, jax.errors.JaxRuntimeError):
                program.execute.explain(error, (donated, read_only, operands))
            raise
        unfinished_steps.clear()
        program.taken, program.returned = [], []
        self.placement.launched(outputs or new_values, are_kept=bool(outputs))
        return outputs

    def _execute_held(self, program: _Program, operands: list[Any]) -> list[jax.Array]:
        """Executes a program with signal handlers deferred: more Python code runs than the call."""
        read_only = self.placement.from_home([self._read_only(cell) for cell in program.read])
        donated = self.placement.from_home([cell.take() for cell in program.written])
        run = functools.partial(program.execute, donated, read_only, operands)
        calls = program.host_calls
        outputs, new_values, crossing = run() if calls is None else calls.run(run)
        if isinstance(next(iter(new_values or outputs), None), jax.core.Tracer):
            raise RuntimeError(INSIDE_A_TRANSFORMATION)
        for cell, value in zip(program.written, new_values, strict=True):
            cell.put(cell.to_home(value))
        update = program.update
        if update is not None:
            taken = [cell.take() for cell in update.taken]
            new_values = update(crossing, taken, [cell.stored() for cell in update.read])
            for cell, value in zip(update.written, new_values, strict=True):
                cell.put(value)
        return outputs

    def _read_only(self, cell: Cell) -> jax.Array:
        if self._is_own(cell):
            return cell.stored()
        return self.placement.bring(cell.read())

    def _result(self, outputs: list[jax.Array], holders: tuple[int, ...]) -> Any:
        if len(holders) == 1:
            return outputs[holders[0]].addressable_data(0)
        if len(set(holders)) == 1:
            return PerReplica.from_stacked(outputs[holders[0]], self.placement)
        slices = {holder: self.placement.slices(outputs[holder]) for holder in set(holders)}
        local = enumerate(self.placement.local_replicas)
        return PerReplica(
            [slices[holders[replica]][place] for place, replica in local],
            [outputs[holder].shape[1:] for holder in holders],
        )

    def _warn_of_retracing(self, function: Callable[..., Any]) -> None:
        if isinstance(function, Calling):
            function = function.function
        written = getattr(function, "python_function", function)
        made_for = getattr(written, "__code__", type(function)), self._communication()
        self._retraces[made_for] += 1
        if self._retraces[made_for] == _RETRACES_TO_WARN:
            logger.warning(
                "%s has been traced and compiled %d times. A new program is made for every new "
                "shape, dtype, string or Boolean among the arguments, and for every new object "
                "that the function closes over. Pass what changes from step to step as arrays or "
                "numbers, and keep the shapes.",
                getattr(function, "__qualname__", function),
                _RETRACES_TO_WARN,
            )

    # -- tracing ---------------------------------------------------------------------------

    def _compile(
        self, function: Callable[..., Any], arguments: Arguments, may_create: bool
    ) -> _Program:
        self.trace_count += 1
        placement = self.placement
        descriptions = arguments.descriptions
        class_of_replica, first_of_class = classes_of(descriptions, placement.num_replicas)

        def trace_classes() -> list[_Trace]:
            return self._trace_all(
                function, arguments, first_of_class, class_of_replica, may_create
            )

        try:
            traces = raising_caught(trace_classes)
        except VALUE_WANTED as error:
            of_each = self._trace_each(function, arguments, may_create)
            if of_each is None:
                traces = converted(trace_classes, error)
            else:
                traces = of_each
                class_of_replica = first_of_class = list(range(placement.num_replicas))
        structures = [trace.structure for trace in traces]
        if len(set(structures)) > 1:
            raise LockstepError(
                "The function must return the same structure on all replicas. Received: "
                f"{structures}"
            )
        for cell in _in_order(trace.diverging for trace in traces):
            cell.localize()
        jaxprs = [trace.jaxpr.jaxpr for trace in traces]
        calls = HostCalls(jaxprs, placement.devices) if any(map(calls_host, jaxprs)) else None
        update = None
        if calls is None:
            traces, update = self._with_update_at_home(traces, descriptions)
        operations = count_flops(traces[0].jaxpr.jaxpr)
        traces, lower = lower_traces(placement, traces)
        written = _in_order(trace.written for trace in traces)
        touched = _in_order(filter(None, trace.cells) for trace in traces)
        read = [cell for cell in touched if cell not in written]
        results = _Results()
        is_alone = placement.num_replicas == 1

        def body(
            position: int, donated: list, read_only: list, operands: list
        ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
            """Computes the part of a replica of the class at `position`."""
            pieces = zip([*written, *read], [*donated, *read_only], strict=True)
            values = {cell: self._enter(cell, piece) for cell, piece in pieces}
            leaves = [
                description.of_replica(operand, first_of_class[position])
                for description, operand in zip(descriptions, operands, strict=True)
                if not isinstance(description, Static)
            ]
            outputs, new, crossing = traces[position](values, leaves)
            stored = [leave_replica(cell, new.get(cell, values[cell])) for cell in written]
            return outputs, stored, crossing

        def program(donated: list, read_only: list, operands: list) -> tuple[list, list, list]:
            bodies = [functools.partial(body, position) for position in range(len(traces))]
            together = run_in_lockstep(bodies, class_of_replica)
            leaves, new, crossing = together(donated, read_only, operands)
            outputs: list[jax.Array] = []
            results.holders = []
            for leaf in leaves:
                arrays = leaf.arrays if isinstance(leaf, ByClass) else (leaf,)
                of_class = [len(outputs) + index % len(arrays) for index in range(len(traces))]
                results.holders.append(tuple(of_class[index] for index in class_of_replica))
                outputs.extend(arrays)
            if not outputs and not new:
                # In a program without outputs, XLA runs effects (such as printing) on only one
                # device.
                outputs.append(jnp.zeros((), bool))
            return [output if is_alone else output[None] for output in outputs], new, crossing

        part = ReplicaFunction(
            lower(program),
            in_specs=(
                [cell_spec(cell) for cell in written],
                [self._spec(cell) for cell in read],
                [description.spec for description in descriptions],
            ),
            out_specs=(
                MIRRORED if is_alone else PER_REPLICA,
                [cell_spec(cell) for cell in written],
                [MIRRORED for _ in traces[0].crossing],
            ),
            donate=(0,) if calls is None else (),
            unchanged=lambda args, outputs: (outputs[0], args[0], outputs[2]),
            name=f"run of {getattr(function, '__name__', function)}",
            number=0 if calls is None else calls.number,
        )
        execute = compile_replicas(placement, part, self._communication())
        return _Program(
            read,
            written,
            execute,
            structures[0],
            results,
            update,
            host_calls=calls,
            operations=operations,
        )

    def _with_update_at_home(
        self, traces: list[_Trace], descriptions: Sequence[Any]
    ) -> tuple[list[_Trace], HomeUpdate[Cell] | None]:
        """Splits off the update that can be computed at home; see `split_update_at_home`."""
        operands = [d for d in descriptions if not isinstance(d, Static)]
        written = _in_order(trace.written for trace in traces)
        at_home = {
            cell
            for cell in _in_order([written, *(filter(None, trace.cells) for trace in traces)])
            if self._is_own(cell) and cell.layout is Layout.MIRRORED
        }
        found = split_update_at_home(
            self.placement,
            [
                NamedTrace(trace.jaxpr, trace.cells, [*([None] * trace.count), *trace.written])
                for trace in traces
            ],
            at_home,
            written,
            updated=at_home.intersection(written),
            arriving=[i for i, operand in enumerate(operands) if isinstance(operand, Whole)],
        )
        if found is None:
            return traces, None
        splits, update = found
        return [t.replica_part(s) for t, s in zip(traces, splits, strict=True)], update

    def _trace_all(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        first_of_class: Sequence[int],
        class_of_replica: Sequence[int],
        may_create: bool,
        is_known: bool = False,
    ) -> list[_Trace]:
        """Traces the function for every class of replicas; see `_trace`.

        If there are several classes, the sizes of their all-gathers are determined one after the
        other: a trace ends where it needs a size that is not known yet.
        """
        if len(first_of_class) == 1:
            return [self._trace(function, arguments, first_of_class[0], None, may_create, is_known)]
        known: list[tuple[int, ...]] = []
        presence = Presence()

        def trace_all() -> tuple[list[_Trace], list[int]]:
            traces, wanted = [], []
            for replica in first_of_class:
                try:
                    traces.append(
                        self._trace(function, arguments, replica, known, may_create, is_known)
                    )
                except SizeWanted as here:
                    wanted.append(here.own)
            return traces, wanted

        while True:
            traces, wanted = presence.of_all(
                trace_all, lambda traced: operations_that_differ([t.jaxpr for t in traced[0]])
            )
            if not wanted:
                return traces
            if traces:
                raise LockstepError(
                    "Replicas with different shapes must perform the same collective operations. "
                    f"One replica performs {len(known)} all-gathers, another performs more."
                )
            known.append(tuple(wanted[index] for index in class_of_replica))

    def _trace_each(
        self, function: Callable[..., Any], arguments: Arguments, may_create: bool
    ) -> list[_Trace] | None:
        """Traces the function for every replica, in which Python code sees the replica's index.

        Returns:
            The traces; None if Python needs the value of something else.
        """
        every = list(range(self.placement.num_replicas))
        if len(every) == 1:
            return None
        try:
            return raising_caught(
                lambda: self._trace_all(
                    function, arguments, every, every, may_create, is_known=True
                )
            )
        except VALUE_WANTED:
            return None

    def _trace_as_first(self, function: Callable[..., Any], arguments: Arguments) -> _Trace:
        """Traces the function as the first replica runs it."""
        return converted_if_needed(
            lambda: self._trace(function, arguments, 0, None, may_create=True, is_known=False)
        )

    def _trace(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        replica: int,
        gathered: Sequence[tuple[int, ...]] | None,
        may_create: bool,
        is_known: bool,
    ) -> _Trace:
        """Traces the function once, as `replica` runs it.

        With `is_known`, Python code in the function sees the replica's index as a number. If the
        replicas' shapes differ, `gathered` has the known sizes of all-gathers; see `SizeWanted`.

        The trace has the variables as inputs that it uses; see `trace_over_cells`.
        """
        placement = self.placement
        lift: Lift | None = None

        def on_one_replica(
            values: dict[Cell, jax.Array], may_create: bool, arrays: list[jax.Array]
        ) -> tuple[Any, dict[Cell, jax.Array]]:
            nonlocal lift
            index = replica if is_known else None
            lift = Lift(placement, values, takes_new_cells=may_create, replica_id=index)
            remaining = iter(arrays)
            leaves = [
                description.value if isinstance(description, Static) else next(remaining)
                for description in arguments.descriptions
            ]
            args, kwargs = jax.tree.unflatten(arguments.structure, leaves)
            with ExitStack() as stack:
                if gathered is not None:
                    stack.enter_context(GatherSizes(gathered).met())
                    stack.enter_context(from_the_first_operation())
                scope = self._replica_context()
                return called_on(lift, lambda: called(function, *args, **kwargs), scope, _as_result)

        avals = [
            description.aval(replica)
            for description in arguments.descriptions
            if not isinstance(description, Static)
        ]
        replicas = placement.num_replicas
        try:
            trace = trace_over_cells(placement, on_one_replica, [avals], replicas, may_create)
        except jax.errors.UnexpectedTracerError as error:
            if lift is None or not lift.written:
                raise
            raise _written_in_a_transformation(lift) from error
        assert lift is not None
        if lift.written and any(isinstance(x, jax.core.Tracer) for x in trace.jaxpr.consts):
            raise _written_in_a_transformation(lift)
        diverging = list(lift.diverging)
        return _Trace(trace.jaxpr, trace.used, trace.structure, trace.written, diverging)

    def _is_own(self, cell: Cell) -> bool:
        return cell.placement is self.placement or cell.placement == self.placement

    def _enter(self, cell: Cell, piece: jax.Array) -> jax.Array:
        return enter_replica(cell, piece) if self._is_own(cell) else piece

    def _spec(self, cell: Cell) -> PartitionSpec:
        return cell_spec(cell) if self._is_own(cell) else MIRRORED


def _written_in_a_transformation(lift: Lift) -> RuntimeError:
    names = ", ".join(repr(cell.name) for cell in lift.written)
    return RuntimeError(
        "A variable was assigned a value that exists only inside a function that JAX transforms "
        "(the body of jax.lax.scan or cond, jax.jit, jax.grad). Return the value from there, and "
        f"assign it outside. The program assigns these variables: {names}"
    )


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _as_result(leaf: Any) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        needs_python(f"Making a result of type {type(leaf).__name__}")
        raise TypeError(
            "A function that strategy.run calls must return arrays, numbers and variables, in any "
            f"nesting. Received: {leaf!r} of type {type(leaf).__name__}."
        ) from error


def _in_order(groups: Iterable[Iterable[Cell]]) -> list[Cell]:
    """Returns the distinct cells of all groups, in the order of their first appearance."""
    return list(dict.fromkeys(cell for group in groups for cell in group))
