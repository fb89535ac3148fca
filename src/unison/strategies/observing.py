"""Observers of strategies and of the steps that they run; there are none by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from unison.program import ProgramCache


class StepObserver(Protocol):
    """Runs steps in place of their usual callers, and observes them."""

    def running(self, programs: ProgramCache) -> Callable[..., Any]:
        """Returns the function that `strategy.run` calls instead of its programs."""

    def training(self, trainer: Any, trains: bool) -> Callable[..., int]:
        """Returns the function that a Keras trainer calls instead of its `run_step`.

        Args:
            trainer: A `unison.keras.trainer.ReplicaTrainer`.
            trains: Whether the step trains the model.
        """


#: Called with each strategy that is created.
strategy_observers: list[Callable[[Any], None]] = []

#: The current observer of steps, if any.
step_observer: StepObserver | None = None


def observe_steps(observer: StepObserver | None) -> None:
    """Sets the observer of all steps from now on; None for no observer."""
    global step_observer
    step_observer = observer
