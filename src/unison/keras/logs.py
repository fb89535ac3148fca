"""A step's logs, computed when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from unison.cells import Cell
from unison.keras.stateful_step import NotingLift, metrics_having
from unison.keras.step import CompiledStep
from unison.keras.step_tracing import METRICS_OF_ALL
from unison.runtime.placement import Placement


def metric_results(
    model: keras.Model, placement: Placement, cells: Sequence[Cell], others: Sequence[Cell]
) -> Callable[..., dict[str, jax.Array]]:
    """Returns a function that computes the metrics, as now compiled, over all replicas.

    Its arguments are the stored state of a step, whose last arrays are the metrics' variables,
    and their values over all replicas, if the step has returned them.

    Args:
        model: The model.
        placement: The replicas' devices.
        cells: Those of the metrics' variables.
        others: Those that steps use beside the model's. What metrics calculate of them, steps have
            calculated: their values do not matter here.
    """
    avals = [(cell, cell.aval) for cell in others]

    @jax.jit
    def results(values: list[jax.Array]) -> dict[str, jax.Array]:
        stand_ins = {cell: jnp.zeros(aval.shape, aval.dtype) for cell, aval in avals}
        lift = NotingLift(placement, stand_ins, takes_new_cells=True)
        with metrics_having(model, values, lift):
            return model.get_metrics_result()

    def results_of_state(
        state: list[jax.Array], of_all: list[jax.Array] | None
    ) -> dict[str, jax.Array]:
        if of_all is not None:
            return results([value.addressable_data(0) for value in of_all])
        stored = state[len(state) - len(cells) :]
        return results([c.combine(array) for c, array in zip(cells, stored, strict=True)])

    return results_of_state


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
