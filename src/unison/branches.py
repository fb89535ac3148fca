"""Branches and loops of compiled programs that read and assign variables.

`jax.lax.cond` and `while_loop` are functions of arrays: a variable that is assigned in their bodies
would hold a value that exists only there. Here each body has its own lift: a value that it writes
is returned from the branch, or carried through the loop, as an additional array, and is assigned to
the variable afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from unison.cells import Cell, VariableAggregation, has_cell
from unison.collectives import all_reduce_packed
from unison.jaxprs import has_collectives, is_collective
from unison.lifting import Lift, combine_writes, current_lift
from unison.lockstep import LockstepError
from unison.program.tracing import Holder, current_holder, reading_from, traced
from unison.runtime.placement import REPLICA_AXIS
from unison.tracebacks import users_line


def switch(
    index: Any,
    branches: Sequence[Callable[[], Any]],
    agree: Callable[[], None] = lambda: None,
) -> Any:
    """Returns the result of `branches[index]`; only that branch runs.

    In a replica program the replicas may take different branches. If the branches add to a variable
    that combines its updates, replicas whose branch does not add to it contribute zero; if they
    assign it, replicas whose branch does not are left out. A branch that reads such a variable
    after writing to it communicates, so all replicas must take it.

    Args:
        index: A Python integer or an array of the program; clipped to the range of branches.
        branches: Functions of no arguments. Their results must have the same structure, shapes and
            dtypes. A variable that all of them return is returned as a variable.
        agree: Called once all branches are traced, before their effects; what it raises takes the
            place of an error about results that differ.

    Examples:
        >>> import unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     count = unison.Variable(0, aggregation=unison.VariableAggregation.SUM)
        >>> def step():
        ...     replica = unison.get_replica_context().replica_id_in_sync_group
        ...     return switch(replica, [lambda: count, lambda: count.assign_add(3)])
        >>> _ = strategy.run(step)
        >>> int(count)
        3
    """
    index = jnp.asarray(index).astype(jnp.int32)
    lift, holder = current_lift(), current_holder()
    if lift is None and holder is None:
        try:
            result = lax.switch(index, branches)
        except TypeError:
            agree()
            raise
        agree()
        return result
    traces = [_Trace.of(branch, lift, holder) for branch in branches]
    agree()
    structures = [trace.structure for trace in traces]
    if len(set(structures)) > 1:
        raise TypeError(f"All branches must return one structure. Received: {structures}")
    returned = list(zip(*(trace.leaves for trace in traces), strict=True))
    kept = [_same_variable(leaves) for leaves in returned]
    different = {
        place
        for place, (leaves, variable) in enumerate(zip(returned, kept, strict=True))
        if variable is None and any(leaf is not None for leaf in leaves)
    }
    if different:  # they are read in the branches, so that they are differentiated
        traces = [_Trace.of(branch, lift, holder, different) for branch in branches]
    if lift is not None and any(map(_communicates, traces)):
        index = _agreed(index, lift)
    kinds = _common_kinds(traces)
    held = list({id(each): each for trace in traces for each in trace.held}.values())

    def taken(trace: _Trace) -> Callable[[], tuple[list[Any], list[Any], list[Any]]]:
        return lambda: trace.run(kinds, held)

    outputs, updates, values = lax.switch(index, [taken(trace) for trace in traces])
    if lift is not None:
        diverging = {cell for trace in traces for cell in trace.diverging}
        for (cell, kind), update in zip(kinds.items(), updates, strict=True):
            _apply(lift, cell, kind, update, cell in diverging)
    if holder is not None:
        holder.assign(held, values)
    remaining = iter(outputs)
    leaves = [next(remaining) if variable is None else variable for variable in kept]
    return jax.tree.unflatten(structures[0], leaves)


def while_loop(
    condition: Callable[[Any], Any],
    body: Callable[[Any], Any],
    carry: Any,
    maximum_iterations: int | None = None,
    first: Any = None,
) -> Any:
    """Applies `body` to the carry while `condition` holds, and returns the final carry.

    In a replica program the number of iterations may differ between replicas, unless the body reads
    a variable that combines its updates, or assigns one: that communicates in every iteration.

    Args:
        condition: Maps the carry to a Boolean.
        body: Maps the carry to the next carry, of the same structure, shapes and dtypes.
        carry: A pytree of arrays.
        maximum_iterations: The maximum number of iterations. If given, the loop supports
            reverse-mode differentiation, but the condition is always evaluated this many times.
        first: The condition of the first carry, if it was evaluated already.
    """
    lift, holder = current_lift(), current_holder()
    if lift is None and holder is None:
        return _repeat(condition, body, carry, maximum_iterations)
    if _Trace.of(lambda: condition(carry), lift, holder).assigns:

        def next_and_holds(state: Any) -> Any:
            new = body(state[0])
            return new, condition(new)

        # What the condition assigns, the body assigns: a condition of JAX's only returns a value.
        start = (carry, condition(carry) if first is None else first)
        return while_loop(lambda state: state[1], next_and_holds, start, maximum_iterations)[0]
    loop = _Loop(lambda: (condition(carry), body(carry)))

    def holds(state: Any) -> Any:
        held = loop.asked(condition, state)
        return held if lift is None or not loop.communicates else _agreed(held, lift)

    def next_state(state: Any) -> Any:
        return loop.after_round(lambda carry: (body(carry), None), state)[0]

    return loop.end(_repeat(holds, next_state, loop.start(carry), maximum_iterations))


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, elements: Any, reverse: bool = False
) -> tuple[Any, Any]:
    """Returns `jax.lax.scan(body, carry, elements)`, where `body` may use variables.

    Args:
        body: Maps the carry and the slices of `elements` to the next carry and a result.
        carry: A pytree of arrays.
        elements: A pytree of arrays, which are sliced along their first axis.
        reverse: Whether to scan from the last slices to the first.

    Returns:
        The final carry, and the stacked results.
    """
    if current_lift() is None and current_holder() is None:
        return lax.scan(body, carry, elements, reverse=reverse)
    example = jax.tree.map(lambda array: jnp.zeros(array.shape[1:], array.dtype), elements)
    loop = _Loop(lambda: body(carry, example))

    def step(state: Any, element: Any) -> tuple[Any, Any]:
        return loop.after_round(lambda carry: body(carry, element), state)

    state, results = lax.scan(step, loop.start(carry), elements, reverse=reverse)
    return loop.end(state), results


def shapes_of(function: Callable[[], Any]) -> Any:
    """Returns the result of `function` as `jax.ShapeDtypeStruct`s, without writing to variables."""
    lift, holder = current_lift(), current_holder()
    if lift is None and holder is None:
        return jax.eval_shape(function)
    trace = _Trace.of(function, lift, holder)
    shapes = iter(trace.jaxpr.out_avals)
    leaves = [next(shapes) if variable is None else variable.cell.aval for variable in trace.leaves]
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(trace.structure, structs)


class _Loop:
    """A loop whose body uses variables: their values are part of the state.

    Updates of variables that the body only adds to are summed, and combined once, after the loop.

    Args:
        round_: Runs one iteration on an example of the carry.
    """

    def __init__(self, round_: Callable[[], Any]):
        self._lift, self._holder = current_lift(), current_holder()
        trace = _Trace.of(round_, self._lift, self._holder)
        #: Whether a round has collective operations, for which all replicas must be in it.
        self.communicates = _communicates(trace)
        self._totals = [
            cell
            for cell, kind in trace.kinds.items()
            if kind is _Kind.ADDED and cell not in trace.reads
        ]
        self._values = [cell for cell in trace.kinds if cell not in self._totals]
        self._held = trace.held
        self._diverging: set[Cell] = set()

    def start(self, carry: Any) -> Any:
        """Returns the state of the loop before its first iteration."""
        lift, holder = self._lift, self._holder
        return (
            jax.tree.map(jnp.asarray, carry),
            [] if lift is None else [lift.own_copy(cell) for cell in self._values],
            [jnp.zeros(cell.aval.shape, cell.aval.dtype) for cell in self._totals],
            [] if holder is None else holder.values(self._held),
        )

    def asked(self, condition: Callable[[Any], Any], state: Any) -> Any:
        """Returns the condition of a carry, where variables have their values."""
        with self._inside(state):
            return condition(state[0])

    def after_round(self, body: Callable[[Any], tuple[Any, Any]], state: Any) -> tuple[Any, Any]:
        """Returns the state after an iteration, and the second result of `body`."""
        with self._inside(state) as (own, holding):
            carry, result = body(state[0])
            held = [] if holding is None else holding.values(self._held)
        values, totals = state[1:3]
        if own is not None:
            self._diverging.update(own.diverging)
            left = own.leave()
            values = [_value(own, cell, left) for cell in self._values]
            totals = [t + left[cell][1] for cell, t in zip(self._totals, totals, strict=True)]
        return (_as_before(carry, state[0]), values, totals, held), result

    @contextlib.contextmanager
    def _inside(self, state: Any) -> Iterator[tuple[_BodyLift | None, Any]]:
        """Context manager in which variables have their values in this iteration."""
        own = holding = None
        with contextlib.ExitStack() as stack:
            if self._lift is not None:
                own = _BodyLift(self._lift, dict(zip(self._values, state[1], strict=True)))
                stack.enter_context(reading_from(own))
            if self._holder is not None:
                holding = stack.enter_context(self._holder.inside(self._held, state[3]))
            yield own, holding

    def end(self, state: Any) -> Any:
        """Writes the variables; returns the carry."""
        carry, values, totals, held = state
        if self._lift is not None:
            for cell, value in zip(self._values, values, strict=True):
                _apply(self._lift, cell, _Kind.VALUE, [value], cell in self._diverging)
            for cell, total in zip(self._totals, totals, strict=True):
                self._lift.add(cell, total)
        if self._holder is not None:
            self._holder.assign(self._held, held)
        return carry


def _as_before(new: Any, old: Any) -> Any:
    """Returns the next carry with the old one's dtypes where only weak typing differs."""
    return jax.tree.map(
        lambda a, b: a.astype(b.dtype) if getattr(a, "weak_type", False) else a,
        jax.tree.map(jnp.asarray, new),
        old,
    )


