"""Replaces a traced function's collective operations with exchanges through shared memory.

It works on the traced function, like `unison.lowering`, so that it also finds collective operations
that users wrote with `jax.lax`, and those of gradients. Every operation takes a ticket and returns
the next one: the tickets define the order in which a replica performs the operations, which must be
the same on all replicas, and which XLA could otherwise choose differently in every process.
Operations that are left to XLA also pass the ticket on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from unison.jaxprs import (
    asks_for_replica,
    bound_variables,
    evaluate,
    has_collectives,
    inlined_body,
    is_collective,
    needed_equations,
    value_of,
)
from unison.runtime.private_jax import added_as_traced, in_scopes_of, scan_with
from unison.runtime.shared_memory.library import InProcess, Kind, Ticket, exchange

logger = logging.getLogger("unison")

_REDUCTIONS = {
    "psum": Kind.SUM,
    "psum_invariant": Kind.SUM,
    "pmax": Kind.MAX,
    "pmin": Kind.MIN,
}

#: Operations that may write their results over their operands.
_KEEPS_SHAPE = frozenset({Kind.SUM, Kind.MAX, Kind.MIN, Kind.PASS})

#: Operations whose result is a view of their operand, if it has as many elements.
_VIEWS = frozenset("reshape squeeze broadcast_in_dim slice expand_dims".split())

#: The replicas of every machine.
_Hosts = Sequence[Sequence[int]]


class Ticketed:
    """A function whose collective operations use shared memory; see `SharedMemory.program`.

    Args:
        function: The function.
        hosts: The replicas of every machine.
        here: The replicas, if all are in this process.
    """

    def __init__(self, function: Callable[..., Any], hosts: _Hosts, here: InProcess | None = None):
        self._function = function
        self._hosts = hosts
        self._here = here

    def __call__(self, ticket: jax.Array, *args: Any) -> tuple[jax.Array, Any]:
        leaves, tree = jax.tree.flatten(args)
        closed, shapes = jax.make_jaxpr(
            lambda *flat: self._function(*jax.tree.unflatten(tree, flat)), return_shape=True
        )(*leaves)
        run = _Run(ticket, self._hosts, leaves, here=self._here)
        outputs = run.function(closed, leaves)
        return run.ticket, jax.tree.unflatten(jax.tree.structure(shapes), outputs)


class Transaction:
    """A function of the replicas of an elastic group, which takes effect as a whole or not at all.

    It is called with a ticket and the arguments, where the replica axis is bound with any size: the
    replicas' numbers are in their tickets, and all collective operations are exchanges. If one of
    them fails, the following ones fail, too, and the ticket records it. The results are then those
    of `unchanged`.

    Args:
        function: The function.
        axis: The replicas' axis.
        num_replicas: The number of replicas of the group.
        unchanged: Maps the arguments and the results to the results to return if the function does
            not take effect. Default: the results are then undefined.
        is_a_loop: Whether the function is a loop of steps, each of which is a transaction: the
            final carry is then that of the last step that took effect.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        axis: str,
        num_replicas: int,
        unchanged: Callable[[Sequence[Any], Any], Any] | None = None,
        is_a_loop: bool = False,
    ):
        self._is_a_loop = is_a_loop
        self._function = function
        self._axis = axis
        self._num_replicas = num_replicas
        self._unchanged = unchanged

    def __call__(self, ticket: jax.Array, *args: Any) -> tuple[jax.Array, jax.Array, Any]:
        """Returns the next ticket, a copy of it to wait for, and the results."""
        leaves, tree = jax.tree.flatten(args)
        closed, shapes = jax.make_jaxpr(
            lambda *flat: self._function(*jax.tree.unflatten(tree, flat)),
            axis_env=[(self._axis, self._num_replicas)],
            return_shape=True,
        )(*leaves)
        structure: Any = jax.tree.structure(shapes)
        run = _Run(ticket, [range(self._num_replicas)], leaves, may_fail=True)
        run.is_a_loop_of_steps = self._is_a_loop
        if self._unchanged is None:
            outputs = run.function(closed, leaves)
        else:
            results = [object() for _ in range(structure.num_leaves)]
            before = self._unchanged(args, jax.tree.unflatten(structure, results))
            pairs = zip(results, jax.tree.leaves(before), strict=True)
            outputs = run.step(closed, leaves, [None if old is new else old for new, old in pairs])
        return run.ticket, jnp.copy(run.ticket), jax.tree.unflatten(structure, outputs)


