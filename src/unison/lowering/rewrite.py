"""Replaces equations of a traced function by faster forms, and leaves everything else unchanged.

The gradient is already inside the functions that we compile, so a `custom_vjp` on the forward
operation would come too late: this works on the jaxpr, where forward and backward operations are
both plain equations. Nothing is evaluated here. An equation with a faster form becomes a call of
that form with the same inputs and outputs; an equation that holds jaxprs (jit, scan, while, cond,
remat, shard_map, custom_jvp, custom_vjp) is kept with its jaxprs rewritten; all others stay as
they are, so collectives, effects and names survive.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    jaxpr_as_fun,
    jaxprs_in_params,
    primitives,
)

from unison.lowering import convolution, loop_sums, pooling, products

P = ParamSpec("P")
R = TypeVar("R")

_RULES: dict[Any, Callable[[JaxprEqn], Callable[..., jax.Array] | None]] = {
    primitives.conv_general_dilated_p: convolution.faster_form,
    primitives.dot_general_p: products.faster_form,
    primitives.select_and_scatter_add_p: pooling.faster_form,
}


def lower_for_cpu(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns `fn` with slow operations in forms that are fast on CPUs.

    These are convolutions, max pools, some products, and sums of products that loops carry.

    Call the result where it is traced: under `jax.jit`, inside `jax.shard_map`, or inside another
    traced function. Where no form is faster than XLA's own, the equation is untouched. Results
    equal those of `fn` up to float32 round-off of sums.

    Args:
        fn: A function of pytrees, including its gradients (`jax.value_and_grad` and the like).
            Leaves of the arguments that are not arrays (flags, strings) reach it as they are.

    Returns:
        A function with the signature of `fn`.
    """

    @functools.wraps(fn)
    def lowered(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

        def on_arrays(*arrays: jax.Array) -> R:
            filled = list(leaves)
            for i, array in zip(traced, arrays, strict=True):
                filled[i] = array
            args, kwargs = jax.tree.unflatten(tree, filled)
            return fn(*args, **kwargs)

        arrays = [leaves[i] for i in traced]
        closed, shapes = jax.make_jaxpr(on_arrays, return_shape=True)(*arrays)
        outputs = jaxpr_as_fun(_rewrite_closed(closed))(*arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return lowered


def lowered_trace(trace: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a traced function with its operations in forms that are fast on CPUs.

    It is `lower_for_cpu` for functions that are already traced: only the forms are traced.

    Raises:
        ValueError: There is a `shard_map` in it, which can be rewritten only where its mesh axes
            are in scope: by `lower_for_cpu`.
    """
    if has_shard_map(trace.jaxpr):
        raise ValueError("Expected a traced function without shard_map. Use lower_for_cpu there.")
    return _rewrite_closed(trace)


def has_shard_map(jaxpr: Jaxpr) -> bool:
    """Whether a traced function, or one that it calls, contains a `shard_map`."""
    return any(
        equation.primitive.name == "shard_map"
        or any(map(has_shard_map, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def _rewrite_closed(closed: ClosedJaxpr) -> ClosedJaxpr:
    return closed.replace(jaxpr=_rewrite(closed.jaxpr))


def _rewrite(jaxpr: Jaxpr) -> Jaxpr:
    return jaxpr.replace(eqns=[_rewrite_equation(eqn) for eqn in jaxpr.eqns])


def _rewrite_equation(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive.name == "shard_map":
        return _call(eqn, _rewritten_shard_map(eqn.params))
    if eqn.primitive is primitives.scan_p and (run := loop_sums.faster_form(eqn)) is not None:
        eqn = _call(eqn, jax.jit(run))  # which is rewritten inside, as any other
    rule = _RULES.get(eqn.primitive)
    if rule is None:
        return eqn.replace(params={k: _rewrite_param(v) for k, v in eqn.params.items()})
    form = rule(eqn)
    return eqn if form is None else _call(eqn, jax.jit(form))


def _call(eqn: JaxprEqn, fn: Callable[..., Any]) -> JaxprEqn:
    """Returns an equation with the inputs and outputs of `eqn` that calls `fn`."""
    (call,) = jax.make_jaxpr(fn)(*(v.aval for v in eqn.invars)).jaxpr.eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _rewritten_shard_map(params: dict[str, Any]) -> Callable[..., Any]:
    """Rewrites where the mesh axes are in scope: forms must know which values vary over them."""
    closed = ClosedJaxpr(params["jaxpr"], ())
    return jax.shard_map(
        lambda *args: tuple(jaxpr_as_fun(_rewrite_closed(closed))(*args)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )


def _rewrite_param(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return _rewrite_closed(value)
    if isinstance(value, Jaxpr):
        return _rewrite(value)
    if isinstance(value, tuple) and any(isinstance(v, ClosedJaxpr) for v in value):
        rewritten = [_rewrite_param(v) for v in value]
        return type(value)(*rewritten) if hasattr(value, "_fields") else tuple(rewritten)
    return value
