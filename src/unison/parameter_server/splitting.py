"""The division of a scheduled program between a worker and the servers.

A training step reads variables, computes gradients, and updates the variables with them. The
servers compute the updates: an optimizer's slots then never leave them, and an update applies to
the current value when it arrives (`x += 1` on two workers adds 2). So the traced program is cut in
two, where the least data has to be transferred: for an optimizer, at the gradients.

A table in which the program only looks up rows (`gather`), and whose gradient consists of rows
(`scatter-add` on zeros), is pulled and pushed by rows. The program then computes with the few rows
that a batch uses, in place of the table: every operation in between works row by row, so that the
results are the same. Several additions to the same row are summed.

In synchronous mode a program is that of one of several workers. The values that it sums over them
(gradients, by the optimizer) are transferred: the servers compute the sums, and everything that
depends on them.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from unison.jaxprs import evaluate, inlined_body, is_collective
from unison.parameter_server.cut import cheapest_cut
from unison.runtime.placement import REPLICA_AXIS

#: Operations that compute each element of the result from the same element of the operands.
_ELEMENTWISE = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type copy copy_p cos div eq erf exp exp2 "
    "expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter "
    "not or pow rem round rsqrt select_n sign sin sqrt square sub tan tanh xor".split()
)
#: Operations that combine elements of one operand.
_REDUCING = frozenset("reduce_sum reduce_max reduce_min reduce_and reduce_or argmax".split())
#: Operations that map zeros to zeros, whatever their other operands are.
_OF_ZEROS = frozenset(
    "abs convert_element_type copy copy_p integer_pow mul neg sign sqrt square".split()
)

#: Operations that add to, or subtract from, some elements of their first operand.
_ADDING_TO_ROWS = frozenset({"scatter-add", "scatter-sub"})

#: Constants of up to this many elements may be on both sides.
_SMALL = 1024
#: The cost of computing, on a worker, a value that depends on a sum over the workers.
_IMPOSSIBLE = 1 << 50


class Writing(enum.Enum):
    """The combination of several workers' updates of a variable in one step."""

    #: Once, with combined or equal values.
    TOGETHER = enum.auto()
    #: By each worker in turn (`ON_READ` variables: every replica adds what it has counted).
    EACH = enum.auto()
    #: By the first worker (`ONLY_FIRST_REPLICA`; a random stream, which advances equally on all).
    FIRST = enum.auto()


@dataclasses.dataclass
class Table:
    """A variable of which the worker only receives the rows that it looks up.

    Attributes:
        cell: The index of its input.
        lookups: The traced indices of the rows, each of shape `(..., 1)`.
        count: The maximum number of rows that these look up.
        clips: For each of `lookups`, whether out-of-bounds indices are clipped to the last row.
    """

    cell: int
    lookups: list[Any]
    count: int
    clips: list[bool]


@dataclasses.dataclass
class Update:
    """An update that servers compute, for variables that are divided in the same way.

    Attributes:
        crossing: The traced values that the servers receive.
        pushed: The value that the worker pushes for each: the same value, or its summand.
        sums: For each, whether it is the sum of all workers' pushes.
        rows: For each, whether it has the variables' rows.
        writing: How the pushes of several workers update the variables.
        cells: The indices of the inputs that it reads.
        outputs: The indices of the outputs that it computes.
        equations: Its equations.
        table: The table of which it updates only the pushed rows; None if it updates all rows.
    """

    crossing: list[Any]
    pushed: list[Any]
    sums: list[bool]
    rows: list[bool]
    writing: Writing
    cells: list[int]
    outputs: list[int]
    equations: list[jex.JaxprEqn]
    table: Table | None = None


class _WantsWholeError(Exception):
    """The rows of variables cannot be updated independently.

    Attributes:
        cells: The variables' indices.
    """

    def __init__(self, cells: Sequence[int], names: str):
        super().__init__(
            f"In synchronous mode, the update of variable {names} looks at whole gradients of all "
            "workers, but its rows are on several servers. Leave out the partitioner, or what "
            "looks at whole gradients (clipping by the global norm, say)."
        )
        self.cells = cells


