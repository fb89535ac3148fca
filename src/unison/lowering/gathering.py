"""Gathers sharded weights where they are used, and frees them in between.

A step whose weights are divided among the replicas (`zero=3`) is traced as one with whole weights:
all of them are gathered at the beginning, and each stays in memory from its use in the forward pass
to its use in the backward pass. Here the gathering is moved to the uses, and repeated if other
weights have been gathered since: a device holds only a few whole weights at a time, and receives
most of them twice in a step (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", section 7.2.2).

A loop over layers (`jax.lax.scan`) with stacked weights gathers those of one layer in each of its
iterations. The loop that computes their gradients gathers them again, and scatters the gradients of
a layer as soon as they are computed. The first loop does not keep whole weights for the second.

It works on the traced step, like the rest of this package, so that it does not matter how the
gradient was computed.
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

from unison.jaxprs import evaluate
from unison.runtime.placement import REPLICA_AXIS
from unison.runtime.private_jax import in_scopes_of, operands_of_scan, scan_with

#: The most recently used weights are kept for further uses, up to this many times the size of the
#: largest of them: mostly those of one layer, and those of the last layer until its gradient
#: begins.
_KEPT = 2

#: Operations that convert a weight into another form, which is not worth keeping either.
_FORMS = frozenset("convert_element_type transpose reshape squeeze rev copy name".split())

#: Those that are elementwise, and so apply to each of stacked weights separately.
_FORMS_OF_ELEMENTS = frozenset("convert_element_type copy name".split())

#: Operations on a gradient, and at most one number, that commute with a sum over the replicas.
_SCALINGS = frozenset("convert_element_type copy name neg mul div".split())

#: The parameter that holds the axis along which a collective operation works.
_AXIS_OF = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}


def gathered_where_used(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, rewritten to gather the parts of weights where it uses them.

    Args:
        function: A replica's part of a program, including its gradients.
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
    """Weights of layers, stacked along the first axis, of which each device has parts.

    Attributes:
        parts: The jaxpr variable of the stacked parts.
        make: Computes a layer's whole weight, or a form of it, from this device's part.
    """

    parts: Any
    make: Callable[[jax.Array], jax.Array]


class _Run:
    """Evaluates a traced function, gathering weights among its arguments where they are used.

    Args:
        closed: The function.
        arguments: Its arguments.
    """

    def __init__(self, closed: ClosedJaxpr, arguments: Sequence[Any]):
        jaxpr = closed.jaxpr
        self._jaxpr = jaxpr
        self._values: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
        self._recipes = _recipes_of(jaxpr)
        #: The results that a loop does not return, since they are forms of stacked weights.
        self._stacks: dict[Any, _Stack] = {}
        #: The equations that use a variable; None stands for the function's result.
        self._uses: dict[Any, list[JaxprEqn | None]] = collections.defaultdict(list)
        for user, atoms in [*((each, each.invars) for each in jaxpr.eqns), (None, jaxpr.outvars)]:
            for atom in atoms:
                if not isinstance(atom, Literal):
                    self._uses[atom].append(user)
        #: The results of equations that an earlier loop has already computed.
        self._done: set[Any] = set()
        self._values.update(zip(jaxpr.constvars, closed.consts, strict=True))
        #: The values gathered or converted most recently, the latest last.
        self._kept: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        #: A value that was computed just before the last use of a weight: the next weight is
        #: gathered after it, during that use.
        self._reached: Any = None
        #: The number of the equation that has computed each value.
        self._times: dict[Any, int] = {}

    def outputs(self, wanted: Sequence[int] | None = None) -> list[Any]:
        """Returns the function's results, or only those at the `wanted` indices."""
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
        """Returns the most recently computed input of an equation, if any."""
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
        """Returns `part`, made unavailable before the last use of a weight is reached.

        Otherwise XLA would merge all gathers of a weight into one, or start with all of them.
        """
        if self._reached is None:
            return part
        # XLA removes barriers before it schedules the operations. What remains is a condition whose
        # value was unknown during constant folding.
        corner = lax.slice(self._reached, (0,) * self._reached.ndim, (1,) * self._reached.ndim)
        is_reached = lax.optimization_barrier(lax.full((), True)) | (corner.reshape(()) != 0)
        return jnp.where(is_reached, part, jnp.zeros_like(part))

    def _stack_of(self, atom: Any) -> _Stack | None:
        """Returns how each of stacked weights is computed, if `atom` is computed from all."""
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
        """Returns the operations on stacked gradients up to the scattering, if nothing else uses
        them.
        """
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
        """Returns the results of a loop over layers that gathers and scatters in each iteration."""
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
        """Returns a `while` loop whose body gathers weights where they are used."""
        body = equation.params.get("body_jaxpr")
        if body is None or not any(map(_is_gathering, body.jaxpr.eqns)):
            return equation
        new = jax.make_jaxpr(lambda *args: _Run(body, args).outputs())(*body.in_avals)
        return equation.replace(params={**equation.params, "body_jaxpr": new})


def _recipes_of(jaxpr: Jaxpr) -> dict[Any, JaxprEqn]:
    """Returns the equations that compute a whole weight, or a form of it, from one other value."""
    arguments = set(jaxpr.invars)
    recipes: dict[Any, JaxprEqn] = {}
    for equation in jaxpr.eqns:
        known = arguments if _is_gathering(equation) else recipes
        makes = _is_gathering(equation) or equation.primitive.name in _FORMS
        if makes and not isinstance(source := equation.invars[0], Literal) and source in known:
            recipes[equation.outvars[0]] = equation
    return recipes


def _forms_of(body: Jaxpr, num_carry: int, stacks: dict[int, _Stack]) -> dict[int, _Stack]:
    """Returns which results of a loop's body, after the carried ones, are forms of weights.

    Args:
        body: The body, which gathers its layer's weights.
        num_carry: How many results are carried.
        stacks: The stacked weights, by the indices of a layer's parts among the body's arguments.
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
    """Applies a chain of equations to `value`; their other operands are literals."""
    for equation in equations:
        given = [atom.val if isinstance(atom, Literal) else value for atom in equation.invars]
        (value,) = evaluate(equation, given)
    return value


def _scattered(equations: Sequence[JaxprEqn], gradient: jax.Array) -> jax.Array:
    """Returns this replica's part of one layer's gradient, scattered like those of all layers.

    Args:
        equations: The operations on the gradients of all layers; the last one scatters.
        gradient: The layer's gradient.
    """
    scatter = _for_each(equations[-1])
    assert scatter is not None
    return scatter(_evaluated(equations[:-1], gradient))


def _for_each(equation: JaxprEqn) -> Callable[[jax.Array], jax.Array] | None:
    """Returns the function that a collective operation on stacked values applies to each of them.

    Returns None if it works along the axis of the stack.
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
    """Whether an equation gathers the replicas' parts of a value, or does so on each core."""
    return _is_over_replicas(equation, "all_gather")


def _is_over_replicas(equation: JaxprEqn, name: str) -> bool:
    """Whether an equation is the collective operation `name`, or performs it on each core."""
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
