"""Who looks at strategies and the steps that they run: nobody, unless somebody measures them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from unison.program import ProgramCache


class StepObserver(Protocol):
    """Something that runs steps in the place of those who would, and looks at them."""

    def running(self, programs: ProgramCache) -> Callable[..., Any]:
        """Returns what `strategy.run` calls in the place of its programs."""

    def training(self, trainer: Any, trains: bool) -> Callable[..., int]:
        """Returns what a Keras trainer calls in the place of its `run_step`.

        Args:
            trainer: A `unison.keras.trainer.ReplicaTrainer`.
            trains: Whether the step trains the model.
        """


#: Called with each strategy that is made.
strategy_observers: list[Callable[[Any], None]] = []

#: Who looks, if somebody does.
step_observer: StepObserver | None = None


def observe_steps(observer: StepObserver | None) -> None:
    """Lets `observer` look at all steps from now on; None: nobody."""
    global step_observer
    step_observer = observer
