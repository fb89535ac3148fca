"""A step's logs, computed when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from unison.keras.step import CompiledStep
from unison.keras.step_tracing import METRICS_OF_ALL


class StepLogs(dict):
    """The logs of the latest train or test step.

    The logs of most steps are never read, so the metrics are only combined over the replicas
    when a value is read; if none was read before the next step, the logs are that step's.
    A `dict`, because Keras requires one.

    Args:
        step: The step.
        state: The stored state, whose last arrays are the metrics' variables.
        metric_results: Computes all metrics from the stored state, or from the step's results for
            all replicas.
    """

    def __init__(
        self,
        step: CompiledStep,
        state: list[jax.Array],
        metric_results: Callable[[list[jax.Array], list[jax.Array] | None], dict[str, jax.Array]],
    ):
        super().__init__(dict.fromkeys(step.log_names))
        self._step = step
        self._state = state
        self._metric_results = metric_results
        self._computed = False

    @property
    def step_is_waiting(self) -> bool:
        """Whether reading the logs would run steps that are queued."""
        return not self._computed and self._step.is_waiting

    def _compute(self) -> None:
        if self._computed:
            return
        self._computed = True
        logs = dict(self._step.results(self._state))
        of_all = logs.pop(METRICS_OF_ALL, None)
        if self._step.metric_names:
            metrics = self._metric_results(self._state, of_all)
            logs |= {name: metrics[name] for name in self._step.metric_names}
        super().update(jax.device_get(logs))

    def __iter__(self) -> Any:
        # `dict(logs)` and `{**logs}` bypass the methods of a subclass without its own `__iter__`.
        self._compute()
        return super().__iter__()

    def __getitem__(self, name: str) -> Any:
        self._compute()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._compute()
        return super().get(name, default)

    def items(self) -> Any:
        self._compute()
        return super().items()

    def values(self) -> Any:
        self._compute()
        return super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())
