"""Finds the operation that produces NaN or infinity, if `jax_debug_nans` or `jax_debug_infs` is
set.

JAX itself would call the function again without compiling it, which is impossible here: a replica's
part of a program contains collectives. So the program is traced again, and returns for each
operation whether its results contain such a value while its operands do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from unison.jaxprs import calls_host, evaluate, inlined_body
from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.runtime.private_jax import traceback_of
from unison.runtime.replica_function import ReplicaFunction
from unison.runtime.transfers import copied
from unison.tracebacks import last_user_frame

_config: Any = jax.config  # whose options are untyped


def are_checked() -> bool:
    """Whether JAX has been asked to check results."""
    return bool(_config.jax_debug_nans or _config.jax_debug_infs)


def launch_checked(
    launch: Callable[..., Any],
    args: tuple[Any, ...],
    part: ReplicaFunction,
    placement: Placement,
) -> Any:
    """Launches a program and checks its results.

    Args:
        launch: Launches it. It gets copies of the arguments, so that the originals survive a
            failure.
        args: The arguments.
        part: One replica's part of the program.
        placement: The replicas' devices.

    Raises:
        FloatingPointError: There is a NaN, or an infinity, in a result. Its traceback ends where
            the user's program calls the operation.
    """
    nans, infs = _config.jax_debug_nans, _config.jax_debug_infs
    is_bad = functools.partial(_has_bad, nans, infs)
    with placement.launch_lock, jax.debug_nans(False), jax.debug_infs(False):
        results = launch(*jax.tree.map(copied, args))
        if not any(bool(is_bad(leaf)) for leaf in jax.tree.leaves(results)):
            return results
        where, equation = _culprit(is_bad, args, part, placement)
    looked_for = " or ".join(["NaN"] * nans + ["infinity"] * infs)
    options = " and ".join(["jax_debug_nans"] * nans + ["jax_debug_infs"] * infs)
    error = FloatingPointError(
        f"Found {looked_for} in {where}. Results are checked because {options} "
        f"{'are' if nans and infs else 'is'} set."
    )
    if equation is not None:
        error.__traceback__ = last_user_frame(traceback_of(equation))
    raise error


def _has_bad(nans: bool, infs: bool, value: Any) -> Any:
    """Returns whether an array contains a value of the kinds that are checked for."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.inexact):  # nor are random keys
        return False
    if nans and infs:
        return ~jnp.isfinite(value).all()
    return (jnp.isnan(value) if nans else jnp.isinf(value)).any()


def _culprit(
    is_bad: Callable[[Any], Any],
    args: tuple[Any, ...],
    part: ReplicaFunction,
    placement: Placement,
) -> tuple[str, JaxprEqn | None]:
    """Returns where such a value is, in words, and the operation that produced it, if known."""
    equations: list[JaxprEqn] = []

    def watched(*own: Any) -> jax.Array:
        traced = jax.make_jaxpr(part.function)(*own)
        if calls_host(traced.jaxpr):  # callbacks must not run twice
            return jnp.zeros((1, 0), bool)
        flags: list[jax.Array] = []
        _evaluate(traced, jax.tree.leaves(own), is_bad, flags, equations)
        return jnp.stack(flags)[None] if flags else jnp.zeros((1, 0), bool)

    if any(bool(is_bad(leaf)) for leaf in jax.tree.leaves(args)):
        return "an argument, or in a variable", None
    program = placement.jitted(ReplicaFunction(watched, part.in_specs, PartitionSpec(REPLICA_AXIS)))
    found = np.asarray(program(*args)).any(axis=0)
    if not found.any():
        return "a result", None
    equation = equations[int(np.argmax(found))]
    return f"the result of the operation {equation.primitive.name!r}", equation


def _evaluate(
    traced: ClosedJaxpr,
    inputs: Sequence[Any],
    is_bad: Callable[[Any], Any],
    flags: list[jax.Array],
    equations: list[JaxprEqn],
) -> list[Any]:
    """Returns the results of a traced function.

    Appends its operations to `equations`, and to `flags` whether such values first occur in them.
    """
    jaxpr = traced.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*traced.consts, *inputs), strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [value_of(atom) for atom in equation.invars]
        body = inlined_body(equation)
        if body is not None:
            results: Sequence[Any] = _evaluate(body, operands, is_bad, flags, equations)
        else:
            results = evaluate(equation, operands)
            begins = [jnp.asarray(is_bad(result)) for result in results]
            stood = [jnp.asarray(is_bad(operand)) for operand in operands]
            flags.append(_any(begins) & ~_any(stood))
            equations.append(equation)
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _any(flags: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.asarray(False), *flags]).any()
