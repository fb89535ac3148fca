"""Keras' training loops, with the step as one program on all replicas.

A model that is created in a strategy's scope gets a `ReplicaTrainer`. Keras' own `fit`,
`evaluate` and `predict` go on running the epochs, callbacks and validation; the trainer replaces
what they call for each batch (`make_train_function` and its kin) and how the model's state gets
in and out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unison.cells import Cell
from unison.keras.logs import StepLogs
from unison.keras.metrics import adopt_mean
from unison.keras.optimizers import adopt_optimizer
from unison.keras.progress import with_progress_bar
from unison.keras.sharded_update import shard_slots
from unison.keras.step import CompiledStep
from unison.keras.variables import adopt_all
from unison.strategies import Strategy

logger = logging.getLogger("unison")

#: The groups of a model's state, in the order in which Keras passes them.
_PREDICT = ("trainable_variables", "non_trainable_variables")
_TRAIN = (*_PREDICT, "optimizer_variables")
_METRICS = "metrics_variables"


class _Running:
    """The state of a running loop: the stored arrays of its cells.

    Args:
        cells: Whose arrays are taken.
    """

    def __init__(self, cells: list[Cell]):
        self._cells = cells
        self.state = [cell.take() for cell in cells]
        #: The step that the loop runs.
        self.step: CompiledStep | None = None

    def purge(self) -> None:
        """Lets the cells forget their arrays, so that there is one copy of the state."""
        for cell in self._cells:
            cell.put(None)

    def store(self) -> None:
        """Gives the arrays back to the cells, after all steps."""
        if self.step is not None:
            self.step.finish(self.state)
        for cell, array in zip(self._cells, self.state, strict=True):
            cell.put(array)


class ReplicaTrainer:
    """Runs the steps of one Keras model on the replicas of one strategy.

    Args:
        model: The model. Some of its methods are replaced, on this object only.
        strategy: The strategy in whose scope it was created.
    """

    def __init__(self, model: keras.Model, strategy: Strategy):
        self._model = model
        self.strategy = strategy
        #: The number of steps of the epoch being run, None where it is not known.
        self.steps_per_epoch: int | None = None
        #: How many examples have been run.
        self.examples = 0
        #: Whether steps may wait for each other: nobody looks at the state between them.
        self.steps_may_wait = False
        self._running: _Running | None = None
        self._said_what_eager_means = False
        vars(model).update(
            fit=with_progress_bar(self, model.fit),
            evaluate=with_progress_bar(self, model.evaluate),
            make_train_function=self._make_train_function,
            make_test_function=self._make_test_function,
            make_predict_function=self._make_predict_function,
            jax_state_sync=self._store_state,
            _symbolic_build=functools.partial(self._build, model._symbolic_build),
            _get_jax_state=self._take_state,
            _unison_trainer=self,
        )

    # -- the model's state -----------------------------------------------------------------

    def _build(self, build: Callable[..., Any], iterator: Any = None, **kwargs: Any) -> None:
        """Builds the model in the strategy's scope, whatever scope `fit` is called in."""
        if iterator is not None:
            self.steps_per_epoch = iterator.num_batches
            kwargs["iterator"] = iterator
        with self.strategy.scope():
            build(**kwargs)

    def _cells(self, group: str) -> list[Cell]:
        if group == "optimizer_variables":
            optimizer = self._model.optimizer
            variables = optimizer.variables if optimizer is not None else []
        else:
            variables = getattr(self._model, group)
        return adopt_all(variables, self.strategy.placement)

    def _take_state(
        self, *, purge_model_variables: bool = False, **wanted: bool
    ) -> tuple[str, ...]:
        """Takes the stored arrays of the wanted groups (`model._get_jax_state`).

        The trainer keeps them; Keras' loops, which only hand the state on, get the names of the
        groups.
        """
        groups = tuple(group for group in (*_TRAIN, _METRICS) if wanted.get(group))
        self._running = _Running([cell for group in groups for cell in self._cells(group)])
        if purge_model_variables:
            self._running.purge()
        return groups

    def _store_state(self) -> None:
        """Puts the state of the running loop back into the model (`model.jax_state_sync`)."""
        if self._running is not None and not self._model._jax_state_synced:
            self._running.store()
            self._running = None
            self._model._jax_state_synced = True

    # -- what Keras calls for each batch ---------------------------------------------------

    def _make_train_function(self, force: bool = False) -> None:
        model = self._model
        if model.train_function is not None and not force:
            return
        self._say_what_eager_means()
        self._cells("optimizer_variables")
        adopt_optimizer(model.optimizer)
        shard_slots(model.optimizer, self.strategy.placement)
        step = self._compiled_step(model.train_step, (*_TRAIN, _METRICS))
        model.train_function = self._repeated(
            functools.partial(self._with_logs, step, self._metric_results())
        )

    def _make_test_function(self, force: bool = False) -> None:
        model = self._model
        if model.test_function is not None and not force:
            return
        self._say_what_eager_means()
        step = self._compiled_step(model.test_step, (*_PREDICT, _METRICS))
        model.test_function = self._repeated(
            functools.partial(self._with_logs, step, self._metric_results())
        )

    def _make_predict_function(self, force: bool = False) -> None:
        model = self._model
        if model.predict_function is not None and not force:
            return

        def predict_step(state: Any, batch: Any) -> tuple[Any, Any]:
            outputs, non_trainable_variables = model.predict_step(state, batch)
            return outputs, (state[0], non_trainable_variables)

        step = self._compiled_step(predict_step, _PREDICT, returns_examples=True)
        run = functools.partial(self._with_outputs, step)
        model.predict_function = self._repeated(run, keep_all=True)

    def _compiled_step(
        self, step: Callable[..., Any], groups: Sequence[str], returns_examples: bool = False
    ) -> CompiledStep:
        for metric in self._model.metrics:
            adopt_mean(metric)
        cells = {group: self._cells(group) for group in groups}
        return CompiledStep(self._model, self.strategy, step, cells, returns_examples)

    def _with_logs(
        self,
        step: CompiledStep,
        metric_results: Callable[[list[jax.Array]], dict[str, jax.Array]],
        groups: Any,
        batch: Any,
    ) -> tuple[StepLogs, Any]:
        running = self._run(step, batch, may_wait=self.steps_may_wait)
        return StepLogs(step, running.state, metric_results), groups

    def _with_outputs(self, step: CompiledStep, groups: Any, batch: Any) -> tuple[Any, Any]:
        running = self._run(step, batch, may_wait=False)
        return step.results(running.state), groups

    def _run(self, step: CompiledStep, batch: Any, may_wait: bool) -> _Running:
        running = self._running
        if running is None:
            raise RuntimeError(
                "A step of the model was run outside Keras' loops. Use fit, evaluate, predict, or "
                "train_on_batch and its kin."
            )
        running.step = step
        self.examples += step(running.state, batch, may_wait)
        return running

    @property
    def model(self) -> keras.Model:
        return self._model

    def _metric_results(self) -> Callable[[list[jax.Array]], dict[str, jax.Array]]:
        """Returns what computes the metrics, as now compiled, over all replicas.

        It takes the stored state of a step, whose last arrays are the metrics' variables.
        """
        model = self._model
        variables = list(model.metrics_variables)
        cells = self._cells(_METRICS)

        @jax.jit
        def results(values: list[jax.Array]) -> dict[str, jax.Array]:
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return model.get_metrics_result()

        def results_of_state(state: list[jax.Array]) -> dict[str, jax.Array]:
            stored = state[len(state) - len(cells) :]
            values = [cell.combine(array) for cell, array in zip(cells, stored, strict=True)]
            return results(values)

        return results_of_state

    def _repeated(self, step: Callable[..., Any], keep_all: bool = False) -> Callable[..., Any]:
        """Runs `steps_per_execution` batches a call."""

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            result, state = step(state, next(iterator))
            results = [result]
            for _ in range(self._model.steps_per_execution - 1):
                batch = next(iterator, None)
                if batch is None:
                    break
                result, state = step(state, batch)
                results.append(result)
            if keep_all and len(results) > 1:
                result = jax.tree.map(lambda *parts: np.concatenate(parts), *results)
            return result, state

        return function

    def _say_what_eager_means(self) -> None:
        several = self.strategy.num_replicas_in_sync > 1
        if self._model.run_eagerly and several and not self._said_what_eager_means:
            self._said_what_eager_means = True
            logger.warning(
                "run_eagerly=True: a step on %d replicas is one program, so it is compiled all the "
                "same. To look into a step, use jax.debug.print, or OneDeviceStrategy.",
                self.strategy.num_replicas_in_sync,
            )


def trainer_of(model: keras.Model) -> ReplicaTrainer | None:
    """Returns the trainer of a model that was created in a strategy's scope, else None."""
    return vars(model).get("_unison_trainer")
