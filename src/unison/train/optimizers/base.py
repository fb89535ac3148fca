"""`Optimizer`: the common part of the optimizers: slots, the sum over the replicas, the update."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.cells import VariableAggregation, has_cell
from unison.collectives import AggregationMethod, aggregate
from unison.identity_key import Reference
from unison.lifting import current_lift
from unison.module import Tracked
from unison.names import NameScope
from unison.runtime.placement import scoped_placement
from unison.strategies.current import get_replica_context
from unison.train.optimizers.rules import Rule
from unison.variables import Variable

#: A number, an array, a variable, or a function of no arguments that returns one of them.
Hyperparameter = Any | Callable[[], Any]


class _Slots(Tracked):
    """The slots of all variables, as attributes, which a checkpoint restores once they exist.

    The attribute's name consists of the slot and the variable's index among the updated ones.
    """

    def of(self, place: int, names: Iterable[str]) -> dict[str, Variable]:
        """Returns the slots of the variable at index `place`, by name."""
        return {name: getattr(self, f"{name}_{place}") for name in names}

    def add(self, place: int, name: str, slot: Variable) -> None:
        setattr(self, f"{name}_{place}", slot)


class Optimizer(Tracked):
    """Updates variables by their gradients; see the subclasses.

    Inside a replica program the gradients are summed over the replicas, and every replica makes
    the same update. The variables are `unison.Variable`s or Keras variables. Slots are variables
    next to theirs, created in the first update; a checkpoint identifies them by the order in which
    the variables were given.

    Args:
        rule: The update rule.
        initial_slots: The initial value of every slot of a variable.
        hyperparameters: The rule's hyperparameters.
        name: The prefix of the slots' names.
        slot_names: For slots with another prefix: that prefix.

    Raises:
        ValueError: The name is empty.
    """

    def __init__(
        self,
        rule: Rule,
        initial_slots: Mapping[str, float],
        hyperparameters: Mapping[str, Hyperparameter],
        name: str,
        slot_names: Mapping[str, str] | None = None,
    ):
        if not name:
            raise ValueError("An optimizer needs a name. Received: name=''")
        self.name = name
        self._rule = rule
        self._initial_slots = dict(initial_slots)
        self._hyperparameters = dict(hyperparameters)
        self._slot_names = dict(slot_names or {})
        self._places: dict[Reference, int] = {}
        self._slots = _Slots()

    @property
    def slot_names(self) -> list[str]:
        """The sorted names of the slots of every updated variable."""
        return sorted(self._initial_slots) if self._places else []

    def slot(self, variable: Any, name: str) -> Variable | None:
        """Returns a slot of `variable`; None if there is none, or before the first update."""
        return self._slots_of(variable).get(name) if Reference(variable) in self._places else None

    @property
    def variables(self) -> list[Variable]:
        """The optimizer's variables, sorted by name."""
        own = self._shared_variables()
        for place in self._places.values():
            own.extend(self._slots.of(place, self._initial_slots).values())
        return sorted(own, key=lambda variable: variable.name)

    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        aggregation_method: AggregationMethod | int | str | None = None,
        is_aggregated: bool = False,
    ) -> None:
        """Updates `variables` by `gradients`.

        Args:
            gradients: An array of the variable's shape for each variable; None for variables that
                do not change. Inside a replica program, the gradients of this replica.
            variables: The variables.
            aggregation_method: The method by which the replicas' gradients are summed.
            is_aggregated: Whether they have already been summed.

        Raises:
            RuntimeError: In cross-replica context, where each replica has its own gradient.
            ValueError: No variable has a gradient, or the shape of one differs from its variable's.
        """
        pairs = [
            (_gradient_for(variable, gradient), variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]
        if not pairs:
            raise ValueError(
                "No variable has a gradient. Does the loss depend on them, and are they trainable? "
                f"Variables: {[_name_of(variable) for variable in variables]}"
            )
        context = get_replica_context()
        if context is None:
            raise RuntimeError(
                "An optimizer applies the gradients of one replica. Call it inside the function "
                "that strategy.run calls, not in cross-replica context (inside "
                "strategy.scope(), or merge_call)."
            )
        totals = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        if context.num_replicas_in_sync > 1 and not is_aggregated:
            totals = aggregate(totals, aggregation_method)
        for variable in variables:
            if Reference(variable) not in self._places:
                self._make_slots(variable)
        self._make_shared_variables(variables)
        with equal_writes():
            self._update(totals, variables)

    def _update(self, gradients: list[jax.Array], variables: list[Any]) -> None:
        slots = [self._slots_of(variable) for variable in variables]
        hyperparameters = {
            name: jnp.asarray(value() if callable(value) else value)
            for name, value in self._current_hyperparameters().items()
        }
        values = [jnp.asarray(variable) for variable in variables]
        old_slots = [{name: slot.value() for name, slot in of.items()} for of in slots]
        updated = _updated(self._rule, gradients, values, old_slots, hyperparameters)
        for variable, of_variable, (value, new) in zip(variables, slots, updated, strict=True):
            constraint = getattr(variable, "constraint", None)
            variable.assign(value if constraint is None else constraint(value))
            for name, slot in of_variable.items():
                slot.assign(new[name])
        self._finish()

    def _slots_of(self, variable: Any) -> dict[str, Variable]:
        return self._slots.of(self._places[Reference(variable)], self._initial_slots)

    def _current_hyperparameters(self) -> Mapping[str, Hyperparameter]:
        """Returns the rule's hyperparameters for the next update."""
        return self._hyperparameters

    def _make_shared_variables(self, variables: Sequence[Any]) -> None:
        """Creates the variables that belong to no single one, next to the first of `variables`."""

    def _shared_variables(self) -> list[Variable]:
        """Returns the variables that do not belong to a single one."""
        return []

    def _finish(self) -> None:
        """Called after each update."""

    def _make_slots(self, variable: Any) -> None:
        place = self._places[Reference(variable)] = len(self._places)
        name = _name_of(variable)
        counts: collections.Counter[str] = collections.Counter()
        for slot, initial in self._initial_slots.items():
            called = f"{name}/{self._slot_names.get(slot, self.name)}"
            full_name = f"{called}_{counts[called]}" if counts[called] else called
            counts[called] += 1
            value = np.full(variable.shape, initial, jnp.dtype(variable.dtype))
            self._slots.add(place, slot, self._make_beside(variable, value, full_name))

    def _make_beside(self, variable: Any, value: Any, name: str) -> Variable:
        """Returns a new variable of the kind of `variable`, if that is Unison's, on its devices."""
        kind = type(variable) if isinstance(variable, Variable) else Variable
        with contextlib.ExitStack() as stack:
            stack.enter_context(NameScope(""))  # the complete name is given
            if has_cell(variable):
                stack.enter_context(scoped_placement(variable.cell.placement))
            return kind(
                value,
                trainable=False,
                name=name,
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )


@functools.partial(jax.jit, static_argnums=0)
def _updated(
    rule: Rule,
    gradients: list[jax.Array],
    values: list[jax.Array],
    slots: list[dict[str, jax.Array]],
    hyperparameters: dict[str, jax.Array],
) -> list[tuple[jax.Array, dict[str, jax.Array]]]:
    return [
        rule(
            gradient,
            value,
            of_value,
            {name: number.astype(value.dtype) for name, number in hyperparameters.items()},
        )
        for gradient, value, of_value in zip(gradients, values, slots, strict=True)
    ]


def equal_writes() -> contextlib.AbstractContextManager[None]:
    """Inside, the values that a replica writes are known to be the same on all replicas."""
    lift = current_lift()
    return contextlib.nullcontext() if lift is None else lift.equal_writes()


def _gradient_for(variable: Any, gradient: Any) -> jax.Array:
    if not jnp.issubdtype(variable.dtype, jnp.floating):
        raise ValueError(
            f"An optimizer updates variables of floating dtypes. Received: "
            f"{_name_of(variable)!r} of dtype {variable.dtype}"
        )
    gradient = jnp.asarray(gradient, dtype=variable.dtype)
    if gradient.shape != tuple(variable.shape):
        raise ValueError(
            f"The gradient for variable {_name_of(variable)!r} must have its shape "
            f"{tuple(variable.shape)}. Received: shape {gradient.shape}"
        )
    return gradient


def _name_of(variable: Any) -> str:
    return variable.cell.name if has_cell(variable) else variable.path
