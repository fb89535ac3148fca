"""Gives models without a strategy trainers of ours, if Keras' own loops cannot train them on JAX.

What a model's steps are is seen before (`trains_alone`), or in the middle of Keras' loop.

Keras' compiled steps on JAX take the model's state as arguments. Other variables that they read,
and random numbers of a stream, would be constants of the program, and assignments an error: here a
step that is traced notes their use (`captured_is_an_error`), and is then run as one that reads and
assigns variables, as on TensorFlow, on the default device (`handed_over`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import keras

from unison.captured import StateCapturedError, note_captured, noting_captured
from unison.interrupts import signals_held
from unison.keras.host_layers import HostLayer
from unison.keras.stateful_step import STATE_OF_STEPS, is_stateful
from unison.keras.trainer import ReplicaTrainer, trainer_of
from unison.keras.variables import LiftingScope, scopes_ask_lifts
from unison.strategies import has_strategy
from unison.strategies.default import default_strategy
from unison.thread_local import ThreadLocal

logger = logging.getLogger("unison")

#: The model whose step a loop of Keras' own runs in this thread.
_looping: ThreadLocal[keras.Model | None] = ThreadLocal(None)

#: The names of Keras' steps, by the number of the groups of state that they take.
_STEP_OF = {len(groups): name for name, groups in STATE_OF_STEPS.items()}


def trains_alone(model: keras.Model) -> bool:
    """Gives a model a trainer on the default device if Keras' own cannot run its steps on JAX.

    Those are steps that assign variables (`train_step(self, data)`), and steps of a model that
    takes text. In a scope, a model that was created outside of it is an error.

    Returns:
        Whether the model got the trainer now, which has replaced its methods.
    """
    if has_strategy() or trainer_of(model) is not None:
        return False
    has_text_layers = any(isinstance(layer, HostLayer) for layer in model._flatten_layers())
    assigns = any(is_stateful(getattr(model, name)) for name in STATE_OF_STEPS)
    if has_text_layers or assigns:
        ReplicaTrainer(model, default_strategy())
        return True
    return False


def captured_is_an_error(model: keras.Model, step: Callable[..., Any], *args: Any) -> Any:
    """Returns `step(model, *args)`, a step of Keras on a state and a batch.

    Raises:
        StateCapturedError: It is run, or traced, by a loop of Keras' own, and uses other state.
    """
    if _looping.value is not model:
        return step(model, *args)
    with noting_captured() as captured:
        try:
            result = step(model, *args)
        except Exception as error:
            if captured:  # perhaps for that reason
                raise StateCapturedError(captured) from error
            raise
    if captured:
        raise StateCapturedError(captured)
    return result


def handed_over(make_function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras' `_make_function`, whose step a trainer of ours runs if it captures state."""

    @functools.wraps(make_function)
    def make(model: keras.Model, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(step)
        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            name = _STEP_OF[len(state)]
            trainer = trainer_of(model)
            if trainer is not None:  # since an earlier step of this loop
                return trainer.running_step(name)(state, batch)
            # Keras' own distribution has several devices, which a trainer here would not have.
            looping = None if keras.distribution.distribution() else model
            try:
                with _looping.bound_to(looping):
                    return step(state, batch)
            except StateCapturedError as error:
                logger.debug("Model %r is lifted: %s", model.name, error)
            with signals_held:
                model._jax_state = dict(zip(STATE_OF_STEPS[name], state, strict=True))
                model._jax_state_synced = False
                model.jax_state_sync()
                trainer = ReplicaTrainer(model, default_strategy())
            return trainer.take_over(name, batch)

        return make_function(model, run, *args, **kwargs)

    return make


def asking_around(get_current_value: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `get_current_value` of Keras' `StatelessScope`, for variables that it has not.

    Keras' steps open scopes that have the model's variables. Others are those of the lift.
    """

    @functools.wraps(get_current_value)
    def get(scope: keras.StatelessScope, variable: keras.Variable) -> Any:
        value = get_current_value(scope, variable)
        if value is None and not note_captured(variable.path) and scopes_ask_lifts.value:
            around = _lifting_around(scope)
            value = None if around is None else around.get_current_value(variable)
        return value

    return get


def telling_around(add_update: Callable[..., None]) -> Callable[..., None]:
    """Returns `add_update` of Keras' `StatelessScope`; see `asking_around`."""

    @functools.wraps(add_update)
    def add(scope: keras.StatelessScope, update: tuple[keras.Variable, Any]) -> None:
        is_missing = id(update[0]) not in scope.state_mapping
        if is_missing:
            is_missing = not note_captured(update[0].path) and scopes_ask_lifts.value
        around = _lifting_around(scope) if is_missing else None
        if around is None:
            add_update(scope, update)
        else:
            around.add_update(update)

    return add


def _lifting_around(scope: keras.StatelessScope) -> LiftingScope | None:
    """Returns the scope of the lift in which a scope of Keras' own was entered."""
    around = scope
    while around is not None:
        around = getattr(around, "original_scope", None)
        if isinstance(around, LiftingScope):
            return around
    return None
