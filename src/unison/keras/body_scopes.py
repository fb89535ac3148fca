"""Branches and loops in the steps of Keras, in which a scope holds the values of variables.

Keras' steps on JAX map a state to a state: they open a scope that has the values of the model's
variables, by which weights are differentiated. A value that is assigned in the body of a branch or
a loop would exist only there: it is returned from the body, and then assigned in the scope.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.src.backend.common.stateless_scope import get_stateless_scope


class _BodyScope(keras.StatelessScope):
    """The scope of a body: it has what the body assigns; the rest is held by the scope around.

    Args:
        around: The scope in which the branch or the loop is.
        values: What variables of that scope have before the body.
    """

    def __init__(self, around: keras.StatelessScope, values: Sequence[tuple[keras.Variable, Any]]):
        super().__init__(collect_losses=around.collect_losses, initialize_variables=False)
        self._around = around
        self._values = {id(variable): (variable, value) for variable, value in values}

    @property
    def assigned(self) -> list[keras.Variable]:
        """The variables of the scope around that the body has assigned, or was given."""
        return [variable for variable, _ in self._values.values()]

    def holds(self, variable: keras.Variable) -> bool:
        """Whether it has the variable, and not the program around Keras' step."""
        return id(variable) in self._values or _holds(self._around, variable)

    def get_current_value(self, variable: keras.Variable) -> Any:
        if id(variable) in self._values:
            return self._values[id(variable)][1]
        if _holds(self._around, variable):
            return self._around.get_current_value(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if not self.holds(variable):
            super().add_update(update)
            if id(variable) not in self.state_mapping:
                return  # the lift around has it
        self._values[id(variable)] = (variable, value)

    def add_loss(self, loss: Any) -> None:
        """Refuses a loss, which exists only in the body.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "add_loss (or an activity regularizer) was called in a branch or a loop of a compiled "
            "step, where the loss exists only inside. Return the loss from the branch, and call "
            "add_loss with it outside."
        )


class HeldByScope:
    """The variables that a scope of Keras holds: a `unison.program.tracing.Holder`.

    Args:
        scope: The scope.
    """

    def __init__(self, scope: keras.StatelessScope):
        self._scope = scope

    @classmethod
    def now(cls) -> HeldByScope | None:
        """Returns what is held here; None if the innermost scope is none of Keras' that has values.

        Scopes of other classes ask others for values, or refuse.
        """
        scope = get_stateless_scope()
        is_of_step = type(scope) is keras.StatelessScope and scope.state_mapping
        return cls(scope) if is_of_step or isinstance(scope, _BodyScope) else None

    @contextlib.contextmanager
    def inside(
        self, variables: Sequence[keras.Variable] = (), values: Sequence[jax.Array] = ()
    ) -> Iterator[HeldByScope]:
        """Context manager of a body in which `variables` have `values`; yields what holds them."""
        with _BodyScope(self._scope, list(zip(variables, values, strict=True))) as scope:
            yield HeldByScope(scope)

    @property
    def assigned(self) -> list[keras.Variable]:
        """The variables that a body, inside which this holds them, has assigned."""
        return self._scope.assigned

    def has(self, variable: Any) -> bool:
        """Whether the scope has a variable."""
        return _holds(self._scope, variable)

    def values(self, variables: Sequence[keras.Variable]) -> list[jax.Array]:
        """Returns the values of variables, which a body may have assigned first."""
        return [self._value_of(variable) for variable in variables]

    def _value_of(self, variable: keras.Variable) -> jax.Array:
        value = self._scope.get_current_value(variable)
        if value is not None:
            return value
        # While a model is built, variables have no value yet, and Keras makes one, perhaps cast.
        return jnp.asarray(variable.value, variable._dtype)

    def assign(self, variables: Sequence[keras.Variable], values: Sequence[jax.Array]) -> None:
        """Assigns variables that are held."""
        for variable, value in zip(variables, values, strict=True):
            self._scope.add_update((variable, value))


def _holds(scope: keras.StatelessScope, variable: keras.Variable) -> bool:
    if isinstance(scope, _BodyScope):
        return scope.holds(variable)
    return id(variable) in scope.state_mapping
