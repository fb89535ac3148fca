"""Keras' `fit` with a number of replicas that changes: its position, batches and learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras

from unison.runtime.elastic.options import ElasticOptions
from unison.storage.decoding import decoding, whole_number
from unison.train.fit_position import FitPosition
from unison.train.fit_state import REMEDY, checked_sizes
from unison.train.rebatching import Rebatched


class ResizedPosition(FitPosition):
    """The position in a `fit` whose number of replicas may change.

    Attributes:
        num_replicas: The number of replicas of the steps that made the state.
        sizes: The batches of the pass from which on the size changes, if batches grow and shrink
            with the number of replicas, with the factors to the size of the data's batches.
        resumes_sizes: Whether the pass that begins is one that these belong to.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(model)
        self.num_replicas = 0
        self.sizes: list[tuple[int, float]] = []
        self.resumes_sizes = False

    def cut_anew(self, epochs: Any, begin_sizes: Callable[[], None]) -> None:
        """Makes Keras' `EpochIterator` return batches that grow and shrink.

        Args:
            epochs: The batches of `fit`.
            begin_sizes: Sets the `sizes` of a pass that begins.
        """
        make = epochs._get_iterator

        def new_pass() -> Iterator[Any]:
            if self.resumes_sizes:
                self.resumes_sizes = False
            else:
                begin_sizes()
            return Rebatched(make(), self.sizes)

        enumerate_batches = epochs._enumerate_iterator

        def without_number() -> Iterator[Any]:
            epochs._num_batches = None  # their number is unknown: it may change
            return enumerate_batches()

        own = {"_get_iterator": new_pass, "_enumerate_iterator": without_number}
        # An epoch ends where the data ends.
        vars(epochs).update(own, _interrupted_warning=lambda: None)
        epochs._num_batches = None

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {
            "num_replicas": self.num_replicas,
            "sizes": [list(pair) for pair in self.sizes],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        with decoding(self.source, REMEDY):
            num_replicas = whole_number(state["num_replicas"])
            sizes = checked_sizes(state["sizes"])
        super().set_state(state)
        self.num_replicas = num_replicas
        self.sizes[:] = sizes
        self.resumes_sizes = bool(self.sizes)


def scale_learning_rate(
    model: keras.Model, options: ElasticOptions, before: int, now: int, at_start: int
) -> None:
    """Rescales a model's learning rate from `before` replicas to `now`, as the options say.

    Args:
        model: The model.
        options: The options of its strategy.
        before: The number of replicas that the learning rate is for.
        now: The number of replicas.
        at_start: The number of replicas with which the job began.
    """
    factor = options.learning_rate
    if factor is None or before == now:
        return
    optimizer = model.optimizer
    rate = float(optimizer.learning_rate) * factor(now, at_start) / factor(before, at_start)
    optimizer.learning_rate = rate


def require_a_rate(model: keras.Model, options: ElasticOptions) -> None:
    """Raises a TypeError if the learning rate should be scaled, and is not a number."""
    rate = getattr(model.optimizer, "_learning_rate", None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if is_schedule and options.learning_rate is not None:
        raise TypeError(
            "elastic.Options.learning_rate multiplies a learning rate that is a number. "
            f"Received: an optimizer with a {type(rate).__name__}. Let the schedule depend on "
            "strategy.num_replicas_in_sync instead, or leave the one or the other out."
        )