@dataclasses.dataclass
class SplitProgram:
    """A program, split between a worker and the servers.

    Attributes:
        jaxpr: The whole program, without calls.
        remaining: The indices of the outputs that the worker computes.
        updates: The servers' updates.
        tables: The tables that are pulled by rows.
        pulled: The indices of the cells that the worker pulls as a whole.
        dense_lookups: The indices of those in which it looks up rows, but needs all rows.
    """

    jaxpr: jex.ClosedJaxpr
    remaining: list[int]
    updates: list[Update]
    tables: list[Table]
    pulled: list[int]
    dense_lookups: list[int] = dataclasses.field(default_factory=list)


def inlined(program: jex.ClosedJaxpr, num_replicas: int = 1) -> jex.ClosedJaxpr:
    """Returns the program with its calls inlined.

    Of the collective operations, only sums over `num_replicas` are kept, each of a single value.
    Additions to rows of an input are summed first, and then added to the input, which a server can
    do.
    """
    return _inlined(program, num_replicas, None, 0)


def without_host_calls(
    program: jex.ClosedJaxpr, num_replicas: int, place: int
) -> tuple[jex.ClosedJaxpr, list[jex.JaxprEqn]]:
    """Returns the inlined program without its calls of host functions that return nothing.

    These are the calls of `jax.debug.callback`, `jax.debug.print`, `jax.experimental.io_callback`.
    Calls in loops and branches are kept.

    Args:
        program: The program.
        num_replicas: See `inlined`.
        place: The index of the output before which the operands of the calls are inserted as
            outputs.

    Returns:
        The program, and the calls in order.
    """
    found: list[tuple[jex.JaxprEqn, list[Any]]] = []
    without = _inlined(program, num_replicas, found, place)
    return without, [equation for equation, _ in found]


def _inlined(
    program: jex.ClosedJaxpr,
    num_replicas: int,
    host_calls: list[tuple[jex.JaxprEqn, list[Any]]] | None,
    place: int,
) -> jex.ClosedJaxpr:
    def run(*inputs: Any) -> list[Any]:
        outputs = _run(program, inputs, num_replicas, {id(each) for each in inputs}, host_calls)
        operands = [operand for _, own in host_calls or () for operand in own]
        return [*outputs[:place], *operands, *outputs[place:]]

    axis = [(REPLICA_AXIS, num_replicas)] if num_replicas > 1 else None
    return jax.make_jaxpr(run, axis_env=axis)(*program.in_avals)


def _run(
    program: jex.ClosedJaxpr,
    inputs: Sequence[Any],
    num_replicas: int,
    of_program: set[int],
    host_calls: list[tuple[jex.JaxprEqn, list[Any]]] | None,
) -> list[Any]:
    values = dict(zip(program.jaxpr.invars, inputs, strict=True))
    values.update(zip(program.jaxpr.constvars, program.consts, strict=True))
    read = _reading(values)
    for equation in program.jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        body = inlined_body(equation)
        outputs: Sequence[Any]
        if body is not None:
            outputs = _run(body, operands, num_replicas, of_program, host_calls)
        elif host_calls is not None and _is_host_call(equation):
            avals: list[Any] = [atom.aval for atom in equation.invars]
            typed = [
                jnp.asarray(operand, aval.dtype)  # a literal is a plain number
                for operand, aval in zip(operands, avals, strict=True)
            ]
            host_calls.append((equation, typed))
            outputs = ()
        elif names_the_replicas(equation):
            if num_replicas == 1:
                outputs = _of_one_replica(equation, operands)
            else:
                outputs = _of_several_replicas(equation, operands)
        elif equation.primitive.name in _ADDING_TO_ROWS and id(operands[0]) in of_program:
            before, *added = operands
            (of_rows,) = evaluate(equation, [jnp.zeros_like(before), *added])
            outputs = [before + of_rows]
        else:
            outputs = evaluate(equation, operands)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in program.jaxpr.outvars]


def names_the_replicas(equation: jex.JaxprEqn) -> bool:
    """Returns whether the operation uses the replica's index, or communicates with others."""
    return equation.primitive.name == "axis_index" or is_collective(equation)


def _is_host_call(equation: jex.JaxprEqn) -> bool:
    """Returns whether the operation only calls a host function without results."""
    is_call = equation.primitive.name in ("debug_callback", "debug_print", "io_callback")
    return is_call and not equation.outvars


