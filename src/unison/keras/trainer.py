"""Keras' training loops, with the step as one program on all replicas.

A model that is created in a strategy's scope gets a `ReplicaTrainer`. Keras' own `fit`,
`evaluate` and `predict` still run the epochs, callbacks and validation; the trainer replaces
the functions that they call for each batch (`make_train_function` and similar ones), and the
transfer of the model's state.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from unison.captured import StateCapturedError
from unison.cells import Cell
from unison.data import Shares, count_examples
from unison.data.leaves import shape_of
from unison.data.statistics import metered
from unison.interrupts import signals_held, without_signals
from unison.keras.building import Builds, first_batch_of, fixes_batch_size, is_built
from unison.keras.feeding import Feeder
from unison.keras.host_layers import HostLayer
from unison.keras.logs import StepLogs, metric_results
from unison.keras.losses import aggregating_scaled, reaching_combined
from unison.keras.metrics import adopt_mean
from unison.keras.optimizers import adopt_optimizer
from unison.keras.pipelined_loss import with_pipelined_loss
from unison.keras.progress import on_agreed_data, with_progress_bar
from unison.keras.running_loop import Running
from unison.keras.sharded_update import shard_slots
from unison.keras.share_notes import note_share
from unison.keras.stateful_step import (
    METRICS,
    STATE_OF_STEPS,
    StatefulStep,
    assigning,
    cells_touched_by,
    is_stateful,
)
from unison.keras.step import CompiledStep
from unison.keras.step_tracing import OTHERS, replica_of_step
from unison.keras.text_input import TextEncoder, build_on_text
from unison.keras.variables import adopt_all
from unison.profiling.regions import FORWARD
from unison.strategies import Strategy, observing
from unison.strategies.batch_shares import MeasuredShares
from unison.strategies.tuning import Tuning
from unison.tracebacks import filter_traceback, is_filtering

logger = logging.getLogger("unison")


#: The number of steps whose beginnings are remembered.
_STEPS_REMEMBERED = 256

#: Called with every new trainer.
trainer_made: list[Callable[[ReplicaTrainer], None]] = []


class ReplicaTrainer:
    """Runs the steps of one Keras model on the replicas of one strategy.

    Args:
        model: The model. Some of its methods are replaced, on this object only.
        strategy: The strategy in whose scope it was created.
    """

    def __init__(self, model: keras.Model, strategy: Strategy):
        self._model = model
        self.strategy = strategy
        if not is_filtering():  # all of it is shown
            keras.config.disable_traceback_filtering()
        #: Another object whenever the metrics have begun anew, as at the begin of each epoch.
        self.epoch_of_metrics = object()
        #: The number of steps of the current epoch; None if it is unknown.
        self.steps_per_epoch: int | None = None
        #: The number of examples so far.
        self.examples = 0
        #: The number of training steps that have begun, when the latest did (in seconds since
        #: 1970), and which step it was.
        self.steps = 0
        self.begun: collections.deque[float] = collections.deque(maxlen=_STEPS_REMEMBERED)
        self.training_step: CompiledStep | None = None
        #: Whether steps may be queued: nothing reads the state between them.
        self.steps_may_wait = False
        #: Runs a step on a batch, and returns the number of its examples.
        self.run_step: Callable[[CompiledStep, Any, bool], int] = self.run_once
        #: Makes sure that all steps so far have taken effect.
        self.settle: Callable[[], None] = lambda: None
        #: Callbacks of every `fit`, called after its own.
        self.callbacks: list[keras.callbacks.Callback] = []
        #: All callbacks of the current `fit`, except those.
        self.callbacks_of_fit: list[keras.callbacks.Callback] = []
        #: The feeder of the current loop.
        self.feeder: Feeder | None = None
        #: The running loop, and its state.
        self.running: Running | None = None
        #: Whether one of its steps is being traced or run: its state is then not accessible.
        self._is_in_step = False
        self._said_what_eager_means = False
        #: A batch, for a model that is built by calling it on text or by calling a step that
        #: assigns.
        self._example: Any = None
        self._builds = Builds(model)
        #: Builds such a model as `fit` builds others, for the steps that need it.
        self._build_as_keras: Callable[[], None] | None = None
        #: Whether callbacks restore what steps use beside the model: the first batch tells it then.
        self.must_know_others = False
        self._has_looked = False
        self._first_batch: Any = None
        #: By the name of a step that assigns: the cells that it uses and that are not the model's.
        self._others: dict[str, list[Cell]] = {}
        #: The steps as compiled, and what computes their logs, by their names.
        self._compiled: dict[str, CompiledStep] = {}
        self._results_of: dict[str, Callable[..., dict[str, jax.Array]]] = {}
        vars(model).update(
            fit=with_progress_bar(self, model.fit),
            evaluate=with_progress_bar(self, model.evaluate),
            predict=on_agreed_data(self, model.predict),
            train_on_batch=filter_traceback(model.train_on_batch),
            test_on_batch=filter_traceback(model.test_on_batch),
            predict_on_batch=filter_traceback(model.predict_on_batch),
            make_train_function=self._make_train_function,
            make_test_function=self._make_test_function,
            make_predict_function=self._make_predict_function,
            compute_loss_and_updates=jax.named_scope(FORWARD)(
                reaching_combined(with_pipelined_loss(model))
            ),
            jax_state_sync=self._store_state,
            # They write one variable after another: all of them or none.
            reset_metrics=functools.partial(
                self._reset_metrics, without_signals(model.reset_metrics)
            ),
            set_weights=without_signals(model.set_weights),
            _aggregate_additional_loss=aggregating_scaled(model._aggregate_additional_loss),
            _get_metrics_result_or_logs=_on_the_host(model._get_metrics_result_or_logs),
            _symbolic_build=functools.partial(self._build, model._symbolic_build),
            _get_jax_state=self._take_state,
            _unison_trainer=self,
        )
        for made in trainer_made:
            made(self)

    def _reset_metrics(self, reset: Callable[[], None]) -> None:
        reset()
        self.epoch_of_metrics = object()

    # -- the model's state -----------------------------------------------------------------

    @functools.cached_property
    def _assigning_steps(self) -> list[str]:
        """The steps that assign variables, rather than map a state to a state."""
        return [name for name in STATE_OF_STEPS if is_stateful(getattr(self._model, name))]

    @functools.cached_property
    def _encode_text(self) -> TextEncoder | None:
        """Encodes text for a step, if the model takes text."""
        layers = self._model._flatten_layers()
        takes_text = any(isinstance(layer, HostLayer) for layer in layers)
        return TextEncoder(self._model) if takes_text else None

    @property
    def takes_text(self) -> bool:
        """Whether the model has layers that encode text."""
        return self._encode_text is not None

    def _build(
        self, build: Callable[..., Any], iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Builds the model in the strategy's scope, whatever the scope of `fit`."""
        if iterator is not None:
            self.steps_per_epoch = iterator.num_batches
        if self._assigning_steps or self._encode_text:
            is_due = self._builds.are_due() or self._example is None
            if is_due and data_batch is None:
                data_batch = first_batch_of(iterator)
            if self._example is None:
                self._example = data_batch
            if self._encode_text:
                build = functools.partial(build_on_text, self._model)
            self._build_as_keras = functools.partial(build, data_batch=self._example)
            return
        if fixes_batch_size(self._model):
            self._build_for_a_share(
                build, first_batch_of(iterator) if data_batch is None else data_batch
            )
            return
        looks = self.must_know_others and not self._has_looked and not is_built(self._model)
        if looks and iterator is not None:
            self._has_looked = True
            self._first_batch, iterator = first_batch_of(iterator), None
            data_batch = self._first_batch
        given = {"iterator": iterator, "data_batch": data_batch}
        with self.strategy.scope():
            build(**{name: value for name, value in given.items() if value is not None})

    def _build_for_a_share(self, build: Callable[..., Any], batch: Any) -> None:
        """Builds the model with the shapes of a replica's part of a batch."""
        leaves = jax.tree.leaves(batch)
        strategy = self.strategy
        proportions = strategy.replica_shares.proportions
        shares = Shares(count_examples(leaves), strategy.num_replicas_now, proportions)
        try:
            with strategy.scope():
                build(data_batch=jax.tree.map(lambda leaf: leaf[: shares.chunk], batch))
        except (TypeError, ValueError) as error:
            note_share(error, [leaf.shape for leaf in leaves], shares.chunk, shares)
            raise

    def _build_for(self, name: str, example: Any) -> None:
        """Creates everything that the step `name`, about to be traced on batches, uses."""
        assigns = name in self._assigning_steps
        if self._encode_text or not assigns:
            self._build_all()
        if assigns:
            touched = cells_touched_by(
                assigning(self._model, name),
                self._encode_text(example) if self._encode_text else example,
                self.strategy.placement,
                functools.partial(replica_of_step, self._model, self.strategy, assigns=True),
            )
            compiled = self._model._compile_metrics, self._model._compile_loss
            if any(part is not None and not part.built for part in compiled):
                # The step ignores them, but Keras reads their results, and evaluation would
                # add the metrics of a loss of several outputs to the state of the loop.
                self._build_all()
            own = {cell for group in STATE_OF_STEPS[name] for cell in self._cells(group)}
            self._others[name] = [cell for cell in touched if cell not in own]

    def _build_all(self) -> None:
        """Builds the model as Keras does, once."""
        if self._build_as_keras is not None:
            with self.strategy.scope():
                self._build_as_keras()
            self._build_as_keras = None

    def _cells_of(self, name: str) -> dict[str, list[Cell]]:
        """Returns the groups of cells of the step `name`; the metrics' are last."""
        cells = {group: self._cells(group) for group in STATE_OF_STEPS[name]}
        if name in self._assigning_steps:
            metrics = cells.pop(METRICS, None)
            cells[OTHERS] = self._others.get(name, [])
            if metrics is not None:
                cells[METRICS] = metrics
        return cells

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
        """Takes the stored arrays of the requested groups (`model._get_jax_state`).

        The trainer keeps them; Keras' loops, which only pass the state on, get the names of the
        groups.
        """
        del purge_model_variables  # the loop borrows them always
        if self._is_in_step and self.running is not None and self.running.is_of_this_thread:
            raise RuntimeError(
                f"Expected that nothing uses model {self._model.name!r} while a step of it runs. "
                "Received: fit, evaluate or predict of it, called by a signal handler or by the "
                "step. Let the handler set a flag, and call it in a callback "
                "(on_train_batch_end), or after fit has ended."
            )
        groups = tuple(group for group in STATE_OF_STEPS["train_step"] if wanted.get(group))
        name = next(name for name, taken in STATE_OF_STEPS.items() if taken == groups)
        self._store_state()  # of a loop that was interrupted
        cells = [cell for cells in self._cells_of(name).values() for cell in cells]
        with signals_held:
            self.running = Running(cells, self._give_back)
        return groups

    def _give_back(self) -> None:
        """Ends the running loop's hold on the state, which is read from elsewhere."""
        running = self.running
        if running is not None and not self._is_in_step and running.is_of_this_thread:
            self._store_state()

    def _store_state(self) -> None:
        """Returns the state of the running loop to the model (`model.jax_state_sync`)."""
        if self.running is not None:
            self.settle()
        with signals_held:  # until then, a handler may have used the model
            if self.running is not None:
                self.running.store()
                self.running = None
                self._model._jax_state_synced = True

    def put_back(self) -> None:
        """Returns the state of a failed loop to the model, without the steps that are queued."""
        with signals_held:
            if self.running is not None:
                self.running.put_back()
                self.running = None
                self._model._jax_state_synced = True

    # -- what Keras calls for each batch ---------------------------------------------------

    def _make_train_function(self, force: bool = False) -> None:
        if self._model.train_function is not None and not force:
            return
        self._prepare("train_step")
        self._model.train_function = self._repeated(self.running_step("train_step"))

    def _optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Returns the model's compiled optimizer, and others that it references."""
        held = [self._model.optimizer, *vars(self._model).values()]
        return [value for value in held if isinstance(value, keras.optimizers.Optimizer)]

    def _make_test_function(self, force: bool = False) -> None:
        if self._model.test_function is not None and not force:
            return
        self._prepare("test_step")
        self._model.test_function = self._repeated(self.running_step("test_step"))

    def _make_predict_function(self, force: bool = False) -> None:
        if self._model.predict_function is not None and not force:
            return
        self._prepare("predict_step")
        self._model.predict_function = self._repeated(
            self.running_step("predict_step"), keep_all=True
        )

    def _prepare(self, name: str, example: Any = None) -> None:
        """Builds what the step `name` uses, and makes the step, which is compiled when it runs.

        One that assigns needs a batch. If there is none yet, this is called again for the first.
        """
        self._compiled.pop(name, None)
        example = self._example if example is None else example
        if example is None and name in self._assigning_steps:
            return
        if name == "train_step":
            for optimizer in self._optimizers():
                adopt_optimizer(optimizer)
        is_lifted_now = name == "train_step" and self._lift_if_needed()
        if not is_lifted_now:
            self._build_for(name, example)
        if name == "train_step":
            self._cells("optimizer_variables")
            if name not in self._assigning_steps:
                shard_slots(self._model.optimizer, self.strategy.placement)
        self._compiled[name] = self._compiled_step(name)
        if name != "predict_step":
            self._say_what_eager_means()
            self._results_of[name] = metric_results(
                self._model, self.strategy.placement, self._cells(METRICS), self.other_cells()
            )

    def _lift_if_needed(self) -> bool:
        """Lifts the steps before the loop begins, if the train step uses other variables.

        Returns:
            Whether it does; what it uses is then built.
        """
        example, self._first_batch = self._first_batch, None
        if example is None:
            return False
        self._assigning_steps = list(STATE_OF_STEPS)
        self._build_for("train_step", example)
        if not self._others["train_step"]:
            self._assigning_steps = []
            return False
        self._example = example
        return True

    def _lift_steps(self) -> None:
        """Makes all steps read and assign other variables than the model's.

        Keras' own steps are functions of the model's state, which capture the values of others.
        """
        self._assigning_steps = list(STATE_OF_STEPS)
        self._compiled.clear()

    def _predict_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, non_trainable_variables = self._model.predict_step(state, batch)
        return outputs, (state[0], non_trainable_variables)

    def _compiled_step(self, name: str) -> CompiledStep:
        for metric in self._model.metrics:
            adopt_mean(metric)
        cells = self._cells_of(name)
        step = self._predict_step if name == "predict_step" else getattr(self._model, name)
        if name in self._assigning_steps:
            own = {cell for group in STATE_OF_STEPS[name] for cell in cells[group]}
            step = StatefulStep(
                assigning(self._model, name), list(cells.values()), own, self.strategy.placement
            )
        returns_examples = name == "predict_step"
        return CompiledStep(self._model, self.strategy, step, cells, returns_examples)

    def take_over(self, name: str, batch: Any) -> tuple[Any, Any]:
        """Runs a step of a loop that Keras has begun without this trainer, whose steps it lifts.

        Args:
            name: The name of the step.
            batch: Its batch.

        Returns:
            What Keras' step returns.
        """
        self._assigning_steps = list(STATE_OF_STEPS)
        groups = self._take_state(**dict.fromkeys(STATE_OF_STEPS[name], True))
        self._model._jax_state_synced = False
        later = self._repeated(self.running_step(name), keep_all=name == "predict_step")
        setattr(self._model, name.replace("step", "function"), later)
        return self.running_step(name)(groups, batch)

    def running_step(self, name: str) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Returns what runs a step on Keras' state, which are the groups' names, and a batch."""
        if name == "predict_step":
            return self._with_outputs
        return functools.partial(self._with_logs, name)

    def _with_logs(self, name: str, groups: Any, batch: Any) -> tuple[StepLogs, Any]:
        running = self._run(name, batch, may_wait=self.steps_may_wait)
        return StepLogs(self._compiled[name], running.state, self._results_of[name]), groups

    def _with_outputs(self, groups: Any, batch: Any) -> tuple[Any, Any]:
        running = self._run("predict_step", batch, may_wait=False)
        return self._compiled["predict_step"].results(running.state), groups

    def _run(self, name: str, batch: Any, may_wait: bool) -> Running:
        step = self._compiled.get(name)
        if step is not None:
            try:
                return self._run_made(step, batch, may_wait)
            except StateCapturedError:
                if step.trains:  # it has not begun
                    self.steps -= 1
                    self.begun.pop()
                self._lift_steps()
        self._store_state()  # the step may take more
        self._prepare(name, batch)
        return self._run_made(self._compiled[name], batch, may_wait)

    def _run_made(self, step: CompiledStep, batch: Any, may_wait: bool) -> Running:
        if self._encode_text:
            batch = self._encode_text(batch)
        self._is_in_step = True
        try:
            running = self._held_for(step)
            self._run_on(running, step, batch, may_wait)
            assert self.running is not None
            running = self.running
            equal_copies = self.strategy.equal_copies
            if equal_copies is not None and equal_copies.is_due():
                step.finish(running.state)
                equal_copies.check(zip(running.cells, running.state, strict=True))
            return running
        finally:
            self._is_in_step = False

    def _held_for(self, step: CompiledStep) -> Running:
        """Returns the running loop, which is to run a step."""
        with signals_held:
            if self.running is None:  # a signal handler has used the model since Keras took it
                self.running = Running(step.cells, self._give_back)
                self._model._jax_state_synced = False
        running = self.running
        if len(running.cells) != len(step.cells):
            raise RuntimeError(
                f"Model {self._model.name!r} has {len(running.cells)} variables, and had "
                f"{len(step.cells)} when its step was compiled. Create all variables before the "
                "first step, or call compile() again."
            )
        running.step = step
        return running

    def _run_on(self, running: Running, step: CompiledStep, batch: Any, may_wait: bool) -> None:
        shares = self.strategy.replica_shares
        if isinstance(shares, MeasuredShares) and step.trains and shares.is_due():
            step.finish(running.state)
            examples = count_examples(jax.tree.leaves(batch))
            shares.measure(examples, functools.partial(step.parts_alone, running.state, batch))
        observer = observing.step_observer
        run_step = self.run_step if observer is None else observer.training(self, step.trains)
        if step.trains:
            self.steps += 1
            self.begun.append(time.time())
            self.training_step = step
        tuning = self.strategy.tuning
        if tuning is None or tuning.has_settled or not step.trains:
            self.examples += run_step(step, batch, may_wait)
        else:
            self.examples += self._run_tuned(tuning, run_step, step, batch)

    def _run_tuned(
        self, tuning: Tuning, run_step: Callable[..., int], step: CompiledStep, batch: Any
    ) -> int:
        """Runs a step while the fastest method of communication is being determined."""
        running = self.running
        assert running is not None
        step.finish(running.state)
        key = (step, tuple(shape_of(leaf) for leaf in jax.tree.leaves(batch)))
        examples = tuning.step(
            key, lambda: run_step(step, batch, False), lambda _: [*running.state]
        )
        if tuning.has_settled:
            # The programs of other methods, and those of steps that may not be queued.
            step.forget_programs()
        return examples

    def run_once(self, step: CompiledStep, batch: Any, may_wait: bool) -> int:
        """Runs a step on a batch, with the state that the running loop has taken."""
        assert self.running is not None
        return step(self.running.state, batch, may_wait)

    @contextlib.contextmanager
    def state_at_rest(self) -> Iterator[None]:
        """Inside, the state of a running loop is in its cells. Queued steps stay queued."""
        running = self.running
        assert running is not None
        with signals_held:
            running.put_back()
            self.running = None
            is_synced, self._model._jax_state_synced = self._model._jax_state_synced, True
        yield
        with signals_held:
            self._model._jax_state_synced = is_synced
            self.running = Running(running.cells, self._give_back)
            self.running.step = running.step

    def other_cells(self) -> list[Cell]:
        """Returns the cells that steps use, and that are not the model's variables."""
        return list(dict.fromkeys(cell for cells in self._others.values() for cell in cells))

    def metrics_cells(self) -> list[Cell]:
        """Returns the cells of the metrics' variables."""
        return self._cells(METRICS)

    @property
    def model(self) -> keras.Model:
        return self._model

    def _repeated(self, step: Callable[..., Any], keep_all: bool = False) -> Callable[..., Any]:
        """Runs `steps_per_execution` batches per call."""

        def function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            feeder = self.feeder
            batches = metered(iterator if feeder is None else feeder.asking(iterator))
            result, state = step(state, next(batches))
            results = [result]
            for _ in range(self._model.steps_per_execution - 1):
                batch = next(batches, None)
                if batch is None:
                    break
                result, state = step(state, batch)
                results.append(result)
            if keep_all and len(results) > 1:
                result = jax.tree.map(lambda *parts: np.concatenate(parts), *results)
            return result, state

        return function

    def _say_what_eager_means(self) -> None:
        several = self.strategy.num_replicas_now > 1
        if self._model.run_eagerly and several and not self._said_what_eager_means:
            self._said_what_eager_means = True
            logger.warning(
                "run_eagerly=True: a step on %d replicas is one program, so it is compiled "
                "anyway. To debug a step, use jax.debug.print, or OneDeviceStrategy.",
                self.strategy.num_replicas_now,
            )


def _on_the_host(metrics_of: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that waits for the metrics and copies them to the host.

    Keras itself waits for them inside a bare `except`, where Ctrl-C would be ignored.
    """

    @functools.wraps(metrics_of)
    def on_the_host(logs: Any) -> Any:
        return jax.device_get(metrics_of(logs))

    return on_the_host


def trainer_of(model: keras.Model) -> ReplicaTrainer | None:
    """Returns the trainer of a model that was created in a strategy's scope, otherwise None."""
    return vars(model).get("_unison_trainer")
