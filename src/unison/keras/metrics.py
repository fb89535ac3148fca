"""Differences of metrics in a strategy's scope: their reset, and means of means.

Metrics of examples (`MeanAbsoluteError`, `AUC`, ...) count them, on any number of replicas.
A `Mean` that is called with one number per step, as in `self.loss_tracker.update_state(loss)`,
counts steps; each replica has its own number, which is weighted by the replica's share, so
that all of them together count as one step.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
from keras import ops

from unison.interrupts import without_signals
from unison.strategies.replica_share import current_share


def adopt_metric(metric: keras.metrics.Metric) -> None:
    """Makes a metric's reset write all of its variables, or none if a signal handler raises."""
    # Bypasses Keras' attribute tracking, for this object only: its class stays Keras' own.
    vars(metric)["reset_state"] = without_signals(metric.reset_state)


def adopt_mean(metric: keras.metrics.Metric) -> None:
    """Makes a `Mean` weight the numbers of the replicas in a step by their shares.

    Other metrics, and subclasses with their own update of the state, are unchanged.
    """
    is_mean = getattr(type(metric), "update_state", None) is keras.metrics.Mean.update_state
    if not is_mean or "update_state" in vars(metric):
        return
    update_state = metric.update_state

    @functools.wraps(update_state)
    def update_by_share(values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and ops.ndim(values) == 0:
            sample_weight = current_share()
        return update_state(values, sample_weight)

    # Bypasses Keras' attribute tracking, for this object only: its class stays Keras' own.
    vars(metric)["update_state"] = update_by_share
