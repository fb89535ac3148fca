"""One replica's part of a program, run without the others to measure how long it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.sharding import AxisType, Mesh, PartitionSpec

from unison.cells import Cell, Layout
from unison.jaxprs import evaluate, inlined_body, is_collective
from unison.lifting import enter_replica
from unison.lowering import lower_for_cpu
from unison.runtime.placement import REPLICA_AXIS, Placement
from unison.runtime.private_jax import scan_with, shard_map
from unison.runtime.transfers import shards_of


def alone(trace: jex.ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a function of a replica's index and inputs that evaluates `trace` on it alone.

    A collective operation returns the replica's own operand, in the shape of the operation's
    result. The results are not those of the program; the time is, except for waiting (and for loops
    whose number of iterations depends on values that the replicas exchange).

    Args:
        trace: The part of a replica. The replica axis must be bound where the function is called;
            it may have any size.
    """
    return lambda replica, *inputs: _Alone(replica).function(trace, inputs)


class _Alone:
    """Evaluates traced functions as the replica with the index `replica`, without the others."""

    def __init__(self, replica: Any):
        self._replica = replica
        self._forms: dict[str, Callable[..., Sequence[Any]]] = {
            "while": self._while,
            "scan": self._scan,
            "cond": self._cond,
        }

    def function(self, closed: jex.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results of `closed`."""
        jaxpr = closed.jaxpr
        values = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True)
        )

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else values[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [value(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: jex.JaxprEqn, given: list[Any]) -> Sequence[Any]:
        if is_collective(equation):
            return _stand_ins(equation, given)
        if equation.primitive.name == "axis_index":
            return [self._replica]
        if (body := inlined_body(equation)) is not None:
            return self.function(body, given)
        if equation.primitive.name in self._forms:
            return self._forms[equation.primitive.name](equation.params, given)
        return evaluate(equation, given)

    def _while(self, params: dict[str, Any], given: list[Any]) -> Sequence[Any]:
        of_condition = given[: params["cond_nconsts"]]
        of_body = given[len(of_condition) : len(of_condition) + params["body_nconsts"]]
        return lax.while_loop(
            lambda values: self.function(params["cond_jaxpr"], [*of_condition, *values])[0],
            lambda values: self.function(params["body_jaxpr"], [*of_body, *values]),
            given[len(of_condition) + len(of_body) :],
        )

    def _scan(self, params: dict[str, Any], given: list[Any]) -> Sequence[Any]:
        _, results = scan_with(
            lambda _, step: (None, self.function(params["jaxpr"], step)), params, given
        )
        return results

    def _cond(self, params: dict[str, Any], given: list[Any]) -> Sequence[Any]:
        def branch_of(closed: jex.ClosedJaxpr) -> Callable[..., Any]:
            return lambda *args: self.function(closed, args)

        index, *args = given
        return lax.switch(index, [branch_of(closed) for closed in params["branches"]], *args)


def _stand_ins(equation: jex.JaxprEqn, given: Sequence[Any]) -> list[jax.Array]:
    # XLA must not move computation across the point where the replicas would synchronize.
    own: list[Any] = lax.optimization_barrier(list(given))
    avals: list[Any] = [result.aval for result in equation.outvars]
    operands = own if len(own) == len(avals) else own[:1] * len(avals)
    return [
        jnp.resize(operand, aval.shape).astype(aval.dtype)
        for operand, aval in zip(operands, avals, strict=True)
    ]


def compile_alone(placement: Placement, part: Callable[..., Any]) -> Callable[..., None]:
    """Compiles a replica's part of a program, evaluated `alone`, separately for each device.

    Args:
        placement: The replicas' devices.
        part: Maps the replica's index, pieces of stored arrays and other arguments to any results.

    Returns:
        A function of a device and arguments on it, which runs the part and waits for it.
    """
    if placement.platform == "cpu":
        part = lower_for_cpu(part)

    @functools.cache
    def on(device: jax.Device) -> Callable[..., Any]:
        mesh = Mesh(np.array([device]), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
        here = PartitionSpec()
        return jax.jit(shard_map(part, mesh=mesh, in_specs=here, out_specs=here, check_vma=False))

    def run(device: jax.Device, *args: Any) -> None:
        replica = placement.local_replicas[placement.local_devices.index(device)]
        jax.block_until_ready(on(device)(np.int32(replica), *args))

    return run


def piece_on(device: jax.Device, stored: Any) -> jax.Array:
    """Returns the piece of an array, or the number, that a program gets on one of its devices."""
    if isinstance(stored, jax.Array):
        for shard in shards_of(stored):
            if shard.device == device:
                return shard.data
    return jax.device_put(stored, device)


def enter_alone(cell: Cell, piece: jax.Array) -> jax.Array:
    """Returns a value for a replica without the others, given its piece of the stored array."""
    if cell.layout is Layout.SHARDED:
        return jnp.resize(piece, cell.aval.shape)
    return enter_replica(cell, piece)
