"""Central storage: the part of a program that is the same on all replicas runs once, at `home`.

A training step computes gradients from a replica's examples, sums them over the replicas, and
updates variables with the sums. From the sums on, all replicas compute the same. If a variable has
its only copy at the placement's `home`, that part is split off and runs there: weights are sent to
the replicas, sums are sent back, and values that only the update reads (an optimizer's slots) are
never sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from unison.jaxprs import is_collective
from unison.runtime.placement import Placement, memory_of

#: Identifies a variable among the inputs and outputs of a trace.
K = TypeVar("K", bound=Hashable)

#: Collectives whose results are equal on all replicas.
_EQUALIZING = frozenset("psum pmax pmin all_gather".split())


@dataclasses.dataclass(frozen=True)
class SplitTrace:
    """A replica's trace, split into what replicas compute and what is computed at home.

    Attributes:
        replica: Maps the inputs of the trace to those of its outputs that are not updates, and
            the values that the update needs.
        remaining: The indices of those outputs in the trace.
        update: Maps these values, and inputs that are stored at home, to the other outputs.
        inputs: The indices of those inputs.
        outputs: The indices of these outputs.
    """

    replica: jex.ClosedJaxpr
    remaining: list[int]
    update: jex.ClosedJaxpr
    inputs: list[int]
    outputs: list[int]

    @property
    def crossing(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of the values that are sent from the replicas to the update."""
        avals = self.update.in_avals[: len(self.update.in_avals) - len(self.inputs)]
        return [(aval.shape, aval.dtype) for aval in avals]


def split_off_update(
    trace: jex.ClosedJaxpr,
    at_home: Collection[int],
    arriving: Collection[int],
    for_home: Collection[int],
) -> SplitTrace:
    """Splits off the part of a trace that can be computed at home.

    Args:
        trace: Computes one replica's part.
        at_home: The indices of the inputs that are stored at home.
        arriving: Those of other inputs that are equal on all replicas.
        for_home: The indices of the outputs that are kept at home.

    Returns:
        The split. Its `outputs` are those of `for_home` that follow from the inputs at home
        and from values that are equal on all replicas because a collective made them so.
    """
    jaxpr = trace.jaxpr
    crossing = {jaxpr.invars[index] for index in arriving}
    inputs = {jaxpr.invars[index] for index in at_home}
    known = crossing | inputs | set(jaxpr.constvars)
    shared = []
    for equation in jaxpr.eqns:
        if not _is_of_a_replica(equation) and _variables(equation.invars) <= known:
            shared.append(equation)
            known.update(equation.outvars)
        elif _equalizes(equation):
            crossing.update(equation.outvars)
            known.update(equation.outvars)
    outputs = [i for i in sorted(for_home) if _variables([jaxpr.outvars[i]]) <= known]
    updates = [jaxpr.outvars[index] for index in outputs]
    shared, needed = _needed_for(updates, shared)
    sums = [variable for variable in needed if variable in crossing]
    home_inputs = [i for i in sorted(at_home) if jaxpr.invars[i] in needed]
    update = jaxpr.replace(
        invars=[*sums, *(jaxpr.invars[index] for index in home_inputs)],
        outvars=updates,
        eqns=shared,
        effects=set(),
    )
    remaining = [index for index in range(len(jaxpr.outvars)) if index not in outputs]
    results = [*(jaxpr.outvars[index] for index in remaining), *sums]
    replica = jaxpr.replace(outvars=results, eqns=_needed_for(results, jaxpr.eqns)[0])
    return SplitTrace(
        jex.ClosedJaxpr(replica, trace.consts),
        remaining,
        jex.ClosedJaxpr(update, trace.consts),
        home_inputs,
        outputs,
    )


class HomeUpdate(Generic[K]):
    """The compiled update of a split.

    Args:
        placement: The replicas' devices, and the home.
        split: The split trace.
        inputs: The identifiers of the first inputs of the trace; None for those that are not
            stored at home.
        outputs: Those of its first outputs; None for those that the update does not compute.

    Attributes:
        taken: The variables that it reads and then overwrites.
        read: The other variables that it reads.
        written: The variables that it writes.
        crossing: Shapes and dtypes of the values that it takes from the replicas.
    """

    def __init__(
        self,
        placement: Placement,
        split: SplitTrace,
        inputs: Sequence[K | None],
        outputs: Sequence[K | None],
    ):
        names = _identified(inputs[index] for index in split.inputs)
        self.written = _identified(outputs[index] for index in split.outputs)
        self.taken = [name for name in names if name in self.written]
        self.read = [name for name in names if name not in self.written]
        self.crossing = split.crossing
        self._placement = placement
        home = placement.home
        assert home is not None
        (device,) = home.device_set
        self._memory = memory_of(device)
        is_computable = home == self._memory

        def update(sums: list, taken: list, read: list) -> list:
            values = dict(zip([*self.taken, *self.read], [*taken, *read], strict=True))
            at_home = [values[name] for name in names]
            if not is_computable:
                at_home = jax.device_put(at_home, jax.memory.Space.Device)
            new = jex.jaxpr_as_fun(split.update)(*sums, *at_home)
            # For a constant, the jaxpr may return a plain number.
            return [
                jnp.asarray(value, aval.dtype)
                for value, aval in zip(new, split.update.out_avals, strict=True)
            ]

        self._execute = jax.jit(update, out_shardings=home, donate_argnums=1)

    def __call__(
        self, sums: Sequence[jax.Array], taken: list[jax.Array], read: list[jax.Array]
    ) -> list[jax.Array]:
        """Returns the new values of `written`, at home.

        Args:
            sums: What the replicas' program returned for the update, on every device.
            taken: The values of `taken`, at home; they are donated.
            read: Those of `read`.
        """
        with self._placement.launch_lock:
            arrived = jax.device_put([x.addressable_data(0) for x in sums], self._memory)
            return self._execute(arrived, taken, read)


def _identified(names: Iterable[K | None]) -> list[K]:
    return [name for name in names if name is not None]


def _is_of_a_replica(equation: jex.JaxprEqn) -> bool:
    """Whether an operation has effects, or depends on the replica's index or on other replicas."""
    inner = (e for jaxpr in jex.jaxprs_in_params(equation.params) for e in jaxpr.eqns)
    names_an_axis = is_collective(equation) or equation.primitive.name == "axis_index"
    return bool(equation.effects) or names_an_axis or any(map(_is_of_a_replica, inner))


def _equalizes(equation: jex.JaxprEqn) -> bool:
    whole = equation.params.get("axis_index_groups") is None
    return equation.primitive.name in _EQUALIZING and whole


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, jex.Literal)}


def _needed_for(
    results: Sequence[Any], equations: Sequence[jex.JaxprEqn]
) -> tuple[list[jex.JaxprEqn], dict[Any, None]]:
    """Returns the equations that `results` need or that are a replica's own, and what they use.

    Other replicas may rely on a collective operation that this replica does not need.
    """
    used = dict.fromkeys(atom for atom in results if not isinstance(atom, jex.Literal))
    needed = []
    for equation in reversed(equations):
        if _is_of_a_replica(equation) or not used.keys().isdisjoint(equation.outvars):
            needed.append(equation)
            for atom in equation.invars:
                if not isinstance(atom, jex.Literal):
                    used.setdefault(atom)
    return needed[::-1], used
