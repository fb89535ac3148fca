"""Gathers divided weights where they are used, and lets go of them in between.

A step of weights that the replicas divide (`zero=3`) is traced as one of whole weights: all of them
are gathered as it begins, and each stays from its use in the forward pass to that in the backward
pass. Here the gathering is moved to the uses, and done again where others have been gathered since:
a device has a few whole weights at a time, and is sent most of them twice in a step (Rajbhandari et
al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 7.2.2).

It works on the traced step, like the rest of this room, so that it does not matter who has taken
the gradient, or how.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from unison.equations import evaluate
from unison.runtime.placement import REPLICA_AXIS
from unison.runtime.private_jax import in_scopes_of

#: What was used last is kept for further uses, up to so many times the size of its largest weight:
#: that of a layer, mostly, and of the last layer until its gradient begins.
_KEPT = 2

#: Operations that give a weight another form, which is no more worth keeping than the weight.
_FORMS = frozenset("convert_element_type transpose reshape squeeze rev copy name".split())


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
        #: What makes a whole weight, or a form of it, of one other value.
        self._recipes: dict[Any, JaxprEqn] = {}
        for equation in jaxpr.eqns:
            known = self._values if _is_gathering(equation) else self._recipes
            makes = _is_gathering(equation) or equation.primitive.name in _FORMS
            if makes and not isinstance(source := equation.invars[0], Literal) and source in known:
                self._recipes[equation.outvars[0]] = equation
        self._values.update(zip(jaxpr.constvars, closed.consts, strict=True))
        #: What has been made last, the latest at the end.
        self._kept: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        #: What had been computed when a weight was used last: the next one is gathered from then
        #: on, while that one is at work.
        self._reached: Any = None
        #: When each value was computed: the number of its equation.
        self._times: dict[Any, int] = {}

    def outputs(self) -> list[Any]:
        """Returns the function's results."""
        for time, equation in enumerate(self._jaxpr.eqns):
            if any(variable in self._recipes for variable in equation.outvars):
                continue
            inputs = self._read(equation.invars)
            with in_scopes_of(equation):
                results = evaluate(self._with_gathering_inside(equation), inputs)
            self._values.update(zip(equation.outvars, results, strict=True))
            self._times.update(dict.fromkeys(equation.outvars, time))
        return self._read(self._jaxpr.outvars)

    def _read(self, atoms: Sequence[Any]) -> list[Any]:
        """Returns the values of an equation's inputs."""
        reached = self._latest(atoms)
        values = []
        for atom in atoms:
            if isinstance(atom, Literal):
                values.append(atom.val)
            elif atom in self._recipes:
                values.append(self._made(atom))
            else:
                values.append(self._values[atom])
        if reached is not None and any(self._is_made(atom) for atom in atoms):
            self._reached = reached
        return values

    def _is_made(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in self._recipes

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

    def _with_gathering_inside(self, equation: JaxprEqn) -> JaxprEqn:
        """Returns a loop of steps with gatherings where they are used in each."""
        body = equation.params.get("body_jaxpr")
        if body is None or not any(map(_is_gathering, body.jaxpr.eqns)):
            return equation
        new = jax.make_jaxpr(lambda *args: _Run(body, args).outputs())(*body.in_avals)
        return equation.replace(params={**equation.params, "body_jaxpr": new})


def _is_gathering(equation: JaxprEqn) -> bool:
    """Whether an equation makes a whole value of the replicas' parts, each core for itself."""
    if equation.primitive.name == "shard_map":
        inner = equation.params["jaxpr"].eqns
        return len(inner) == 1 and _is_gathering(inner[0])
    axes = equation.params.get("axis_name")
    return equation.primitive.name == "all_gather" and axes in (REPLICA_AXIS, (REPLICA_AXIS,))


def _bytes_of(variable: Any) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize


def _is_numeric(aval: Any) -> bool:
    return bool(aval.size) and (
        jnp.issubdtype(aval.dtype, jnp.number) or jnp.issubdtype(aval.dtype, jnp.bool_)
    )
