"""Replicas with different shapes in one program.

XLA programs have static shapes and every device runs the same program, yet the last batch of an
epoch may give the replicas different numbers of examples, and one of them none. Padding would be
visible: a function may count its examples. So the function is traced once for each *class* of
replicas (those with equal shapes: at most three in practice), the traces are split at their
collective operations, and the segments are combined into one program: between two collectives each
device takes the branch of its class (`lax.switch`), and the collectives themselves are shared by
all. No computation is repeated, and only values that cross a collective are padded.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from unison.collectives.presence import SCOPE_OF_OPERATION
from unison.jaxprs import evaluate, has_collectives, inlined_body, is_collective
from unison.runtime.placement import REPLICA_AXIS
from unison.runtime.private_jax import in_scopes_of, scopes_of

#: A conditional with collectives is one synchronization point (a meeting) if the shapes of its
#: operands and its branches are the same in all classes; each replica uses its own predicate.
_CONDITIONAL = "cond"


class LockstepError(ValueError):
    """The replicas' traces do not perform the same collective operations."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByClass:
    """A result whose shape depends on the replica's class: one array per class.

    On a device, only the array of the device's own class holds the result.
    """

    arrays: tuple[jax.Array, ...]


def run_in_lockstep(
    bodies: Sequence[Callable[..., Any]],
    class_of_replica: Sequence[int],
    axis_name: str = REPLICA_AXIS,
) -> Callable[..., Any]:
    """Returns a function that computes `bodies[class_of_replica[r]]` on replica r.

    Call it where the replica axis is bound (inside `jax.shard_map`), with arguments of equal shapes
    on all replicas. Its result is a tree like those of the bodies; leaves that differ in shape
    between the classes are `ByClass`.

    Raises:
        LockstepError: The bodies perform different collective operations, or one inside a loop
            or a conditional, or their results differ in structure.
    """
    if len(bodies) == 1:
        return bodies[0]

    def run(*args: Any) -> Any:
        flat_args, args_tree = jax.tree.flatten(args)
        trees = []
        traces = []
        for body in bodies:

            def flat_body(*flat: Any, body: Callable[..., Any] = body) -> list[Any]:
                results, tree = jax.tree.flatten(body(*jax.tree.unflatten(args_tree, flat)))
                trees.append(tree)
                return results

            traces.append(_Trace.of(jax.make_jaxpr(flat_body)(*flat_args)))
        if len(set(trees)) > 1:
            raise LockstepError(
                f"The function must return the same structure on all replicas. Received: {trees}"
            )
        _check_meeting_points(traces)
        own_class = jnp.asarray(class_of_replica)[lax.axis_index(axis_name)]
        return jax.tree.unflatten(trees[0], _weave(traces, own_class, flat_args))

    return run


def operations_that_differ(jaxprs: Sequence[jex.ClosedJaxpr]) -> set[int]:
    """Returns the numbers of the operations (`combined_by`) that the classes perform differently.

    Args:
        jaxprs: The traces of all classes, or of some.
    """
    if len(jaxprs) < 2:
        return set()
    try:
        counts = [collections.Counter(_Trace.of(jaxpr).numbers()) for jaxpr in jaxprs]
    except LockstepError:  # in a loop: the program will say so
        return set()
    return {number for number in set().union(*counts) if len({c[number] for c in counts}) > 1}