def _repeat(
    condition: Callable[[Any], Any],
    body: Callable[[Any], Any],
    carry: Any,
    maximum_iterations: int | None,
) -> Any:
    if maximum_iterations is None:
        return lax.while_loop(condition, body, carry)

    def round_(carry: Any, _: None) -> tuple[Any, None]:
        return lax.cond(condition(carry), body, lambda carry: carry, carry), None

    return lax.scan(round_, carry, length=maximum_iterations)[0]


class _BodyLift(Lift):
    """The values of the cells inside a body; other cells are looked up in the enclosing lift.

    Attributes:
        reads: The cells whose value from outside the body was read.
    """

    def __init__(self, outer: Lift, values: dict[Cell, jax.Array] | None = None):
        super().__init__(outer.placement, values or {}, outer.takes_new_cells, outer.replica_id)
        self._outer = outer
        self._writer = outer._writer
        self._copies_get_equal_values = outer._copies_get_equal_values
        self.created = outer.created
        self.reads: set[Cell] = set()

    def own_copy(self, cell: Cell) -> jax.Array:
        if cell in self._values or cell in self._pending:
            return super().own_copy(cell)
        self.reads.add(cell)
        return self._outer.own_copy(cell)

    def holds(self, cell: Cell) -> bool:
        return super().holds(cell) or self._outer.holds(cell)

    def copies_differ(self, cell: Cell) -> bool:
        return super().copies_differ(cell) or self._outer.copies_differ(cell)

    def add(self, cell: Cell, delta: jax.Array) -> None:
        before = set(self.reads)
        super().add(cell, delta)
        if self.combines_now(cell):
            self.reads = before  # a deferred addition reads nothing

    def leave(self) -> dict[Cell, tuple[_Kind, jax.Array]]:
        """Returns, for every cell that the body wrote, the kind of the write and its array."""
        kinds = {cell: self._kind_of(cell) for cell in self.written}
        waiting = {
            cell: self._pending.pop(cell).delta
            for cell, kind in kinds.items()
            if kind is not _Kind.VALUE
        }
        return {
            cell: (kind, waiting[cell] if cell in waiting else self.own_copy(cell))
            for cell, kind in kinds.items()
        }

    def _kind_of(self, cell: Cell) -> _Kind:
        update = self._pending.get(cell)
        if update is None or (update.base is not None and cell in self._values):
            return _Kind.VALUE
        return _Kind.ASSIGNED if update.base is None else _Kind.ADDED


