"""The gradients of a recurrent layer's weights, as one product after the loop over its steps.

JAX differentiates `scan` step by step: the weights are the same in all steps, so the backward loop
carries the sum of their gradients, and adds a product to it in each step. A product of 32 rows is
small, and reading and writing the whole sum costs more: of an LSTM of 128 units, half of the
backward pass. The sum over the steps of `a[t].T @ b[t]` is one product that also contracts over the
steps, as cuDNN and oneDNN compute it: the loop stacks `a` and `b`, unless it reads them from a
stack anyway.

Stacking takes memory. A loop over the parts of a batch accumulates gradients so that only the
activations of one part are in memory. So a sum stays where the factors of a step are larger than
it, and all that is stacked takes at most half of the memory of what the loop reads.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, primitives

from unison.runtime.private_jax import operands_of_scan, scan_with

Form = Callable[..., list[jax.Array]]

_FLOATS = (jnp.float32, jnp.float64)


class _Sum(NamedTuple):
    """A carried value to which each step adds a product, and which is not used otherwise.

    Attributes:
        carry: Its number among the carried values.
        total: The variable of the body in which a step gets it.
        product: The equation of the product.
        permutation: The order of the product's axes in the sum.
        replaced: The equations that a product after the loop replaces.
    """

    carry: int
    total: Var
    product: JaxprEqn
    permutation: tuple[int, ...]
    replaced: list[JaxprEqn]


class _Loop:
    """A `scan` equation.

    Attributes:
        params: Its parameters.
        body: The function of a step.
        constant: The variables of the body that get the same values in all steps.
        carried: Those that a step gets from the one before.
        read: Those that are a step's parts of stacked arrays.
    """

    def __init__(self, equation: JaxprEqn):
        self.params = equation.params
        self.body: ClosedJaxpr = equation.params["jaxpr"]
        num_consts, num_carry = operands_of_scan(equation.params)
        variables = self.body.jaxpr.invars
        self.constant = variables[:num_consts]
        self.carried = variables[num_consts : num_consts + num_carry]
        self.read = variables[num_consts + num_carry :]

    @property
    def length(self) -> int:
        """The number of steps."""
        return int(self.params["length"])


def faster_form(equation: JaxprEqn) -> Form | None:
    """Returns the faster form of a `scan` equation, or None to keep it."""
    loop = _Loop(equation)
    if loop.body.effects:
        return None
    sums = _worthwhile(loop, list(_sums(loop)))
    return _with_products_after(loop, sums) if sums else None


def _sums(loop: _Loop) -> Iterator[_Sum]:
    """Yields the carried sums of products."""
    jaxpr = loop.body.jaxpr
    made_by = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    uses = collections.Counter(
        atom
        for atoms in (*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars)
        for atom in atoms
        if isinstance(atom, Var)
    )
    for number, (before, after) in enumerate(zip(loop.carried, jaxpr.outvars, strict=False)):
        addition = made_by.get(after) if isinstance(after, Var) else None
        if addition is None or addition.primitive.name not in ("add", "add_any"):
            continue
        added = [atom for atom in addition.invars if atom is not before]
        if len(added) != 1 or uses[before] != 1 or uses[after] != 1:
            continue
        replaced, (atom,) = [addition], added
        permutation = tuple(range(before.aval.ndim))
        while isinstance(atom, Var) and uses[atom] == 1 and atom in made_by:
            made = made_by[atom]
            replaced.append(made)
            if made.primitive is primitives.dot_general_p:
                if _is_plain(made, before):
                    yield _Sum(number, before, made, permutation, replaced)
                break
            if made.primitive is not primitives.transpose_p:
                break
            inner = made.params["permutation"]
            permutation = tuple(inner[axis] for axis in permutation)
            (atom,) = made.invars


def _is_plain(product: JaxprEqn, total: Var) -> bool:
    """Whether a product contracts the first axes, and is computed in the dtype of the sum.

    XLA:CPU copies a stack to contract other axes together with the first one.
    """
    contracting, (batches, _) = product.params["dimension_numbers"]
    if any(sorted(axes) != list(range(len(axes))) for axes in contracting):
        return False
    if product.params.get("out_sharding") is not None:
        return False
    atoms: list[Any] = [*product.invars, *product.outvars, total]
    dtypes = {atom.aval.dtype for atom in atoms}
    is_of_vars = not any(isinstance(atom, Literal) for atom in product.invars)
    return not batches and is_of_vars and len(dtypes) == 1 and dtypes <= {*map(jnp.dtype, _FLOATS)}


def _worthwhile(loop: _Loop, sums: Sequence[_Sum]) -> list[_Sum]:
    """Returns those that are larger than the factors of a step, while stacking takes little."""
    constant, read = _constant(loop), {*loop.read}
    memory_left = loop.length * _bytes(read) // 2
    chosen: list[_Sum] = []
    stacked: set[Any] = set()
    for found in sorted(sums, key=lambda found: -_bytes([found.total])):
        factors = {*found.product.invars} - stacked
        memory = loop.length * _bytes(factors - read)
        is_larger = _bytes(factors) <= _bytes([found.total])
        if is_larger and memory <= memory_left and not factors & constant:
            chosen.append(found)
            stacked |= factors
            memory_left -= memory
    return chosen


def _constant(loop: _Loop) -> set[Var]:
    """Returns the variables of the body that are the same in all steps."""
    found = {*loop.constant}
    for equation in loop.body.jaxpr.eqns:
        if all(isinstance(atom, Literal) or atom in found for atom in equation.invars):
            found.update(equation.outvars)
    return found


def _bytes(variables: Iterable[Any]) -> int:
    avals = [variable.aval for variable in variables]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def _with_products_after(loop: _Loop, sums: Sequence[_Sum]) -> Form:
    jaxpr = loop.body.jaxpr
    factors = dict.fromkeys(factor for found in sums for factor in found.product.invars)
    stacked = [factor for factor in factors if factor not in loop.read]
    replaced = {id(equation) for found in sums for equation in found.replaced}
    results: list[Any] = [*jaxpr.outvars, *stacked]
    for found in sums:
        results[found.carry] = found.total
    eqns = [equation for equation in jaxpr.eqns if id(equation) not in replaced]
    step = jaxpr_as_fun(loop.body.replace(jaxpr=jaxpr.replace(outvars=results, eqns=eqns)))

    def run(*inputs: jax.Array) -> list[jax.Array]:
        _, results = scan_with(lambda _, given: (None, step(*given)), loop.params, inputs)
        count = len(results) - len(stacked)
        read = inputs[len(inputs) - len(loop.read) :]
        stack_of = dict(zip((*loop.read, *stacked), (*read, *results[count:]), strict=True))
        for found in sums:
            left, right = (stack_of[factor] for factor in found.product.invars)
            results[found.carry] += _over_all_steps(found, left, right)
        return results[:count]

    return run


def _over_all_steps(found: _Sum, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the sum of the products of all steps, whose factors are stacked."""
    params = found.product.params
    contracting, batches = params["dimension_numbers"]
    of_left, of_right = ((0, *(axis + 1 for axis in axes)) for axes in contracting)
    free = left.ndim - len(of_left)
    swapped = (*range(free, len(found.permutation)), *range(free))
    permutation = found.permutation
    if permutation == swapped:  # XLA:CPU is slower at a product that is then transposed
        left, right, of_left, of_right = right, left, of_right, of_left
        permutation = tuple(range(len(swapped)))
    product = lax.dot_general(
        left,
        right,
        ((of_left, of_right), batches),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    return lax.transpose(product, permutation)
