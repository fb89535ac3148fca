"""Queries about the equations of a traced function, and the evaluation of an equation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core as jex

#: Operations that name an axis but do not involve other devices.
_LOCAL_OPERATIONS = frozenset("axis_index pvary pcast".split())

#: Calls whose body may be inlined, with the parameter that holds it.
INLINED_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


def is_collective(equation: jex.JaxprEqn) -> bool:
    """Whether the operation involves the other devices of a mesh axis."""
    if equation.primitive.name in _LOCAL_OPERATIONS:
        return False
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return any(isinstance(axis, str) for axis in (axes if isinstance(axes, tuple) else (axes,)))


def has_collectives(equation: jex.JaxprEqn) -> bool:
    """Whether the functions that the operation calls contain collective operations."""
    return any(
        is_collective(inner) or has_collectives(inner)
        for jaxpr in jex.jaxprs_in_params(equation.params)
        for inner in jaxpr.eqns
    )


def asks_for_replica(equation: jex.JaxprEqn) -> bool:
    """Returns whether an operation, or a function that it calls, uses the replica's index."""
    return equation.primitive.name == "axis_index" or any(
        asks_for_replica(inner)
        for jaxpr in jex.jaxprs_in_params(equation.params)
        for inner in jaxpr.eqns
    )


def needed_equations(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """Returns the equations on which a result depends, or that have an effect.

    Calls, loops and conditionals in which there are collective operations are always kept.
    """
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, jex.Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        has_effect = not is_collective(equation) and bool(equation.effects)
        if has_effect or has_collectives(equation) or not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed |= {atom for atom in equation.invars if not isinstance(atom, jex.Literal)}
    return kept[::-1]


def calls_host(jaxpr: jex.Jaxpr) -> bool:
    """Whether a traced function has host callbacks, any of which may raise."""
    return next(host_callbacks(jaxpr), None) is not None


def host_callbacks(jaxpr: jex.Jaxpr) -> Iterator[Any]:
    """Yields the host callbacks of a traced function, as JAX wraps them.

    They are those of `jax.pure_callback`, `jax.experimental.io_callback` and `jax.debug.callback`.
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name.endswith("_callback"):
            yield equation.params.get("callback", equation)
        for inner in jex.jaxprs_in_params(equation.params):
            yield from host_callbacks(inner)


def inlined_body(equation: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """Returns the body of an operation that only calls a function; None for other operations."""
    parameter = INLINED_CALLS.get(equation.primitive.name)
    if parameter is None:
        return None
    body = equation.params[parameter]
    return body if isinstance(body, jex.ClosedJaxpr) else jex.ClosedJaxpr(body, ())


def bound_variables(closed: jex.ClosedJaxpr, args: Sequence[Any]) -> dict[jex.Var, Any]:
    """Returns the values of a function's variables before its first equation."""
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return values | dict(zip(closed.jaxpr.invars, args, strict=True))


def value_of(atom: jex.Var | jex.Literal, values: dict[jex.Var, Any]) -> Any:
    """Returns the value of an operand, given those of the variables."""
    return atom.val if isinstance(atom, jex.Literal) else values[atom]


def evaluate(equation: jex.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of the operation on `inputs`."""
    primitive = equation.primitive
    outputs = primitive.bind(*inputs, **primitive.get_bind_params(equation.params))
    return outputs if primitive.multiple_results else [outputs]