class _Kind(enum.Enum):
    """The kind of write that a body leaves for a cell."""

    #: A value: the replica's own, or one that was combined in the body.
    VALUE = enum.auto()
    #: A value to add, not yet combined.
    ADDED = enum.auto()
    #: An assigned value, not yet combined.
    ASSIGNED = enum.auto()


@dataclasses.dataclass
class _Trace:
    """A traced branch.

    Attributes:
        lift: The lift around it, if any.
        holder: What holds variables around it, if anything does.
        jaxpr: Computes the leaves that are not variables, the arrays written to the cells in
            `kinds`, and the values of the variables in `held`.
        leaves: For every leaf of its result, the variable if it is one, otherwise None.
        structure: The structure of its result.
        kinds: The cells that it wrote, with the kind of each write.
        reads: The cells whose value from outside it read.
        diverging: The cells whose copies may differ because of it.
        held: The variables of the holder that it assigned.
    """

    lift: Lift | None
    holder: Holder | None
    jaxpr: ClosedJaxpr
    leaves: list[Any]
    structure: Any
    kinds: dict[Cell, _Kind]
    reads: set[Cell]
    diverging: list[Cell]
    held: list[Any]

    @property
    def assigns(self) -> bool:
        """Whether it assigned variables."""
        return bool(self.kinds or self.held)

    @classmethod
    def of(
        cls,
        branch: Callable[[], Any],
        lift: Lift | None,
        holder: Holder | None,
        read: Container[int] = (),
    ) -> _Trace:
        """Traces a branch.

        Args:
            branch: The branch.
            lift: The lift around it, if any.
            holder: What holds variables around it, if anything does.
            read: The numbers of the leaves of the result that are values, if they are variables.
        """
        leaves: list[Any] = []
        kinds: dict[Cell, _Kind] = {}
        held: list[Any] = []
        structure: Any = None
        own: _BodyLift | None = None

        def body() -> Any:
            nonlocal structure, own
            own = None if lift is None else _BodyLift(lift)
            with contextlib.ExitStack() as stack:
                if own is not None:
                    stack.enter_context(reading_from(own))
                inner = None if holder is None else stack.enter_context(holder.inside())
                found, structure = jax.tree.flatten(branch(), is_leaf=has_cell)
                for place, leaf in enumerate(found):
                    is_value = place in read or own is None or not has_cell(leaf)
                    is_value = is_value or (inner is not None and inner.has(leaf))
                    leaves.append(None if is_value else leaf)
                pairs = zip(leaves, found, strict=True)
                arrays = [jnp.asarray(leaf) for variable, leaf in pairs if variable is None]
                if inner is not None:
                    held.extend(inner.assigned)
                    values = inner.values(held)
                else:
                    values = []
            left = {} if own is None else own.leave()
            kinds.update((cell, kind) for cell, (kind, _) in left.items())
            return arrays, [array for _, array in left.values()], values

        jaxpr = traced(body)
        reads, diverging = (set(), []) if own is None else (own.reads, list(own.diverging))
        return cls(lift, holder, jaxpr, leaves, structure, kinds, reads, diverging, held)

    def run(
        self, kinds: dict[Cell, _Kind], held: Sequence[Any]
    ) -> tuple[list[jax.Array], list[list[jax.Array]], list[jax.Array]]:
        """Returns the leaves that are values, what `_apply` needs for the cells of all branches,
        and the values of the held variables that any branch assigns.
        """
        outputs = jaxpr_as_fun(self.jaxpr)()
        count = sum(variable is None for variable in self.leaves)
        result, rest = outputs[:count], outputs[count:]
        left = dict(zip(self.kinds, zip(self.kinds.values(), rest, strict=False), strict=True))
        own = dict(zip(map(id, self.held), rest[len(self.kinds) :], strict=True))
        updates = []
        for cell, kind in kinds.items():
            assert self.lift is not None
            has_written = cell in left
            if kind is _Kind.VALUE:
                updates.append([_value(self.lift, cell, left)])
            elif kind is _Kind.ADDED:
                zeros = jnp.zeros(cell.aval.shape, cell.aval.dtype)
                updates.append([left[cell][1] if has_written else zeros])
            else:
                value = left[cell][1] if has_written else self.lift.own_copy(cell)
                updates.append([value, jnp.asarray(has_written)])
        values = []
        for variable in held:
            assert self.holder is not None
            before = self.holder.values([variable])[0]
            values.append(own.get(id(variable), before))
        return result, updates, values


