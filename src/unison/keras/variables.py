"""Keras variables under a strategy: the same cells as `unison.Variable`.

A Keras variable that is created in a strategy's scope becomes a `ReplicatedVariable`: Keras'
own class, whose stored value is in a cell. Everything that Keras does with a variable (layers,
saving, `numpy()`) still works, and its annotations have TensorFlow's semantics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.src.backend.common import global_state

from unison.cells import (
    Cell,
    Layout,
    VariableAggregation,
    VariableSynchronization,
)
from unison.eager_fallback import needs_python
from unison.interrupts import signals_held
from unison.lifting import Lift, current_lift
from unison.runtime.placement import OPTIMIZER, WEIGHTS, Placement
from unison.thread_local import ThreadLocal

#: The path of the variable like which new ones are sharded.
_reference: ThreadLocal[str | None] = ThreadLocal(None)


class ReplicatedVariable(keras.Variable):
    """A Keras variable whose copies are in a cell; see `adopt`."""

    @property
    def cell(self) -> Cell:
        """Its cell."""
        return self.__dict__["_unison_cell"]

    # Keras stores a variable's value in `_value`: None before it is initialized, or while a
    # training loop owns it.
    @property
    def _value(self) -> jax.Array | None:
        return self.cell.value_outside()

    @_value.setter
    def _value(self, value: Any) -> None:
        if value is None:
            # Keras' own loop takes the state of a model without a trainer.
            self._refuse_other_loops()
            self.cell.put(None)
        else:
            self.cell.restore(value)

    def _refuse_other_loops(self) -> None:
        if self.cell.placement.num_replicas > 1:
            raise ValueError(
                f"Keras variable {self.path!r} lives on {self.cell.placement}, but the model that "
                "trains it was built outside the strategy's scope and would run on one device. "
                "Build the model inside `with strategy.scope():`, too."
            )


def adopt(variable: keras.Variable, placement: Placement) -> None:
    """Gives `variable` a copy on every replica of `placement`.

    Raises:
        ValueError: It belongs to another strategy.
    """
    if isinstance(variable, ReplicatedVariable):
        if variable.cell.placement != placement:
            raise ValueError(
                f"Keras variable {variable.path!r} belongs to another strategy: it lives on "
                f"{variable.cell.placement}, and is used on {placement}. Build the model inside "
                "the scope of the strategy that trains it."
            )
        return
    cell = _new_cell(variable, placement, variable.__dict__.get("_value"))
    with signals_held:  # it has its value before and after
        variable.__dict__.pop("_value", None)
        variable.__dict__["_unison_cell"] = cell
        variable.__class__ = ReplicatedVariable


def _new_cell(variable: keras.Variable, placement: Placement, value: Any) -> Cell:
    synchronization = VariableSynchronization(variable.synchronization)
    if synchronization is VariableSynchronization.NONE:
        synchronization = VariableSynchronization.AUTO
    reference = _reference.value
    cell = Cell(
        placement,
        value,
        synchronization=synchronization,
        aggregation=VariableAggregation(variable.aggregation),
        name=variable.path,
        stream=variable.name == "seed_generator_state",
        divergent_aggregation=_aggregation_of_statistics(variable),
        placed_as=reference,
    )
    if cell.layout is Layout.MIRRORED and (reference is not None or variable.trainable):
        cell.shard_at(WEIGHTS if reference is None else OPTIMIZER, tuple(variable.shape))
    return cell


@contextlib.contextmanager
def placed_as(reference: keras.Variable) -> Iterator[None]:
    """Inside, new variables are sharded like `reference`: an optimizer's slots of a weight."""
    path = getattr(reference, "path", reference.name)  # the latter: of `unison`
    with _reference.bound_to(path):
        yield


def annotate(
    variable: keras.Variable,
    synchronization: VariableSynchronization | str | None = None,
    aggregation: VariableAggregation | str | None = None,
) -> None:
    """Sets the relation of a new variable's copies, which `add_weight` cannot express."""
    if synchronization is None and aggregation is None:
        return
    if synchronization is not None:
        variable._synchronization = VariableSynchronization(synchronization).value
    if aggregation is not None:
        variable._aggregation = VariableAggregation(aggregation).value
    if isinstance(variable, ReplicatedVariable):
        with outside_the_traced_program():
            value = variable.cell.value_outside()
            variable.__dict__["_unison_cell"] = _new_cell(variable, variable.cell.placement, value)


def adopt_all(variables: Iterable[keras.Variable], placement: Placement) -> list[Cell]:
    """Adopts `variables` and returns their cells."""
    variables = list(variables)
    for variable in variables:
        adopt(variable, placement)
    return [variable.cell for variable in variables]


@contextlib.contextmanager
def outside_the_traced_program() -> Iterator[None]:
    """Inside, Keras computes and stores real values, also while a replica program is traced.

    A variable that is first used in a program (an optimizer's slots, the weights of a layer
    that had no input before) gets its initial value before the program, and is then lifted like
    any other.
    """
    lift = current_lift()
    if lift is None:
        yield
        return
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with jax.ensure_compile_time_eval():
            yield
    finally:
        if current_lift() is lift:  # not if a signal handler has let the trace end before
            global_state.set_global_attribute("stateless_scope", scope)


def _aggregation_of_statistics(variable: keras.Variable) -> VariableAggregation:
    """The combination of the copies of a variable that layers update without an annotation.

    Keras' layers do not annotate their moving statistics (`BatchNormalization`): over several
    replicas, they should be averaged. Integers are counters, equal on all replicas.
    """
    if jnp.issubdtype(variable.dtype, jnp.inexact):
        return VariableAggregation.MEAN
    return VariableAggregation.ONLY_FIRST_REPLICA


#: Whether the scopes that Keras opens leave variables that they lack to the lift around.
scopes_ask_lifts = ThreadLocal(False)


class LiftingScope(keras.StatelessScope):
    """Keras' scope between variables and their values, connected to a `Lift`.

    While a replica program is traced, Keras variables read and write through it, as
    `unison.Variable` does. A program of one replica adopts the variables that it uses: they may
    have been created anywhere.
    """

    def __init__(self, lift: Lift):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._lift = lift

    def get_current_value(self, variable: keras.Variable) -> jax.Array | None:
        is_there = self._has_cell(variable) and (
            # A running loop of Keras holds the arrays of the cells.
            variable.cell.array is not None or self._lift.holds(variable.cell)
        )
        if is_there:
            try:
                return self._lift.read(variable.cell)
            except ValueError:
                # Adopted too late for this trace: a function can still run step by step.
                needs_python(f"Reading Keras variable {variable.path!r} for the first time")
                raise
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if not self._has_cell(variable):
            raise ValueError(
                f"Keras variable {variable.path!r} is assigned inside a replica program, but was "
                "not created in the strategy's scope. Create its layer, metric or optimizer "
                "inside `with strategy.scope():`."
            )
        self._lift.assign(variable.cell, value)

    def _has_cell(self, variable: keras.Variable) -> bool:
        """Whether `variable` has a cell; in a program of one replica, it gets one."""
        if isinstance(variable, ReplicatedVariable):
            return True
        if self._lift.placement.num_replicas > 1 or variable._value is None:
            return False
        with outside_the_traced_program():
            adopt(variable, self._lift.placement)
        return True
