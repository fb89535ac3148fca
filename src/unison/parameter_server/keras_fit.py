"""Keras' `fit` on parameter servers: its steps are functions that the coordinator schedules."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from unison.data import Dataset, InputContext
from unison.keras.optimizers import scaled_in_keras_steps
from unison.keras.progress import CallbacksInOrder
from unison.keras.stateful_step import STATE_OF_STEPS, is_stateful
from unison.keras.trainer import ReplicaTrainer
from unison.lifting import current_lift
from unison.parameter_server.coordinator import ClusterCoordinator
from unison.parameter_server.loops import ScheduledLoop
from unison.parameter_server.per_worker import PerWorkerIterator
from unison.parameter_server.serving import current_worker_index, dataset_of
from unison.strategies.replica_share import ScaledBy, replica_share

import keras  # isort: skip
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

if TYPE_CHECKING:
    from unison.parameter_server.strategy import ParameterServerStrategy

#: The groups of a model's state that only the optimizer writes: equal on all replicas.
_WRITTEN_ALIKE = ("trainable_variables", "optimizer_variables")


class ParameterServerTrainer(ReplicaTrainer):
    """Trains a model whose variables are on servers, on the workers.

    Args:
        model: The model. Its `fit` and `evaluate` are replaced, on this object only.
        strategy: The strategy in whose scope it was created.
    """

    strategy: ParameterServerStrategy

    def __init__(self, model: keras.Model, strategy: ParameterServerStrategy):
        super().__init__(model, strategy)
        self._evaluate_here = model.evaluate
        self._steps: dict[str, tuple[Any, Callable[..., None]]] = {}
        vars(model).update(fit=self.fit, evaluate=self.evaluate)

    @property
    def _coordinator(self) -> ClusterCoordinator:
        return ClusterCoordinator(self.strategy)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> keras.callbacks.History:
        """Trains the model on the workers; see `keras.Model.fit`.

        Every worker creates the dataset for itself and takes its own batches; an epoch is
        `steps_per_epoch` steps of all workers together; in synchronous mode, every worker takes
        part in each step, and `batch_size` is the total of all workers. Callbacks get logs at the
        end of each epoch.

        Raises:
            ValueError: `steps_per_epoch` is missing, or data and weights do not match.
        """
        x = self._maker_of(x)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = _split(x, y, sample_weight, validation_split)
        if class_weight is not None and not _is_dataset(x):
            if sample_weight is not None:
                raise ValueError("Pass either class_weight or sample_weight.")
            sample_weight = class_weight_to_sample_weights(np.asarray(y), class_weight)
        count = self.strategy.num_replicas_in_sync
        data, steps = _data_and_steps(x, y, sample_weight, batch_size, shuffle, count)
        if class_weight is not None and _is_dataset(x):
            data = _Weighted(data, class_weight)
        steps = steps_per_epoch or steps
        if steps is None:
            raise ValueError(
                "fit() on parameter servers needs steps_per_epoch: the workers take batches of "
                "datasets of their own, and nobody sees them all. Received: None"
            )
        model = self.model
        self._build_for_data(data)
        iterator = iter(self._coordinator.create_per_worker_dataset(data))
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            verbose = 2 if verbose == "auto" else verbose
            callbacks = CallbacksInOrder(
                callbacks,
                add_history=True,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=epochs,
                steps=steps,
                model=model,
            )
        model.stop_training = False
        callbacks.on_train_begin()
        initial_epoch = model._initial_epoch or initial_epoch
        logs: dict[str, Any] = {}
        for epoch in range(initial_epoch, epochs):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            with self._loop() as loop:
                for step in range(0, steps, self._steps_per_call):
                    last = min(step + self._steps_per_call, steps)
                    callbacks.on_train_batch_begin(step)
                    self._schedule("train_step", iterator, last - step, loop)
                    callbacks.on_train_batch_end(last - 1)
                self._coordinator.join()
            logs = self._logs()
            if validation_data is not None and (epoch + 1) % validation_freq == 0:
                result = self._validate(validation_data, validation_steps, validation_batch_size)
                logs |= {f"val_{name}": value for name, value in result.items()}
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs)
        history: keras.callbacks.History = model.history
        return history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Evaluates the model; see `keras.Model.evaluate`.

        With a function that returns a dataset (`DatasetCreator`), the workers evaluate it, in
        `steps` steps of all together. Other data is evaluated in this process, every example once.
        """
        x = self._maker_of(x)
        if not callable(x):
            return self._evaluate_here(
                x,
                y,
                batch_size=batch_size,
                verbose=verbose,
                sample_weight=sample_weight,
                steps=steps,
                callbacks=callbacks,
                return_dict=return_dict,
                **kwargs,
            )
        if steps is None:
            raise ValueError("evaluate() with a function of a dataset needs steps. Received: None")
        self._build_for_data(x)
        model = self.model
        model.reset_metrics()
        iterator = iter(self._coordinator.create_per_worker_dataset(x))
        with self._loop() as loop:
            for step in range(0, steps, self._steps_per_call):
                count = min(self._steps_per_call, steps - step)
                self._schedule("test_step", iterator, count, loop)
            self._coordinator.join()
        logs = self._logs()
        return logs if return_dict else [logs[name] for name in logs]

    def _validate(self, data: Any, steps: int | None, batch_size: int | None) -> dict[str, Any]:
        x, y, weight = data, None, None
        if isinstance(data, list | tuple):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        result: dict[str, Any] = self.evaluate(
            x,
            y,
            sample_weight=weight,
            batch_size=batch_size,
            steps=steps,
            verbose=0,
            return_dict=True,
        )
        return result

    def _logs(self) -> dict[str, Any]:
        """Returns the results of the metrics on the servers."""
        found = jax.tree.map(np.asarray, self.model.get_metrics_result())
        return {
            name: float(value) if np.ndim(value) == 0 else value for name, value in found.items()
        }

    def _build_for_data(self, data: Any) -> None:
        """Builds the unbuilt parts of the model, with a batch that the coordinator reads."""
        model = self.model
        optimizer = model.optimizer
        is_built = all(layer.built for layer in model._flatten_layers())
        parts = (model._compile_metrics, model._compile_loss, optimizer)
        if is_built and all(part is None or part.built for part in parts):
            return
        batch = next(iter(data() if callable(data) else data))
        model._symbolic_build(data_batch=batch)
        if optimizer is not None and not optimizer.built:
            with self.strategy.scope():
                optimizer.build(model.trainable_variables)

    def _loop(self) -> ScheduledLoop:
        return ScheduledLoop(self._coordinator, self.strategy.remote_placement)

    def _schedule(
        self, name: str, iterator: PerWorkerIterator, count: int, loop: ScheduledLoop
    ) -> None:
        """Schedules one execution of `count` steps."""
        model = self.model
        compiled = (model.optimizer, model._compile_metrics, model._compile_loss)
        key = f"{name} {count}"
        known, function = self._steps.get(key, (None, None))
        if function is None or any(a is not b for a, b in zip(known or (), compiled, strict=True)):
            function = self._execution(name, count)
            self._steps[key] = (compiled, function)
        self._coordinator.schedule_in(loop, function, args=(iterator,))

    def _execution(self, name: str, count: int) -> Callable[[Iterator[Any]], None]:
        """Returns a function that runs `count` steps, for workers."""
        step = getattr(self.model, name)
        assigns = is_stateful(step)
        groups = STATE_OF_STEPS[name]

        def one_step(batch: Any) -> None:
            if assigns:
                step(batch)
                return
            variables = [self._variables(group) for group in groups]
            alike = {id(v) for group in _WRITTEN_ALIKE for v in self._variables(group)}
            state = tuple([variable.value for variable in members] for members in variables)
            _, new = step(state, batch)
            changed = zip(
                itertools.chain.from_iterable(variables),
                itertools.chain.from_iterable(state),
                itertools.chain.from_iterable(new),
                strict=True,
            )
            for variable, before, after in changed:
                if after is not before:
                    with _writing(alike=id(variable) in alike):
                        variable.assign(after)

        def execution(batches: Iterator[Any]) -> None:
            for _ in range(count):
                with self._weighing(assigns):
                    self.strategy.run(one_step, args=(next(batches),))

        return execution

    def _weighing(self, assigns: bool) -> contextlib.AbstractContextManager[None]:
        """Scales losses inside the context, as a worker's batch is one of several of a step."""
        in_sync = self.strategy.num_replicas_in_sync
        if in_sync == 1:
            return contextlib.nullcontext()
        scaled_by = ScaledBy.LOSSES if assigns else scaled_in_keras_steps(self.model)
        return replica_share(1 / in_sync, scaled_by)

    @property
    def _steps_per_call(self) -> int:
        """The number of steps of a scheduled function; in synchronous mode, one."""
        steps: int = 1 if self.strategy.synchronous else self.model.steps_per_execution
        return steps

    def _maker_of(self, data: Any) -> Any:
        """Returns the function of no arguments for a `DatasetCreator`; otherwise `data`."""
        make = getattr(data, "dataset_fn", None)
        if make is None:
            return data
        in_sync = self.strategy.num_replicas_in_sync
        pipelines = len(self.strategy.worker_addresses) if self.strategy.synchronous else 1

        def made() -> Any:
            # The workers of a synchronous step are replicas of one job; otherwise each is a
            # separate job.
            worker = current_worker_index() if pipelines > 1 else None
            return make(InputContext(pipelines, worker or 0, in_sync))

        return made

    def _variables(self, group: str) -> list[keras.Variable]:
        if group == "optimizer_variables":
            optimizer = self.model.optimizer
            return [] if optimizer is None else list(optimizer.variables)
        return list(getattr(self.model, group))