def _of_one_replica(equation: jex.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of a collective operation of a single replica."""
    name = equation.primitive.name
    if name == "axis_index":
        return [jnp.zeros((), jnp.int32)]
    if name == "all_gather" and not equation.params["tiled"]:
        dimension = equation.params["all_gather_dimension"]
        return [jnp.expand_dims(operand, dimension) for operand in operands]
    return operands  # sums, means, maxima and parts of one replica's values


def _of_several_replicas(equation: jex.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of a collective operation, with a separate sum for each operand."""
    if _is_sum(equation):
        return [lax.psum(operand, REPLICA_AXIS) for operand in operands]
    return evaluate(equation, operands)


def _is_sum(equation: jex.JaxprEqn) -> bool:
    return equation.primitive.name in ("psum", "psum_invariant") and is_collective(equation)


def _reading(values: dict[Any, Any]) -> Callable[[Any], Any]:
    return lambda atom: atom.val if isinstance(atom, jex.Literal) else values[atom]


class Splitter:
    """Splits one program between a worker and the servers.

    Args:
        program: Maps the cells' values, followed by all other inputs, to results and then new
            values of cells.
        bounds: For every cell, its shards: the server, the first row, and the end row (exclusive).
        written: The indices of the cells to which the last outputs are written.
        names: The cells' names.
        writings: For every cell, how several workers update it. Default: for a single worker.
        num_replicas: The number of workers whose pushes are combined into an update.
    """

    def __init__(
        self,
        program: jex.ClosedJaxpr,
        bounds: Sequence[tuple[tuple[int, int, int], ...]],
        written: Sequence[int],
        names: Sequence[str] = (),
        writings: Sequence[Writing] | None = None,
        num_replicas: int = 1,
    ):
        self._program = inlined(program, num_replicas)
        self._names = names
        self._writings = writings or [Writing.TOGETHER] * len(bounds)
        self._num_replicas = num_replicas
        self._jaxpr = self._program.jaxpr
        self._bounds = list(bounds)
        self._written = list(written)
        self._first_output = len(self._jaxpr.outvars) - len(written)
        self._makers = {
            variable: equation for equation in self._jaxpr.eqns for variable in equation.outvars
        }
        self._cell_of: dict[Any, int] = {
            self._jaxpr.invars[cell]: cell for cell in range(len(bounds))
        }
        self._consts = set(self._jaxpr.constvars)
        self._needs: dict[Any, tuple[int, bool]] = {}
        for cell in range(len(bounds)):
            self._needs[self._jaxpr.invars[cell]] = (1 << cell, False)
        for variable in self._jaxpr.invars[len(bounds) :]:
            self._needs[variable] = (0, True)
        #: The summands of sums over the workers, and all values that depend on such a sum.
        self._summands: dict[Any, Any] = {}
        self._follows_from_sums: set[Any] = set()
        for equation in self._jaxpr.eqns:
            cells, others = 0, False
            for variable in _variables(equation.invars):
                more, other = self._needs.get(variable, (0, False))
                cells, others = cells | more, others or other
            for variable in equation.outvars:
                self._needs[variable] = (cells, others or names_the_replicas(equation))
            if _is_sum(equation):
                self._summands[equation.outvars[0]] = equation.invars[0]
            if _is_sum(equation) or not self._follows_from_sums.isdisjoint(
                _variables(equation.invars)
            ):
                self._follows_from_sums.update(equation.outvars)

    def split(self) -> SplitProgram:
        """Returns the split program."""
        candidates = self._looked_up()
        dense: list[int] = []
        while True:
            updates: list[Update] = []
            try:
                for key, outputs in self._groups(candidates).items():
                    updates += self._update(key, outputs)
                break
            except _WantsWholeError as wants:
                whole = {self._bounds[cell] for cell in wants.cells}
                dense += [table.cell for table in candidates if self._bounds[table.cell] in whole]
                candidates = [t for t in candidates if self._bounds[t.cell] not in whole]
                if any(len(bounds) > 1 for bounds in whole):
                    raise ValueError(str(wants)) from None
        at_home = {output for update in updates for output in update.outputs}
        remaining = [i for i in range(len(self._jaxpr.outvars)) if i not in at_home]
        tables = []
        for table in candidates:
            own = self._by_rows(table, remaining, updates)
            if own is None:
                dense.append(table.cell)
                continue
            tables.append(table)
            for update in own:
                update.table = table
        equations, needed = self.worker_equations(remaining, updates)
        for equation in equations:
            if names_the_replicas(equation) and not _is_sum(equation):
                raise ValueError(
                    "In synchronous mode, parameter servers sum and average what the workers "
                    f"push. Received: {equation.primitive.name!r} over the replicas. Use "
                    "all_reduce with SUM or MEAN, variables with an aggregation, and "
                    "current_worker_index()."
                )
        if not self._follows_from_sums.isdisjoint(needed):
            raise ValueError(
                "In synchronous mode, the servers combine what the workers push, after the "
                "workers' programs: what a scheduled function returns, and what is summed, cannot "
                "depend on what is combined in the same step. Return the replica's own values; "
                "fetch() gives those of all, for strategy.reduce."
            )
        by_rows = {table.cell for table in tables}
        pulled = [
            cell
            for cell in range(len(self._bounds))
            if self._jaxpr.invars[cell] in needed and cell not in by_rows
        ]
        return SplitProgram(self._program, remaining, updates, tables, pulled, dense)

    # -- cutting --------------------------------------------------------------------------------

    def _groups(self, candidates: Sequence[Table]) -> dict[Any, list[int]]:
        """Returns the outputs, grouped by cells that may be updated together."""
        looked_up = {self._bounds[table.cell] for table in candidates}
        groups: dict[Any, list[int]] = {}
        for place, cell in enumerate(self._written):
            bounds = self._bounds[cell]
            by_rows = len(bounds) > 1 or bounds in looked_up
            key = (bounds if by_rows else bounds[0][0], self._writings[cell])
            groups.setdefault(key, []).append(self._first_output + place)
        return groups

    def _is_in_group(self, cell: int, place: Any, writing: Writing) -> bool:
        bounds = self._bounds[cell]
        is_there = bounds == place or (len(bounds) == 1 and bounds[0][0] == place)
        return is_there and self._writings[cell] is writing

    def _update(self, key: Any, outputs: Sequence[int]) -> list[Update]:
        """Returns the updates that compute `outputs`, for cells of one group."""
        place, writing = key
        by_rows = isinstance(place, tuple)
        rows = place[-1][2] if by_rows else None
        home = {v for v, cell in self._cell_of.items() if self._is_in_group(cell, *key)}
        targets = [self._jaxpr.outvars[output] for output in outputs]
        before: dict[Any, list[Any]] = {}
        sources = []
        waiting = [atom for atom in targets if isinstance(atom, jex.Var)]
        while waiting:
            variable = waiting.pop()
            if variable in before or variable in home or self._is_known(variable):
                continue
            maker = self._makers.get(variable)
            is_sum = variable in self._summands
            if maker is None or is_sum or not self._can_be_at_home(maker, rows):
                before[variable] = []
                sources.append(variable)
                continue
            before[variable] = [
                operand
                for operand in _variables(maker.invars)
                if operand not in home and not self._is_known(operand)
            ]
            waiting += before[variable]
        ends = [v for v in targets if isinstance(v, jex.Var) and v in before]
        cut = cheapest_cut(before, self._costs(before, sources), sources, set(ends))
        updates = self._components(outputs, cut, home, rows, writing)
        for update in updates:
            self._check_combined(update)
        return updates

    def _can_be_at_home(self, equation: jex.JaxprEqn, rows: int | None) -> bool:
        """Returns whether servers may compute an operation; with `rows`, on only some rows."""
        if rows is None and not self._follows_from_sums.isdisjoint(equation.outvars):
            return not equation.effects  # workers cannot compute it
        return _can_be_at_home(equation, rows)

    def _check_combined(self, update: Update) -> None:
        """Raises a ValueError if workers would update variables with different values."""
        if self._num_replicas == 1 or update.writing is Writing.FIRST:
            return
        cells = [self._written[output - self._first_output] for output in update.outputs]
        names = ", ".join(repr(self._names[cell]) for cell in cells)
        for variable, is_sum in zip(update.crossing, update.sums, strict=True):
            if is_sum:
                continue
            if variable in self._follows_from_sums:
                raise _WantsWholeError(cells, names)
            if update.writing is Writing.TOGETHER and self._needs.get(variable, (0, True))[1]:
                raise ValueError(
                    "In synchronous mode, the workers update a variable once a step, all "
                    f"together. Received: values that each computes for itself, for {names}. "
                    "Combine them first: by the optimizer (optimizer.apply), by "
                    "get_replica_context().all_reduce, or by an aggregation of the variable "
                    "(SUM, MEAN or ONLY_FIRST_REPLICA)."
                )

    def _is_known(self, variable: Any) -> bool:
        return variable in self._consts and math.prod(variable.aval.shape) <= _SMALL

    def _costs(self, nodes: Iterable[Any], sources: Collection[Any]) -> dict[Any, int]:
        """Returns the cost of computing each value on the worker and pushing it."""
        pulled_anyway = 0
        for output in self._jaxpr.outvars[: self._first_output]:
            if isinstance(output, jex.Var):
                pulled_anyway |= self._needs.get(output, (0, False))[0]
        for source in sources:
            cells, is_of_worker = self._needs.get(source, (0, True))
            if is_of_worker:
                pulled_anyway |= cells
        costs = {}
        for node in nodes:
            extra = self._needs.get(node, (0, False))[0] & ~pulled_anyway
            pulls = sum(
                _bytes(self._jaxpr.invars[cell].aval)
                for cell in range(len(self._bounds))
                if extra >> cell & 1
            )
            is_impossible = node in self._follows_from_sums and node not in self._summands
            costs[node] = _IMPOSSIBLE if is_impossible else _bytes(node.aval) + pulls + 1
        return costs

    def _components(
        self,
        outputs: Sequence[int],
        cut: set[Any],
        home: set[Any],
        rows: int | None,
        writing: Writing,
    ) -> list[Update]:
        """Returns an update for each set of outputs that share server values; one without rows."""
        parts: list[tuple[list[int], set[Any]]] = []
        for output in outputs:
            looked_at = self._home_part([output], cut, home)[1] & home
            cell = self._jaxpr.invars[self._written[output - self._first_output]]
            own, shared = [output], looked_at | {cell}
            apart = []
            for other, others in parts:
                if rows is None or others & shared:
                    own, shared = other + own, shared | others
                else:
                    apart.append((other, others))
            parts = [*apart, (own, shared)]
        updates = []
        for own, _ in parts:
            equations, seen = self._home_part(own, cut, home)
            crossing = [variable for variable in seen if variable in cut]
            crossing = sorted(crossing, key=str)
            with_rows = (
                self._with_rows(equations, [self._jaxpr.outvars[o] for o in own])
                if rows is not None
                else set()
            )
            cells = sorted(self._cell_of[variable] for variable in seen & home)
            is_rows = [variable in with_rows for variable in crossing]
            pushed = [self._summands.get(variable, variable) for variable in crossing]
            sums = [variable in self._summands for variable in crossing]
            updates.append(
                Update(crossing, pushed, sums, is_rows, writing, cells, sorted(own), equations)
            )
        return updates

    def _home_part(
        self, outputs: Sequence[int], cut: set[Any], home: set[Any]
    ) -> tuple[list[jex.JaxprEqn], set[Any]]:
        """Returns the equations that compute `outputs` from `cut` and `home`, and their values."""
        seen: set[Any] = set()
        makers: dict[int, jex.JaxprEqn] = {}
        waiting = list(_variables(self._jaxpr.outvars[output] for output in outputs))
        while waiting:
            variable = waiting.pop()
            if variable in seen:
                continue
            seen.add(variable)
            if variable in cut or variable in home or self._is_known(variable):
                continue
            maker = self._makers[variable]
            makers[id(maker)] = maker
            waiting += _variables(maker.invars)
        return [equation for equation in self._jaxpr.eqns if id(equation) in makers], seen

    @staticmethod
    def _with_rows(equations: Sequence[jex.JaxprEqn], outputs: Sequence[Any]) -> set[Any]:
        """Returns the values that have the variables' rows, given that the outputs have them."""
        found = {atom for atom in outputs if isinstance(atom, jex.Var)}
        for equation in reversed(equations):
            (output,) = equation.outvars
            if output not in found:
                continue
            for operand in _variables(equation.invars):
                if _passes_rows(equation, operand):
                    found.add(operand)
        return found

    # -- tables ---------------------------------------------------------------------------------

    def _looked_up(self) -> list[Table]:
        """Returns the cells in which fewer rows are looked up than they have."""
        found: dict[int, Table] = {}
        like: dict[Any, int] = {
            variable: cell for variable, cell in self._cell_of.items() if variable.aval.shape
        }
        for equation in self._jaxpr.eqns:
            name = equation.primitive.name
            operand = equation.invars[0] if equation.invars else None
            if not isinstance(operand, jex.Var) or operand not in like:
                continue
            if name in ("convert_element_type", "copy", "copy_p"):
                like[equation.outvars[0]] = like[operand]
            elif name == "gather" and _is_of_rows(equation):
                cell = like[operand]
                table = found.setdefault(cell, Table(cell, [], 0, []))
                indices = equation.invars[1]
                if isinstance(indices, jex.Var) and indices not in table.lookups:
                    table.lookups.append(indices)
                    table.count += math.prod(_shape(indices))
                    table.clips.append("CLIP" in str(equation.params["mode"]).upper())
        return [
            table
            for table in found.values()
            if 0 < table.count < _shape(self._jaxpr.invars[table.cell])[0]
            and not any(self._needs.get(i, (0, False))[0] >> table.cell & 1 for i in table.lookups)
        ]

    def _by_rows(
        self, table: Table, remaining: Sequence[int], updates: Sequence[Update]
    ) -> list[Update] | None:
        """Returns the table's updates by rows; None if the worker needs the whole table."""
        equations, _ = self.worker_equations(remaining, updates)
        rows = self.row_values(table, equations)
        if rows is None:
            return None
        if any(self._jaxpr.outvars[output] in rows for output in remaining):
            return None
        own = []
        for update in updates:
            crossing = [_is_in(variable, rows) for variable in update.pushed]
            if any(crossing) or table.cell in update.cells:
                if crossing != update.rows:
                    return None
                own.append(update)
        return own

    def row_values(self, table: Table, equations: Sequence[jex.JaxprEqn]) -> set[Any] | None:
        """Returns the worker's values with the table's rows; None if all rows are needed."""
        variable: Any = self._jaxpr.invars[table.cell]
        shape = variable.aval.shape
        rows = {variable}
        vanishing: set[Any] = set()
        for equation in equations:
            operands = set(_variables(equation.invars))
            name = equation.primitive.name
            if not equation.outvars:  # a branch may have only effects
                if operands & rows:
                    return None
                continue
            output = equation.outvars[0]
            if (
                name == "scatter-add"
                and equation.invars[1] in table.lookups
                and _is_of_rows(equation)
                and self._is_zero(equation.invars[0], shape)
            ):
                rows.add(output)
                vanishing.add(output)
                continue
            if not operands & rows:
                continue
            if (
                name == "gather"
                and equation.invars[0] in rows
                and operands - rows <= {*table.lookups}
            ):
                continue
            if name in _ELEMENTWISE and _shape(output)[:1] == shape[:1]:
                rows.add(output)
                is_zero = operands & vanishing if name == "mul" else operands <= vanishing
                if is_zero and (name in _OF_ZEROS or name in ("add", "add_any", "sub")):
                    vanishing.add(output)
                continue
            if name == "reduce_sum" and operands <= vanishing:
                continue
            return None
        return rows

    def _is_zero(self, variable: Any, shape: tuple[int, ...]) -> bool:
        if isinstance(variable, jex.Literal) or variable.aval.shape != shape:
            return False
        maker = self._makers.get(variable)
        if maker is None or maker.primitive.name != "broadcast_in_dim":
            return False
        scalar = maker.invars[0]
        return isinstance(scalar, jex.Literal) and not _shape(scalar) and scalar.val == 0

    def worker_equations(
        self, remaining: Sequence[int], updates: Sequence[Update]
    ) -> tuple[list[jex.JaxprEqn], set[Any]]:
        """Returns the worker's equations, and all values in them."""
        wanted = [self._jaxpr.outvars[output] for output in remaining]
        wanted += [variable for update in updates for variable in update.pushed]
        return equations_for(self._jaxpr.eqns, wanted)


def equations_for(
    equations: Sequence[jex.JaxprEqn], wanted: Iterable[Any]
) -> tuple[list[jex.JaxprEqn], set[Any]]:
    """Returns the equations that compute `wanted`, and all values in them."""
    seen = set(_variables(wanted))
    needed = []
    for equation in reversed(equations):
        has_effects = bool(equation.effects) and not names_the_replicas(equation)
        if has_effects or not seen.isdisjoint(equation.outvars):
            needed.append(equation)
            seen.update(_variables(equation.invars))
    return needed[::-1], seen


def evaluated(
    equations: Sequence[jex.JaxprEqn],
    values: dict[Any, Any],
    wanted: Sequence[Any],
    has_rows: Collection[Any] = (),
    rows: Any = None,
) -> list[Any]:
    """Returns `wanted`, computed by `equations` from `values`, which are extended.

    Values in `has_rows` have `rows` rows, instead of the number that they were traced with.
    """
    read = _reading(values)
    for equation in equations:
        operands = [read(atom) for atom in equation.invars]
        output = next(iter(equation.outvars), None)  # a branch may have only effects
        if (
            output is not None
            and output in has_rows
            and equation.primitive.name == "broadcast_in_dim"
        ):
            shape = (rows, *_shape(output)[1:])
            dimensions = equation.params["broadcast_dimensions"]
            values[output] = lax.broadcast_in_dim(operands[0], shape, dimensions)
        else:
            values.update(zip(equation.outvars, evaluate(equation, operands), strict=True))
    return [
        jnp.asarray(read(atom), atom.aval.dtype)  # a literal is a plain number
        for atom in wanted
    ]


def rows_within(equations: Sequence[jex.JaxprEqn], outputs: Sequence[Any]) -> set[Any]:
    """Returns the values in an update that have the variables' rows."""
    return Splitter._with_rows(equations, outputs)


def _can_be_at_home(equation: jex.JaxprEqn, rows: int | None) -> bool:
    """Returns whether servers may compute an operation; with `rows`, on only some rows."""
    name = equation.primitive.name
    if name in _ELEMENTWISE:
        return not equation.effects
    shape = _shape(equation.outvars[0])
    if name == "broadcast_in_dim":
        if rows is None:
            return True
        dimensions = equation.params["broadcast_dimensions"]
        operand = _shape(equation.invars[0])
        keeps_rows = bool(dimensions) and dimensions[0] == 0 and operand[0] == shape[0]
        return shape[:1] == (rows,) and (keeps_rows or 0 not in dimensions)
    if name in _REDUCING:
        return rows is None or 0 not in equation.params["axes"]
    return rows is None and name in ("reshape", "squeeze", "expand_dims", "iota")


def _passes_rows(equation: jex.JaxprEqn, operand: Any) -> bool:
    """Returns whether `operand` has rows if the result of the equation has."""
    name = equation.primitive.name
    (output,) = equation.outvars
    if name in _ELEMENTWISE:
        return _shape(operand) == _shape(output)
    if name == "broadcast_in_dim":
        dimensions = equation.params["broadcast_dimensions"]
        return bool(dimensions) and dimensions[0] == 0 and _shape(operand)[0] > 1
    return name in _REDUCING


def _is_of_rows(equation: jex.JaxprEqn) -> bool:
    """Returns whether a `gather` or `scatter-add` handles whole rows, by one index each."""
    numbers = equation.params["dimension_numbers"]
    shape = _shape(equation.invars[0])
    if equation.primitive.name == "gather":
        return (
            tuple(numbers.start_index_map) == (0,)
            and tuple(numbers.collapsed_slice_dims) == (0,)
            and not numbers.operand_batching_dims
            and tuple(equation.params["slice_sizes"]) == (1, *shape[1:])
        )
    return (
        tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.inserted_window_dims) == (0,)
        and not numbers.operand_batching_dims
        and len(numbers.update_window_dims) == len(shape) - 1
    )


def _is_in(atom: Any, variables: Collection[Any]) -> bool:
    return isinstance(atom, jex.Var) and atom in variables


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


def _shape(atom: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = atom.aval.shape
    return shape


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