@dataclasses.dataclass
class _Operation:
    """An equation whose variables are replaced by slots of one flat program.

    Attributes:
        callers: The calls that are inlined around it, outermost first.
    """

    equation: jex.JaxprEqn
    inputs: list[int]
    outputs: list[int]
    callers: tuple[jex.JaxprEqn, ...] = ()

    def evaluate(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns its results on `inputs`, in the named scopes in which it was traced."""
        with contextlib.ExitStack() as scopes:
            for equation in (*self.callers, self.equation):
                scopes.enter_context(in_scopes_of(equation))
            return evaluate(self.equation, inputs)


class _Trace:
    """A traced body as a flat list of operations, split at each collective.

    Attributes:
        segments: Lists of operations; every segment but the last ends before a collective.
        meetings: The collectives between the segments.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.avals: dict[int, Any] = {}
        self.constants: dict[int, Any] = {}
        self.arguments: list[int] = []
        self.results: list[int] = []
        self.segments: list[list[_Operation]] = [[]]
        self.meetings: list[_Operation] = []

    @classmethod
    def of(cls, closed: jex.ClosedJaxpr) -> _Trace:
        trace = cls()
        trace.arguments = [trace._slot(var.aval) for var in closed.jaxpr.invars]
        trace.results = trace._emit(closed.jaxpr, closed.consts, trace.arguments)
        return trace

    def _slot(self, aval: Any) -> int:
        number = next(self._numbers)
        self.avals[number] = aval
        return number

    def _constant(self, value: Any, aval: Any) -> int:
        number = self._slot(aval)
        self.constants[number] = value
        return number

    def _emit(
        self,
        jaxpr: jex.Jaxpr,
        consts: Sequence[Any],
        arguments: list[int],
        callers: tuple[jex.JaxprEqn, ...] = (),
    ) -> list[int]:
        """Appends the operations of `jaxpr`; returns the slots of its results."""
        slots = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            slots[var] = self._constant(value, var.aval)

        def slot(atom: Any) -> int:
            return (
                self._constant(atom.val, atom.aval)
                if isinstance(atom, jex.Literal)
                else slots[atom]
            )

        for equation in jaxpr.eqns:
            inputs = [slot(atom) for atom in equation.invars]
            if _is_meeting(equation):
                outputs = [self._slot(var.aval) for var in equation.outvars]
                self.meetings.append(_Operation(equation, inputs, outputs, callers))
                self.segments.append([])
            elif not has_collectives(equation):
                outputs = [self._slot(var.aval) for var in equation.outvars]
                self.segments[-1].append(_Operation(equation, inputs, outputs, callers))
            elif (body := inlined_body(equation)) is not None:
                outputs = self._emit(body.jaxpr, body.consts, inputs, (*callers, equation))
            else:
                raise LockstepError(_inside(equation.primitive.name))
            slots.update(zip(equation.outvars, outputs, strict=True))
        return [slot(atom) for atom in jaxpr.outvars]

    def numbers(self) -> Iterator[int]:
        """Yields the numbers of the operations to which the collectives belong."""
        for meeting in self.meetings:
            scopes = scopes_of(meeting.equation)
            yield from map(int, re.findall(rf"{SCOPE_OF_OPERATION}(\d+)", scopes)[-1:])

    def needed_after(self, segment: int) -> list[int]:
        """Returns the slots that are computed up to `segment`, and used after the collective
        that follows it.
        """
        computed = {
            slot for ops in self.segments[: segment + 1] for op in ops for slot in op.outputs
        }
        later = [op for ops in self.segments[segment + 1 :] for op in ops]
        used = {slot for op in [*later, *self.meetings[segment + 1 :]] for slot in op.inputs}
        return sorted(computed & (used | set(self.results)))


def _is_meeting(equation: jex.JaxprEqn) -> bool:
    """Whether an operation is a synchronization point of all replicas."""
    if equation.primitive.name == _CONDITIONAL:
        return has_collectives(equation)
    if equation.primitive.name == "shard_map":  # each core of a replica performs it separately
        inner = equation.params["jaxpr"].eqns
        return len(inner) == 1 and is_collective(inner[0])
    return is_collective(equation)


def _check_meeting_points(traces: Sequence[_Trace]) -> None:
    first, *others = (
        [_Meeting.of(operation, trace) for operation in trace.meetings] for trace in traces
    )
    for other in others:
        if other == first:
            continue
        pairs = itertools.zip_longest(first, other)
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        if any(meeting is not None and meeting.name == _CONDITIONAL for meeting in (here, there)):
            raise LockstepError(_inside(_CONDITIONAL))
        raise LockstepError(
            "Replicas with different shapes must perform the same collective operations on values "
            f"of the same shapes. One replica performs {here or 'none'}, another "
            f"{there or 'none'}. Reduce over the batch before the collective operation, or give "
            "every replica the same shapes (drop the uneven last batch)."
        )


def _inside(name: str) -> str:
    return (
        f"A collective operation inside {name!r} (a loop or a conditional) cannot be shared by "
        "replicas whose shapes differ. Move it out, or give every replica the same shapes (drop "
        "the uneven last batch)."
    )


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """The properties that must be equal for replicas to share a collective operation."""

    name: str
    operands: tuple[str, ...]
    parameters: str

    @classmethod
    def of(cls, operation: _Operation, trace: _Trace) -> _Meeting:
        avals = [trace.avals[slot] for slot in operation.inputs]
        parameters = sorted(operation.equation.params.items())
        return cls(
            operation.equation.primitive.name,
            tuple(f"{aval.dtype}[{','.join(map(str, aval.shape))}]" for aval in avals),
            ", ".join(f"{name}={value}" for name, value in parameters if value is not None),
        )

    def __str__(self) -> str:
        return f"{self.name} of {', '.join(self.operands)} ({self.parameters})"


def _weave(traces: Sequence[_Trace], own_class: jax.Array, args: Sequence[Any]) -> list[Any]:
    """Runs the traces' segments as the branches of switches, with the collectives in between."""
    known: list[dict[int, Any]] = [
        {**trace.constants, **dict(zip(trace.arguments, args, strict=True))} for trace in traces
    ]
    for index, meetings in enumerate(zip(*(trace.meetings for trace in traces), strict=True)):
        kept = [trace.needed_after(index) for trace in traces]
        shared = [meeting.inputs for meeting in meetings]
        operands, kept_values = _switch(traces, index, own_class, known, shared, kept)
        for values, slots, arrays in zip(known, kept, kept_values, strict=True):
            values.update(zip(slots, arrays, strict=True))
        outputs = meetings[0].evaluate(operands)
        for values, meeting in zip(known, meetings, strict=True):
            values.update(zip(meeting.outputs, outputs, strict=True))

    results = [trace.results for trace in traces]
    avals = [
        [trace.avals[slot] for slot in slots] for trace, slots in zip(traces, results, strict=True)
    ]
    alike = [len({(a.shape, a.dtype) for a in leaf}) == 1 for leaf in zip(*avals, strict=True)]
    shared = [_pick(slots, alike, True) for slots in results]
    differing = [_pick(slots, alike, False) for slots in results]
    common, own = _switch(traces, len(traces[0].meetings), own_class, known, shared, differing)
    by_class = map(ByClass, zip(*own, strict=True))
    common_leaves = iter(common)
    return [next(common_leaves) if same else next(by_class) for same in alike]


def _switch(
    traces: Sequence[_Trace],
    segment: int,
    own_class: jax.Array,
    known: Sequence[dict[int, Any]],
    shared: Sequence[list[int]],
    own: Sequence[list[int]],
) -> tuple[list[Any], list[list[Any]]]:
    """Runs one segment of the device's class.

    Returns the values of the slots `shared[class]`, which have the same shapes in all classes, and
    for every class those of `own[class]`, which are placeholders on devices of other classes.
    """

    def branch_of(index: int) -> Callable[[], Any]:
        def branch() -> Any:
            values = dict(known[index])
            for operation in traces[index].segments[segment]:
                inputs = [values[slot] for slot in operation.inputs]
                outputs = operation.evaluate(inputs)
                values.update(zip(operation.outputs, outputs, strict=True))
            kept = [
                [
                    values[slot] if other == index else _filler(traces[other].avals[slot])
                    for slot in own[other]
                ]
                for other in range(len(traces))
            ]
            return [values[slot] for slot in shared[index]], kept

        return branch

    return lax.switch(own_class, [branch_of(index) for index in range(len(traces))])


def _filler(aval: Any) -> jax.Array:
    return jnp.zeros(aval.shape, aval.dtype)


def _pick(slots: Sequence[int], flags: Sequence[bool], wanted: bool) -> list[int]:
    return [slot for slot, flag in zip(slots, flags, strict=True) if flag is wanted]