def _writing(alike: bool) -> contextlib.AbstractContextManager[None]:
    """Declares that all replicas write equal values inside the context, if `alike`."""
    lift = current_lift()
    return lift.equal_writes() if alike and lift is not None else contextlib.nullcontext()


class _Weighted:
    """Batches with the weights of their classes."""

    def __init__(self, data: Any, class_weight: dict[int, float]):
        self._data = data
        self._class_weight = class_weight

    def __iter__(self) -> Iterator[Any]:
        for batch in dataset_of(self._data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            if y is None or sample_weight is not None:
                raise ValueError(
                    "class_weight needs a dataset of (x, y). Received batches "
                    + ("without targets." if y is None else "with sample weights.")
                )
            yield x, y, class_weight_to_sample_weights(np.asarray(y), self._class_weight)


def _split(x: Any, y: Any, sample_weight: Any, fraction: float) -> tuple[Any, Any]:
    """Returns arrays for training and for validation: the last ones."""
    if _is_dataset(x):
        raise ValueError(
            "validation_split divides arrays. Received a dataset, of which nobody sees all: pass "
            "validation_data."
        )
    parts: tuple[Any, Any] = train_validation_split((x, y, sample_weight), fraction)
    return parts


def _is_dataset(x: Any) -> bool:
    return callable(x) or (isinstance(x, Iterable) and not _is_of_arrays(x))


def _data_and_steps(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: bool, in_sync: int
) -> tuple[Any, int | None]:
    """Returns data for the workers, and the number of steps of an epoch, if that is known."""
    if _is_dataset(x):
        if y is not None or sample_weight is not None or batch_size is not None:
            raise ValueError(
                "A dataset has its targets, weights and batches in it. Received: y, sample_weight "
                "or batch_size beside it."
            )
        return x, None
    examples = tuple(part for part in (x, y, sample_weight) if part is not None)
    batch_size = batch_size or 32
    if batch_size % in_sync:
        raise ValueError(
            f"Expected a batch_size that {in_sync} workers can share. Received: {batch_size}"
        )
    count = len(jax.tree.leaves(examples)[0])
    dataset = Dataset.from_tensor_slices(examples)
    if shuffle:
        dataset = dataset.shuffle(count)
    # Only full batches: workers iterate over the data at their own pace.
    own_batch = min(batch_size // in_sync, count)
    return dataset.repeat().batch(own_batch), -(-count // batch_size)


def _is_of_arrays(x: Any) -> bool:
    leaves = jax.tree.leaves(x)
    return isinstance(x, dict | list | tuple | np.ndarray | jax.Array) and all(
        hasattr(leaf, "shape") or isinstance(leaf, int | float) for leaf in leaves
    )