def _communicates(trace: _Trace) -> bool:
    return any(is_collective(each) or has_collectives(each) for each in trace.jaxpr.eqns)


def _agreed(choice: Any, lift: Lift) -> jax.Array:
    """Returns what all replicas have chosen, an index or a truth value.

    The program raises a `LockstepError` if they have not chosen the same: those that choose to
    communicate would wait for the others forever.
    """
    choice = jnp.asarray(choice)
    if lift.placement.num_replicas == 1:
        return choice
    number = choice.astype(jnp.int32)
    lowest, highest = lax.pmin(number, REPLICA_AXIS), lax.pmax(number, REPLICA_AXIS)
    place = users_line()

    def disagree(number: Any) -> Any:
        raise LockstepError(
            f"{place}: some replicas take this branch, or go on with this loop, and others do "
            "not, but it has a collective operation (an all-reduce, the update of an optimizer, a "
            "variable that is read after replicas have added to it), for which all must be there. "
            "Reduce the condition over the replicas first, or move the operation out."
        )

    def refused(number: jax.Array) -> jax.Array:
        return jax.pure_callback(disagree, jax.ShapeDtypeStruct((), jnp.int32), number)

    common = lax.cond(lowest == highest, lambda number: number, refused, highest)
    return common.astype(choice.dtype)


