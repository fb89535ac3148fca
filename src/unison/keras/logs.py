"""A step's logs, computed when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from unison.keras.step import CompiledStep
from unison.keras.step_tracing import METRICS_OF_ALL


class StepLogs(dict):
    """What the latest train or test step tells about itself.

    Most steps of an epoch are never looked at, so the metrics are not combined over the replicas
    until a value is asked for; where nobody asked before the next step, the logs are that step's.
    A `dict`, because Keras asks for one.

    Args:
        step: The step.
        state: The stored state, whose last arrays are the metrics' variables.
        metric_results: Computes all metrics from the stored state, or from what the step says of
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
        """Whether looking at the logs would make steps run that wait for others."""
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
        # `dict(logs)` and `{**logs}` look past a subclass that does not iterate by itself.
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
