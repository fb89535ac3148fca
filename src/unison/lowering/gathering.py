"""Gathers divided weights where they are used, and lets go of them in between.

A step of weights that the replicas divide (`zero=3`) is traced as one of whole weights: all of them
are gathered as it begins, and each stays from its use in the forward pass to that in the backward
pass. Here the gathering is moved to the uses, and done again where others have been gathered since:
a device has a few whole weights at a time, and is sent most of them twice in a step (Rajbhandari et
al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 7.2.2).

A loop over layers (`jax.lax.scan`) whose weights are stacked gathers those of one layer in each of
its steps, and the loop that finds their gradients does so again, and scatters those of a layer as
soon as they are there. What the first loop would keep of whole weights for the second, it does not.

It works on the traced step, like the rest of this room, so that it does not matter who has taken
the gradient, or how.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from unison.equations import evaluate
from unison.runtime.placement import REPLICA_AXIS
from unison.runtime.private_jax import in_scopes_of, operands_of_scan, scan_with

#: What was used last is kept for further uses, up to so many times the size of its largest weight:
#: that of a layer, mostly, and of the last layer until its gradient begins.
_KEPT = 2

#: Operations that give a weight another form, which is no more worth keeping than the weight.
_FORMS = frozenset("convert_element_type transpose reshape squeeze rev copy name".split())

#: Those that do the same to each element: of stacked weights, to each weight.
_FORMS_OF_ELEMENTS = frozenset("convert_element_type copy name".split())

#: Operations on a gradient, and at most a number beside it, that a sum over replicas lets pass.
_SCALINGS = frozenset("convert_element_type copy name neg mul div".split())

#: The axis that a collective operation works along, in its parameters.
_AXIS_OF = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}


def gathered_where_used(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, which gathers parts of weights among its arguments where it uses them.

    Args:
        function: A replica's part of a program, with its gradients inside.
    """

    @functools.wraps(function)
    def gathering(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        closed, shapes = jax.make_jaxpr(
            lambda *flat: function(*jax.tree.unflatten(tree, flat)), return_shape=True
        )(*leaves)
        outputs = _Run(closed, leaves).outputs()
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return gathering


class _Stack(NamedTuple):
    """Weights of layers along the first axis, of which each device has parts.

    Attributes:
        parts: The variable of the parts, stacked.
        make: Makes a layer's whole weight, or a form of it, of this device's part.
    """

    parts: Any
    make: Callable[[jax.Array], jax.Array]


class _Run:
    """Evaluates a traced function whose gathered arguments are made where they are used.

    Args:
        closed: The function.
        arguments: Its arguments.
    """

    def __init__(self, closed: ClosedJaxpr, arguments: Sequence[Any]):
        jaxpr = closed.jaxpr
        self._jaxpr = jaxpr
        self._values: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
        self._recipes = _recipes_of(jaxpr)
        #: What a loop has not returned, since it is a form of stacked weights.
        self._stacks: dict[Any, _Stack] = {}
        #: The equations that use a variable; None stands for the function's result.
        self._uses: dict[Any, list[JaxprEqn | None]] = collections.defaultdict(list)
        for user, atoms in [*((each, each.invars) for each in jaxpr.eqns), (None, jaxpr.outvars)]:
            for atom in atoms:
                if not isinstance(atom, Literal):
                    self._uses[atom].append(user)
        #: The results of equations that a loop before them has done.
        self._done: set[Any] = set()
        self._values.update(zip(jaxpr.constvars, closed.consts, strict=True))
        #: What has been made last, the latest at the end.
        self._kept: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        #: What had been computed when a weight was used last: the next one is gathered from then
        #: on, while that one is at work.
        self._reached: Any = None
        #: When each value was computed: the number of its equation.
        self._times: dict[Any, int] = {}

    def outputs(self, wanted: Sequence[int] | None = None) -> list[Any]:
        """Returns the function's results, or only those at the `wanted` places."""
        for time, equation in enumerate(self._jaxpr.eqns):
            if any(each in self._recipes or each in self._done for each in equation.outvars):
                continue
            if equation.primitive.name == "scan":
                computed = self._scanned(equation)
            else:
                computed = self._computed(self._with_gathering_inside(equation))
            self._values.update(computed)
            self._times.update(dict.fromkeys(computed, time))
        outputs = self._jaxpr.outvars
        return self._read(outputs if wanted is None else [outputs[place] for place in wanted])

    def _computed(self, equation: JaxprEqn) -> dict[Any, Any]:
        """Returns the results of an equation, by variable."""
        inputs = self._read(equation.invars)
        with in_scopes_of(equation):
            results = evaluate(equation, inputs)
        return dict(zip(equation.outvars, results, strict=True))

    def _read(self, atoms: Sequence[Any]) -> list[Any]:
        """Returns the values of an equation's inputs."""
        reached = self._latest(atoms)
        values = []
        for atom in atoms:
            if isinstance(atom, Literal):
                values.append(atom.val)
            elif self._is_made(atom):
                values.append(self._made(atom))
            else:
                values.append(self._values[atom])
        if reached is not None and any(self._is_made(atom) for atom in atoms):
            self._reached = reached
        return values

    def _is_made(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and (atom in self._recipes or atom in self._stacks)

    def _latest(self, atoms: Sequence[Any]) -> Any:
        """Returns what was computed last of an equation's inputs, if anything."""
        computed = [
            atom
            for atom in atoms
            if not isinstance(atom, Literal) and atom in self._times and _is_numeric(atom.aval)
        ]
        return self._values[max(computed, key=self._times.__getitem__)] if computed else None

    def _made(self, variable: Any) -> Any:
        """Returns a whole weight, or a form of it."""
        if variable in self._kept:
            self._kept.move_to_end(variable)
            return self._kept[variable]
        if variable in self._stacks:
            stack = self._stacks[variable]
            value = jax.vmap(stack.make)(self._after(self._values[stack.parts]))
        else:
            equation = self._recipes[variable]
            source = equation.invars[0]
            is_form = source in self._recipes
            given = self._made(source) if is_form else self._after(self._values[source])
            with in_scopes_of(equation):
                (value,) = evaluate(equation, [given])
        self._kept[variable] = value
        while sum(sizes := [_bytes_of(kept) for kept in self._kept]) > _KEPT * max(sizes):
            self._kept.popitem(last=False)
        return value

    def _after(self, part: jax.Array) -> jax.Array:
        """Returns `part` as what cannot be had before the last use of a weight was reached.

        Otherwise XLA would see that all gatherings of a weight are one, or begin with all of them.
        """
        if self._reached is None:
            return part
        # XLA takes barriers away before it chooses the order of the operations. What holds is a
        # condition whose outcome it did not know while it looked for what is known.
        corner = lax.slice(self._reached, (0,) * self._reached.ndim, (1,) * self._reached.ndim)
        is_reached = lax.optimization_barrier(lax.full((), True)) | (corner.reshape(()) != 0)
        return jnp.where(is_reached, part, jnp.zeros_like(part))

    def _stack_of(self, atom: Any) -> _Stack | None:
        """Returns how each of stacked weights is made, if `atom` is what is made of all."""
        if isinstance(atom, Literal) or not self._is_made(atom):
            return None
        if atom in self._stacks:
            return self._stacks[atom]
        equation = self._recipes[atom]
        if _is_gathering(equation):
            gather = _for_each(equation)
            return None if gather is None else _Stack(equation.invars[0], gather)
        stack = self._stack_of(equation.invars[0])
        if stack is None or equation.primitive.name not in _FORMS_OF_ELEMENTS:
            return None
        make = stack.make
        return _Stack(stack.parts, lambda part: evaluate(equation, [make(part)])[0])

    def _scattering_of(self, variable: Any) -> list[JaxprEqn]:
        """Returns what becomes of stacked gradients until they are scattered, if nothing else."""
        equations: list[JaxprEqn] = []
        while True:
            uses = self._uses.get(variable, [])
            equation = uses[0] if len(uses) == 1 else None
            if equation is None:
                return []
            equations.append(equation)
            if _is_over_replicas(equation, "reduce_scatter"):
                return equations if _for_each(equation) else []
            name, first, *others = (equation.primitive.name, *equation.invars)
            if name == "mul" and others[0] is variable:
                first, *others = others[0], first
            is_alone = first is variable and all(isinstance(other, Literal) for other in others)
            if name not in _SCALINGS or not is_alone:
                return []
            variable = equation.outvars[0]

    def _scanned(self, equation: JaxprEqn) -> dict[Any, Any]:
        """Returns the results of a loop over layers, whose steps gather and scatter for each."""
        body = equation.params["jaxpr"]
        num_consts, num_carry = operands_of_scan(equation.params)
        first = num_consts + num_carry
        found = {place: self._stack_of(atom) for place, atom in enumerate(equation.invars)}
        stacks = {place: each for place, each in found.items() if each and place >= first}
        scatterings = {
            place: equations
            for place, variable in enumerate(equation.outvars)
            if place >= num_carry and (equations := self._scattering_of(variable))
        }
        if not (stacks or scatterings or any(map(_is_gathering, body.jaxpr.eqns))):
            return self._computed(equation)

        def step(*given: Any) -> list[Any]:
            whole = [
                stacks[place].make(value) if place in stacks else value
                for place, value in enumerate(given)
            ]
            results = list(jaxpr_as_fun(body)(*whole))
            for place, equations in scatterings.items():
                results[place] = _scattered(equations, results[place])
            return results

        avals = list(body.in_avals)
        for place, stack in stacks.items():
            parts = stack.parts.aval
            avals[place] = jax.ShapeDtypeStruct(parts.shape[1:], parts.dtype)
        traced = jax.make_jaxpr(step)(*avals)
        forms = _forms_of(traced.jaxpr, num_carry, stacks)
        wanted = [place for place in range(len(equation.outvars)) if place not in forms]
        new = jax.make_jaxpr(lambda *given: _Run(traced, given).outputs(wanted))(*avals)

        reached = self._latest(equation.invars)
        others = iter(
            self._read([atom for n, atom in enumerate(equation.invars) if n not in stacks])
        )
        inputs = [
            self._values[stacks[place].parts] if place in stacks else next(others)
            for place in range(len(equation.invars))
        ]
        if stacks and reached is not None:
            self._reached = reached
        with in_scopes_of(equation):
            _, results = scan_with(
                lambda _, given: (None, jaxpr_as_fun(new)(*given)), equation.params, inputs
            )

        self._stacks.update({equation.outvars[place]: stack for place, stack in forms.items()})
        computed = {}
        for place, value in zip(wanted, results, strict=True):
            done = scatterings.get(place, [])
            self._done.update(each.outvars[0] for each in done)
            computed[done[-1].outvars[0] if done else equation.outvars[place]] = value
        return computed

    def _with_gathering_inside(self, equation: JaxprEqn) -> JaxprEqn:
        """Returns a loop of steps with gatherings where they are used in each."""
        body = equation.params.get("body_jaxpr")
        if body is None or not any(map(_is_gathering, body.jaxpr.eqns)):
            return equation
        new = jax.make_jaxpr(lambda *args: _Run(body, args).outputs())(*body.in_avals)
        return equation.replace(params={**equation.params, "body_jaxpr": new})


def _recipes_of(jaxpr: Jaxpr) -> dict[Any, JaxprEqn]:
    """Returns what makes a whole weight, or a form of it, of one other value."""
    arguments = set(jaxpr.invars)
    recipes: dict[Any, JaxprEqn] = {}
    for equation in jaxpr.eqns:
        known = arguments if _is_gathering(equation) else recipes
        makes = _is_gathering(equation) or equation.primitive.name in _FORMS
        if makes and not isinstance(source := equation.invars[0], Literal) and source in known:
            recipes[equation.outvars[0]] = equation
    return recipes


def _forms_of(body: Jaxpr, num_carry: int, stacks: dict[int, _Stack]) -> dict[int, _Stack]:
    """Returns which results of a loop's steps, behind what it carries, are forms of weights.

    Args:
        body: A step, which gathers its layer's weights.
        num_carry: How many results are carried.
        stacks: The stacked weights, by the places of a layer's parts among the step's arguments.
    """
    recipes = _recipes_of(body)
    forms = {}
    for place, result in enumerate(body.outvars[num_carry:], num_carry):
        atom: Any = result
        equations: list[JaxprEqn] = []
        while not isinstance(atom, Literal) and atom in recipes:
            equations.insert(0, recipes[atom])
            atom = recipes[atom].invars[0]
        if equations and (source := body.invars.index(atom)) in stacks:
            make = functools.partial(_evaluated, equations)
            forms[place] = _Stack(stacks[source].parts, make)
    return forms


def _evaluated(equations: Sequence[JaxprEqn], value: jax.Array) -> jax.Array:
    """Returns what equations, each of the one before it and numbers, make of `value`."""
    for equation in equations:
        given = [atom.val if isinstance(atom, Literal) else value for atom in equation.invars]
        (value,) = evaluate(equation, given)
    return value


def _scattered(equations: Sequence[JaxprEqn], gradient: jax.Array) -> jax.Array:
    """Returns this replica's part of a layer's gradient, of which all layers' were to be scattered.

    Args:
        equations: What was to become of those: the last one scatters.
        gradient: The layer's.
    """
    scatter = _for_each(equations[-1])
    assert scatter is not None
    return scatter(_evaluated(equations[:-1], gradient))


def _for_each(equation: JaxprEqn) -> Callable[[jax.Array], jax.Array] | None:
    """Returns what a collective operation on stacked values does to each of them.

    None if it works along the axis along which they are stacked.
    """
    params = equation.params
    if equation.primitive.name == "shard_map":
        function = _for_each(params["jaxpr"].eqns[0])
        (taken,), (returned,) = params["in_specs"], params["out_specs"]
        if function is None or any((*taken[:1], *returned[:1])):
            return None
        return jax.shard_map(
            function,
            in_specs=PartitionSpec(*taken[1:]),
            out_specs=PartitionSpec(*returned[1:]),
            axis_names=params["newly_manual_axes"],
            check_vma=params["check_vma"],
        )
    name = _AXIS_OF[equation.primitive.name]
    if not params[name]:
        return None
    of_each = equation.replace(params={**params, name: params[name] - 1})
    return lambda value: evaluate(of_each, [value])[0]


def _is_gathering(equation: JaxprEqn) -> bool:
    """Whether an equation makes a whole value of the replicas' parts, each core for itself."""
    return _is_over_replicas(equation, "all_gather")


def _is_over_replicas(equation: JaxprEqn, name: str) -> bool:
    """Whether an equation is the collective operation `name`, or that on each core for itself."""
    if equation.primitive.name == "shard_map":
        inner = equation.params["jaxpr"].eqns
        return len(inner) == 1 and _is_over_replicas(inner[0], name)
    axes = equation.params.get("axis_name")
    return equation.primitive.name == name and axes in (REPLICA_AXIS, (REPLICA_AXIS,))


def _bytes_of(variable: Any) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize


def _is_numeric(aval: Any) -> bool:
    return bool(aval.size) and (
        jnp.issubdtype(aval.dtype, jnp.number) or jnp.issubdtype(aval.dtype, jnp.bool_)
    )