def _value(lift: Lift, cell: Cell, left: dict[Cell, tuple[_Kind, jax.Array]]) -> jax.Array:
    """Returns the value of a cell at the end of a body, with its updates combined."""
    if cell not in left:
        return lift.own_copy(cell)
    kind, array = left[cell]
    if kind is _Kind.VALUE:
        return array
    (combined,) = combine_writes([cell], [array])
    return combined if kind is _Kind.ASSIGNED else lift.own_copy(cell) + combined


def _common_kinds(traces: Sequence[_Trace]) -> dict[Cell, _Kind]:
    """Returns the kind of write for each cell: that of all branches that write it, else `VALUE`."""
    kinds: dict[Cell, _Kind] = {}
    for trace in traces:
        for cell, kind in trace.kinds.items():
            kinds[cell] = kind if kinds.get(cell, kind) is kind else _Kind.VALUE
    return kinds


def _same_variable(leaves: Sequence[Any]) -> Any:
    """Returns the variable that all branches return at one place, or None."""
    first = leaves[0]
    return first if first is not None and all(leaf is first for leaf in leaves) else None


def _apply(
    lift: Lift, cell: Cell, kind: _Kind, update: Sequence[jax.Array], diverges: bool
) -> None:
    """Applies the write to the cell that the taken branch left."""
    if kind is _Kind.ADDED:
        lift.add(cell, update[0])
        return
    value = update[0]
    if kind is _Kind.ASSIGNED:
        value = _combined_of_those_who_assigned(lift, cell, *update)
    if diverges:
        lift.update(cell, lambda _: value)
        return
    with lift.equal_writes():
        lift.update(cell, lambda _: value)


def _combined_of_those_who_assigned(
    lift: Lift, cell: Cell, value: jax.Array, has_assigned: jax.Array
) -> jax.Array:
    """Combines the values of the replicas that took an assigning branch; returns the old value if
    none did.
    """
    if cell.is_alone:
        return value
    counts = has_assigned
    if cell.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        counts = has_assigned & (lax.axis_index(REPLICA_AXIS) == 0)
    share = jnp.where(counts, value, jnp.zeros_like(value))
    total, number = all_reduce_packed([share, counts.astype(jnp.int32)])
    if cell.aggregation is VariableAggregation.MEAN:
        total = total / jnp.maximum(number, 1)
    return jnp.where(number > 0, total.astype(value.dtype), lift.own_copy(cell))