class _Run:
    """Evaluates a traced function, and threads the ticket through its operations."""

    def __init__(
        self,
        ticket: jax.Array,
        hosts: _Hosts,
        arguments: Sequence[Any],
        may_fail: bool = False,
        here: InProcess | None = None,
    ):
        self.ticket = ticket
        self._hosts = hosts
        #: The replicas, if all are in this process.
        self._here = here
        #: Whether a branch is evaluated, which some replicas may not take. They exchange with those
        #: who do what other branches have in its place.
        self._is_in_branch = False
        #: Whether exchanges may fail; then the axis of the devices is not that of the replicas.
        self._may_fail = may_fail
        #: Whether any operation so far needed the other replicas.
        self.has_exchanged = False
        #: Whether the first loop is a loop of steps, each of which is committed.
        self.is_a_loop_of_steps = False
        #: Arrays that the caller may still need, by identity: no operation overwrites them.
        self._arguments = {id(argument): argument for argument in arguments}
        self._forms: dict[str, Callable[..., Sequence[jax.Array]]] = {
            "while": self._while,
            "scan": self._scan,
            "cond": self._cond,
        }

    def commit(self) -> None:
        """Decides, for all replicas of this process, whether the operations so far take effect."""
        self.ticket, _ = exchange(Kind.COMMIT, "commit", self.ticket, [], [], [])

    @property
    def is_well(self) -> jax.Array:
        """Whether no exchange has failed so far."""
        return self.ticket[0, Ticket.FAILED] == 0

    def function(self, closed: jex.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Returns the results of `closed`.

        Where all replicas perform the same operations, those whose results nobody needs are left
        out: tickets pass through exchanges, so XLA would keep them.
        """
        values = bound_variables(closed, args)
        all_do_the_same = self._here and not self._is_in_branch
        needed = needed_equations(closed.jaxpr) if all_do_the_same else closed.jaxpr.eqns
        for equations in _in_groups(needed):
            values |= self._evaluated(equations, values)
        return [value_of(atom, values) for atom in closed.jaxpr.outvars]

    def step(
        self, closed: jex.ClosedJaxpr, args: Sequence[Any], before: Sequence[Any]
    ) -> list[Any]:
        """Returns the results of a step of all members, which takes effect on all or on none.

        Whether it does is known after the last exchange. Operations that can run after it use the
        selected results: if new moments were selected only at the end, XLA would update weights
        with moments that it computes a second time, and copy the old ones to do so.

        Args:
            closed: The step.
            args: Its arguments.
            before: The results if it does not take effect; None for a result that is then
                undefined.
        """
        values = bound_variables(closed, args)
        first, then = _divided(closed.jaxpr.eqns)
        for equations in _in_groups(first):
            values |= self._evaluated(equations, values)
        if self.has_exchanged:
            self.commit()
        has_effect = self.is_well

        def selected(new: Any, old: Any) -> Any:
            return new if old is None or new is old else jnp.where(has_effect, new, old)

        results = closed.jaxpr.outvars
        old_of = dict(zip(map(id, results), before, strict=True))
        chosen: dict[int, Any] = {}
        for equation in then:
            for variable, new in self._evaluated([equation], values).items():
                chosen[id(variable)] = old_of.get(id(variable))
                values[variable] = selected(new, chosen[id(variable)])
        return [
            value if chosen.get(id(atom)) is old else selected(value, old)
            for atom, value, old in zip(
                results, (value_of(atom, values) for atom in results), before, strict=True
            )
        ]

    def _evaluated(
        self, equations: Sequence[jex.JaxprEqn], values: dict[jex.Var, Any]
    ) -> dict[jex.Var, Any]:
        """Returns the results of an equation, or of several reductions like it."""
        inputs = [value_of(atom, values) for equation in equations for atom in equation.invars]
        equation = equations[0]
        if self._is_local(equation):
            outputs = added_as_traced(equation, inputs)
        else:
            with in_scopes_of(equation):
                outputs = self._of_all_replicas(equation, inputs)
        if _is_view(equation) and id(inputs[0]) in self._arguments:
            self._arguments[id(outputs[0])] = outputs[0]
        variables = [variable for equation in equations for variable in equation.outvars]
        return dict(zip(variables, outputs, strict=True))

    def _is_local(self, equation: jex.JaxprEqn) -> bool:
        """Whether the equation is the same in a program without tickets."""
        if is_collective(equation) or has_collectives(equation):
            return False
        return not (self._may_fail and asks_for_replica(equation))

    def _of_all_replicas(self, equation: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        """Returns the outputs of an equation, or of several reductions like it."""
        if is_collective(equation):
            return self._collective(equation, inputs)
        if equation.primitive.name == "axis_index":
            return [self.ticket[0, Ticket.RANK].astype(jnp.int32)]
        if (body := inlined_body(equation)) is not None:
            return self.function(body, inputs)
        form = self._forms.get(equation.primitive.name)
        if form is None:
            return self._elsewhere(equation, inputs)
        return form(equation.params, inputs)

    # -- loops and conditionals, which carry the ticket along --------------------------------

    def _while(self, params: dict[str, Any], inputs: list[Any]) -> Sequence[Any]:
        of_condition = inputs[: params["cond_nconsts"]]
        of_body = inputs[len(of_condition) : len(of_condition) + params["body_nconsts"]]
        start = inputs[len(of_condition) + len(of_body) :]
        commits, self.is_a_loop_of_steps = self.is_a_loop_of_steps, False

        def goes_on(values: list[Any]) -> Any:
            going_on = self.function(params["cond_jaxpr"], [*of_condition, *values])[0]
            # The output of a failed exchange could make the loop run forever.
            return going_on & self.is_well if self._may_fail else going_on

        def body(carry: tuple[Any, Any, list[Any]]) -> tuple[Any, Any, list[Any]]:
            self.ticket, _, before = carry
            if commits:
                values = self.step(params["body_jaxpr"], [*of_body, *before], before)
            else:
                values = self.function(params["body_jaxpr"], [*of_body, *before])
            # The condition may hold collective operations as well, so it is evaluated here.
            going_on = goes_on(values)
            return self.ticket, going_on, values

        going_on = goes_on(start)
        carry = lax.while_loop(lambda carry: carry[1], body, (self.ticket, going_on, start))
        self.ticket, _, values = carry
        return values

    def _scan(self, params: dict[str, Any], inputs: list[Any]) -> Sequence[Any]:
        def step(ticket: Any, given: list[Any]) -> tuple[Any, Sequence[Any]]:
            self.ticket = ticket
            outputs = self.function(params["jaxpr"], given)
            return self.ticket, outputs

        self.ticket, results = scan_with(step, params, inputs, self.ticket)
        return results

    def _cond(self, params: dict[str, Any], inputs: list[Any]) -> Sequence[Any]:
        def branch_of(closed: jex.ClosedJaxpr) -> Callable[..., Any]:
            def branch(ticket: jax.Array, *args: Any) -> tuple[jax.Array, list[Any]]:
                outer, self._is_in_branch = self._is_in_branch, True
                self.ticket = ticket
                outputs = self.function(closed, args)
                self._is_in_branch = outer
                return self.ticket, outputs

            return branch

        branches = [branch_of(closed) for closed in params["branches"]]
        index, *args = inputs
        self.ticket, outputs = lax.switch(index, branches, self.ticket, *args)
        return outputs

    # -- collective operations ---------------------------------------------------------------

    def _collective(self, equation: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        params = equation.params
        arrays = [jnp.asarray(value) for value in inputs]
        name = equation.primitive.name
        if params.get("axis_index_groups") is not None:
            return self._elsewhere(equation, arrays)
        if name in _REDUCTIONS and not any(_has_no_sum(array) for array in arrays):
            if len(self._hosts) == 1:
                return self._reduced(_REDUCTIONS[name], arrays)
            if name in ("psum", "psum_invariant"):
                return self._summed_over_hosts(arrays, _axis(params["axes"]))
        if len(self._hosts) > 1:
            return self._by_xla(equation, arrays)
        if name == "all_gather":
            return [self._gathered(arrays[0], params["all_gather_dimension"], params["tiled"])]
        if name == "reduce_scatter" and not _has_no_sum(arrays[0]):
            return [self._scattered(arrays[0], params["scatter_dimension"], params["tiled"])]
        if name == "all_to_all":
            places = params["split_axis"], params["concat_axis"]
            return [self._sent_to_all(arrays[0], *places)]
        if name == "ppermute":
            return [self._permuted(arrays[0], params["perm"])]
        return self._elsewhere(equation, arrays)

    def _exchange(
        self,
        kind: Kind,
        arrays: Sequence[jax.Array],
        shapes: Sequence[tuple[int, ...]],
        senders: Sequence[int] = (),
    ) -> list[jax.Array]:
        words = f"{kind.name.lower()} of {', '.join(map(_described, arrays[:3]))}"
        if senders:
            words += f" from {list(senders)}"
        if len(arrays) > 3:
            size = sum(array.size for array in arrays[3:])
            words += f" and {len(arrays) - 3} more of {size} elements"
        self.has_exchanged |= kind is not Kind.PASS
        in_place = [kind in _KEEPS_SHAPE and id(array) not in self._arguments for array in arrays]
        self.ticket, outputs = exchange(
            kind, words, self.ticket, arrays, shapes, in_place, senders, self._here
        )
        return outputs

    def _elsewhere(self, equation: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        """Performs an operation without its own exchange: by XLA, if it knows all replicas."""
        if not self._may_fail:
            return self._by_xla(equation, inputs)
        name = equation.primitive.name
        if name not in _REDUCTIONS or equation.params.get("axes") is None:
            raise NotImplementedError(
                "Expected a collective operation that elastic jobs support: psum, pmax, pmin, "
                "all_gather, reduce_scatter, ppermute or all_to_all, outside custom derivatives. "
                f"Received: {name} with {equation.params}. Run the program without --min-workers, "
                "or rewrite it with these."
            )
        groups = equation.params.get("axis_index_groups")
        return [self._reduced_by_gathering(_REDUCTIONS[name], x, groups) for x in inputs]

    def _reduced_by_gathering(
        self, kind: Kind, array: jax.Array, groups: Sequence[Sequence[int]] | None
    ) -> jax.Array:
        """Reduces within the replica's own group, or dtypes that exchanges cannot add."""
        count = len(self._hosts[0])
        (of_all,) = self._exchange(Kind.GATHER, [array], [(count, *array.shape)])
        members = np.ones((count, count), bool)
        if groups is not None:
            members[:] = False
            for group in groups:
                members[np.ix_(group, group)] = True
        own = jnp.asarray(members)[self.ticket[0, Ticket.RANK]]
        own = own.reshape(-1, *(1 for _ in array.shape))
        if kind is Kind.SUM:
            return jnp.sum(jnp.where(own, of_all, 0), 0, dtype=array.dtype)
        reduce = jnp.max if kind is Kind.MAX else jnp.min
        mine = of_all[self.ticket[0, Ticket.RANK].astype(jnp.int32)]
        return reduce(jnp.where(own, of_all, mine), 0)

    def _by_xla(self, equation: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        """Leaves an operation to XLA, between the exchanges before and after it."""
        inputs = self._passed(inputs)
        if equation.primitive.name in _REDUCTIONS:  # possibly several grouped equations
            return self._passed([out for x in inputs for out in evaluate(equation, [x])])
        return self._passed(evaluate(equation, inputs))

    def _passed(self, values: Sequence[Any]) -> list[jax.Array]:
        arrays = [jnp.asarray(value) for value in values]
        return self._exchange(Kind.PASS, arrays, [array.shape for array in arrays])

    def _reduced(self, kind: Kind, arrays: list[jax.Array]) -> list[jax.Array]:
        """Reduces arrays with one operation for each dtype."""
        _say(kind, arrays, f"through the memory of {len(self._hosts[0])} replicas")
        results: dict[int, jax.Array] = {}
        for indices in _by_dtype(arrays):
            group = [arrays[index] for index in indices]
            # For complex numbers, the real and imaginary parts are added.
            parts = [_parts(array) for array in group]
            totals = self._exchange(kind, parts, [part.shape for part in parts])
            for index, total in zip(indices, totals, strict=True):
                results[index] = _whole(total, arrays[index])
        return [results[index] for index in range(len(arrays))]

    def _summed_over_hosts(self, arrays: list[jax.Array], axis: str) -> list[jax.Array]:
        """Sums within each machine first, and then between machines.

        Each replica of a machine exchanges its part of the machine's sum with its counterparts on
        the other machines, so that all bytes between two machines are sent only once.
        """
        local = len(self._hosts[0])
        _say(
            Kind.SUM,
            arrays,
            f"hierarchically, on {len(self._hosts)} machines with {local} replicas each",
        )
        counterparts = [list(team) for team in zip(*self._hosts, strict=True)]
        results: dict[int, jax.Array] = {}
        for indices in _by_dtype(arrays):
            group = [_parts(arrays[index]) for index in indices]
            size = sum(part.size for part in group)
            length = math.ceil(size / local)
            vector = jnp.zeros(length * local, group[0].dtype)
            start = 0
            for part in group:
                vector = lax.dynamic_update_slice(vector, part.reshape(-1), (start,))
                start += part.size
            (part,) = self._exchange(Kind.SUM_AND_SCATTER, [vector], [(length,)])
            part = lax.psum(part, axis, axis_index_groups=counterparts)
            (whole,) = self._exchange(Kind.GATHER, [part], [(local, length)])
            whole = whole.reshape(-1)
            start = 0
            for index, part in zip(indices, group, strict=True):
                piece = lax.slice(whole, (start,), (start + part.size,)).reshape(part.shape)
                results[index] = _whole(piece, arrays[index])
                start += part.size
        return [results[index] for index in range(len(arrays))]

    def _gathered(self, array: jax.Array, axis: int, tiled: bool) -> jax.Array:
        count = len(self._hosts[0])
        (stacked,) = self._exchange(Kind.GATHER, [array], [(count, *array.shape)])
        if not tiled:
            return jnp.moveaxis(stacked, 0, axis)
        shape = (*array.shape[:axis], count * array.shape[axis], *array.shape[axis + 1 :])
        return jnp.moveaxis(stacked, 0, axis).reshape(shape)

    def _scattered(self, array: jax.Array, axis: int, tiled: bool) -> jax.Array:
        rows = jnp.moveaxis(array, axis, 0)
        rest = rows.shape[1:]
        shape = (rows.shape[0] // len(self._hosts[0]), *rest) if tiled else rest
        (own,) = self._exchange(Kind.SUM_AND_SCATTER, [_parts(rows)], [_parts_shape(shape, array)])
        own = _whole(own, array)
        return jnp.moveaxis(own, 0, axis) if tiled else own

    def _sent_to_all(self, array: jax.Array, split: int, join: int) -> jax.Array:
        count = len(self._hosts[0])
        blocks = jnp.moveaxis(array, split, 0)
        blocks = blocks.reshape(count, blocks.shape[0] // count, *blocks.shape[1:])
        (received,) = self._exchange(Kind.ALL_TO_ALL, [blocks], [blocks.shape])
        parts = jnp.moveaxis(received, 1, split + 1)
        shape = list(parts.shape[1:])
        shape[join] *= count
        return jnp.moveaxis(parts, 0, join).reshape(shape)

    def _permuted(self, array: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        senders = [-1] * len(self._hosts[0])
        for sender, receiver in pairs:
            senders[receiver] = sender
        (received,) = self._exchange(Kind.PERMUTE, [array], [array.shape], senders)
        return received


def _say(kind: Kind, arrays: Sequence[jax.Array], how: str) -> None:
    mebibytes = sum(array.nbytes for array in arrays) / 2**20
    logger.debug("A %s of %d arrays, %.3f MiB: %s", kind.name, len(arrays), mebibytes, how)


def _described(array: jax.Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _by_dtype(arrays: Sequence[jax.Array]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(array.dtype, []).append(index)
    return list(groups.values())


def _has_no_sum(array: jax.Array) -> bool:
    """Returns whether `exchange.cc` cannot add this dtype (8-bit floating-point numbers, ...)."""
    return array.dtype.name not in _SUMMED


_SUMMED = frozenset(
    "float16 bfloat16 float32 float64 complex64 complex128 "
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
)


def _parts(array: jax.Array) -> jax.Array:
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array
    return jnp.stack([array.real, array.imag], -1)


def _parts_shape(shape: tuple[int, ...], like: jax.Array) -> tuple[int, ...]:
    return (*shape, 2) if jnp.issubdtype(like.dtype, jnp.complexfloating) else shape


def _whole(parts: jax.Array, like: jax.Array) -> jax.Array:
    if not jnp.issubdtype(like.dtype, jnp.complexfloating):
        return parts
    return lax.complex(parts[..., 0], parts[..., 1])


def _axis(axes: Any) -> str:
    (axis,) = axes if isinstance(axes, tuple) else (axes,)
    return axis


def _divided(
    equations: Sequence[jex.JaxprEqn],
) -> tuple[list[jex.JaxprEqn], list[jex.JaxprEqn]]:
    """Returns the collective operations with their dependencies, and the other ones; in order."""
    first: list[jex.JaxprEqn] = []
    then: list[jex.JaxprEqn] = []
    needed: set[Any] = set()
    for equation in reversed(equations):
        is_first = (
            is_collective(equation)
            or has_collectives(equation)
            or bool(equation.effects)
            or not needed.isdisjoint(equation.outvars)
        )
        if is_first:
            needed |= {atom for atom in equation.invars if not isinstance(atom, jex.Literal)}
        (first if is_first else then).append(equation)
    return first[::-1], then[::-1]


def _in_groups(equations: Sequence[jex.JaxprEqn]) -> Iterator[list[jex.JaxprEqn]]:
    """Yields equations in order; those that reduce arrays in the same way are grouped.

    JAX creates an equation for each array, and exchanging many together takes less time.
    """
    group: list[jex.JaxprEqn] = []
    made: set[Any] = set()
    for equation in equations:
        needs = {atom for atom in equation.invars if not isinstance(atom, jex.Literal)}
        if group and not (_reduces_like(equation, group[0]) and made.isdisjoint(needs)):
            yield group
            group = []
            made = set()
        group.append(equation)
        made.update(equation.outvars)
    if group:
        yield group


def _is_view(equation: jex.JaxprEqn) -> bool:
    """Returns whether the result of an operation consists of the bytes of its operand."""
    if equation.primitive.name not in _VIEWS:
        return False
    operand: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    return math.prod(operand.shape) == math.prod(result.shape)


def _reduces_like(equation: jex.JaxprEqn, other: jex.JaxprEqn) -> bool:
    return (
        equation.primitive.name in _REDUCTIONS
        and equation.primitive is other.primitive
        and equation.params == other.params
    )
