"""Traces the functions that users give: what one replica computes, and which cells it touches.

All other code that calls `jax.make_jaxpr` traces a jaxpr, or a part of one, again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr, Literal

from unison.cells import Cell, has_cell, live_cells
from unison.lifting import Lift
from unison.program.garbage import without_collection
from unison.runtime.placement import REPLICA_AXIS, Placement

#: Contexts that other modules add around every trace (such as Keras' lifting scope).
tracing_contexts: list[Callable[[Lift], AbstractContextManager[Any]]] = []


class Holder(Protocol):
    """Something that holds the values of variables around a body, in place of the lift."""

    def inside(
        self, variables: Sequence[Any] = (), values: Sequence[jax.Array] = ()
    ) -> AbstractContextManager[Holder]:
        """Context manager of a body in which `variables` have `values`; yields what holds them."""
        ...

    @property
    def assigned(self) -> list[Any]:
        """The variables that the body has assigned."""
        ...

    def has(self, variable: Any) -> bool:
        """Whether it holds a variable."""
        ...

    def values(self, variables: Sequence[Any]) -> list[jax.Array]:
        """Returns the values of variables."""
        ...

    def assign(self, variables: Sequence[Any], values: Sequence[jax.Array]) -> None:
        """Assigns variables."""
        ...


#: Find what holds variables here; Keras' scopes are added by its room.
holders: list[Callable[[], Holder | None]] = []


def current_holder() -> Holder | None:
    """Returns what holds variables here; None: the lift does."""
    found = (find() for find in holders)
    return next((holder for holder in found if holder is not None), None)


def traced(
    function: Callable[..., Any], *arguments: Any, num_replicas: int | None = None
) -> ClosedJaxpr:
    """Traces a function.

    Args:
        function: A function of arrays.
        *arguments: Trees of arrays or of their shapes and dtypes.
        num_replicas: The size of the axis of replicas; None where the function is not on a
            replica, or is called within the trace of one.
    """
    axis = None if num_replicas is None else [(REPLICA_AXIS, num_replicas)]
    return without_collection(lambda: jax.make_jaxpr(function, axis_env=axis)(*arguments))


@contextmanager
def reading_from(lift: Lift, scope: AbstractContextManager[Any] | None = None) -> Iterator[None]:
    """Context manager in which variables, those of Keras too, have the values of `lift`.

    Args:
        lift: The values of the cells.
        scope: The context of a strategy. It is entered before the contexts of other modules, which
            it may import.
    """
    with ExitStack() as stack:
        stack.enter_context(lift.active())
        stack.enter_context(nullcontext() if scope is None else scope)
        for context in tracing_contexts:
            stack.enter_context(context(lift))
        yield


def called_on(
    lift: Lift,
    call: Callable[[], Any],
    scope: AbstractContextManager[Any],
    as_array: Callable[[Any], jax.Array],
) -> tuple[Any, dict[Cell, jax.Array]]:
    """Calls `call` while variables have the values of `lift`.

    Args:
        lift: The values of the cells.
        call: A function that is being traced.
        scope: The context of its strategy.
        as_array: Converts the leaves of its result; variables are read.

    Returns:
        Its result, and the new values of the cells that it wrote, in order.
    """
    with reading_from(lift, scope):
        result = jax.tree.map(
            lambda leaf: lift.read(leaf.cell) if has_cell(leaf) else as_array(leaf),
            call(),
            is_leaf=has_cell,
        )
        return result, lift.results()


@dataclasses.dataclass
class CellTrace:
    """The trace of a function that may read and write any variable.

    Attributes:
        jaxpr: Maps the values of `cells`, then the arguments, to the leaves of the result, then the
            new values of `written`.
        cells: All cells that were alive.
        structure: The structure of the result.
        written: The cells that it writes, in order.
    """

    jaxpr: ClosedJaxpr
    cells: list[Cell]
    structure: Any
    written: list[Cell]

    @property
    def used(self) -> list[Cell | None]:
        """The cells, with None for those whose values it does not use."""
        return used_cells(self.jaxpr, self.cells)


def trace_over_cells(
    placement: Placement,
    function: Callable[..., tuple[Any, dict[Cell, jax.Array]]],
    arguments: Sequence[Any],
    num_replicas: int,
    may_create: bool,
) -> CellTrace:
    """Traces a function, with every variable that it might use as an input.

    If it creates variables (an optimizer's first step creates its slots), it is traced again, with
    these among the inputs.

    Args:
        placement: Where the variables are.
        function: Maps the cells' values, whether it may create variables, and the arguments to the
            result and the new values of the cells that it wrote; see `called_on`.
        arguments: Trees of shapes and dtypes.
        num_replicas: The number of replicas.
        may_create: Whether it may create variables.
    """
    cells = live_cells(placement)
    structure: Any = None
    written: list[Cell] = []

    def on_one_replica(values: list[jax.Array], *own: Any) -> tuple[list[Any], list[Any]]:
        nonlocal structure, written
        result, new = function(dict(zip(cells, values, strict=True)), may_create, *own)
        leaves, structure = jax.tree.flatten(result)
        written = list(new)
        return leaves, list(new.values())

    avals = [cell.aval for cell in cells]
    jaxpr = traced(on_one_replica, avals, *arguments, num_replicas=num_replicas)
    if may_create and not set(live_cells(placement)) <= set(cells):
        return trace_over_cells(placement, function, arguments, num_replicas, may_create=False)
    return CellTrace(jaxpr, cells, structure, written)


def used_cells(jaxpr: ClosedJaxpr, cells: Sequence[Cell | None]) -> list[Cell | None]:
    """Returns `cells`, the first inputs of `jaxpr`, with None for those that it does not use."""
    equations = jaxpr.jaxpr.eqns
    atoms = [*jaxpr.jaxpr.outvars, *(atom for equation in equations for atom in equation.invars)]
    used = {atom for atom in atoms if not isinstance(atom, Literal)}
    inputs = zip(cells, jaxpr.jaxpr.invars[: len(cells)], strict=True)
    return [cell if variable in used else None for cell, variable in inputs]
