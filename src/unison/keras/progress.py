"""The callbacks of a distributed loop: nothing is fetched from the devices unless it is shown."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from unison.data import AutoShardPolicy, Dataset, Options
from unison.keras.batches_in_turn import shared
from unison.keras.feeding import feeding
from unison.keras.grain_loaders import is_grain_loader, reads_a_shard
from unison.keras.logs import StepLogs
from unison.keras.own_rows import takes_rows_alone
from unison.keras.torch_loaders import agree_on_order, is_divisible, is_loader, loads_a_part
from unison.runtime.process_group import all_gather_json
from unison.tracebacks import filter_traceback

if TYPE_CHECKING:
    from unison.keras.trainer import ReplicaTrainer

#: Seconds between two updates of the progress bar (Keras' own interval).
_INTERVAL = 0.05


def with_progress_bar(trainer: ReplicaTrainer, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `model.fit` or `model.evaluate` with `StepCallbacks` as its callbacks."""
    signature = inspect.signature(method)

    @filter_traceback
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get("callbacks")
        if "callbacks" in signature.parameters and not isinstance(
            given, keras.callbacks.CallbackList
        ):
            bound.arguments["callbacks"] = StepCallbacks(
                trainer,
                given,
                add_history=method.__name__ == "fit",
                verbose=bound.arguments.get("verbose", "auto"),
                epochs=bound.arguments.get("epochs", 1),
            )
        agree_on_data(trainer, bound.arguments)
        callbacks = keras.tree.flatten(given)
        resumes = any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks)
        is_fit = method.__name__ == "fit"
        trainer.must_know_others = is_fit and (resumes or bool(trainer.callbacks))
        try:
            with feeding(trainer):
                return method(*bound.args, **bound.kwargs)
        finally:
            trainer.steps_may_wait = False

    return wrapped


def on_agreed_data(trainer: ReplicaTrainer, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `model.predict`, whose outputs are in the order of the data, as in TensorFlow."""
    signature = inspect.signature(method)

    @filter_traceback
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        agree_on_data(trainer, bound.arguments, keeps_order=True)
        with feeding(trainer):
            return method(*bound.args, **bound.kwargs)

    return wrapped


def agree_on_data(
    trainer: ReplicaTrainer, arguments: dict[str, Any], keeps_order: bool = False
) -> None:
    """Sees to it that all processes give Keras batches of the same examples.

    Args:
        trainer: Whose strategy's replicas get them.
        arguments: Those of a loop; its datasets are replaced.
        keeps_order: Whether the workers share every batch, whatever the policy of a dataset.
    """
    placement = trainer.strategy.placement
    if not (placement.spans_processes or placement.is_elastic):
        return
    agree_on_shuffling()
    for name in ("x", "validation_data"):  # in the same order on all workers
        if name in arguments:
            arguments[name] = agreed_dataset(trainer, arguments[name], keeps_order)


def agreed_dataset(trainer: ReplicaTrainer, data: Any, keeps_order: bool = False) -> Any:
    """Returns a dataset that the workers share; other data as it is.

    Raises:
        ValueError: A loader of PyTorch or Grain leaves examples to other workers, and whole batches
            are needed.
    """
    strategy = trainer.strategy
    needs_whole = trainer.takes_text or not takes_rows_alone(strategy)
    is_elastic = strategy.placement.is_elastic
    part = None
    if is_grain_loader(data) and reads_a_shard(data):
        part = "ShardOptions of a shard. Pass shard_options=grain.sharding.NoSharding()."
    elif is_loader(data):
        if loads_a_part(data):
            part = "a DistributedSampler. Leave out the sampler, or pass shuffle=True."
        elif needs_whole or is_elastic or not is_divisible(data):  # otherwise, in every pass
            agree_on_order(data)
    if part is not None:
        if needs_whole or is_elastic or keeps_order:
            raise ValueError(
                "Expected a DataLoader of whole batches, the same on all workers, of which each "
                "takes its part: for predict, where workers may change, and for models that take "
                f"text. Received: one with {part}"
            )
        return strategy.distribute_datasets_from_function(lambda context: Dataset.from_source(data))
    if not isinstance(data, Dataset):
        return data if needs_whole or is_elastic else shared(data, strategy)
    if needs_whole or keeps_order or is_elastic:
        data = Dataset.with_options(data, Options(auto_shard_policy=AutoShardPolicy.DATA))
    return strategy.experimental_distribute_dataset(data)


def agree_on_shuffling() -> None:
    """Gives all processes the first one's random state of Python and NumPy, by which Keras shuffles
    arrays: they must see the same batches.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    own = [np.asarray(keys).tolist(), rest, random.getstate()]
    (keys, rest, (version, numbers, gauss)), *_ = all_gather_json(
        own, "The random state of Keras' shuffling"
    )
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    random.setstate((version, tuple(numbers), gauss))


class ReplicaProgbar(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, with the examples per second of all replicas together.

    The rate counts from the end of an epoch's first step, so that compiling is not in it.
    """

    def __init__(self, trainer: ReplicaTrainer):
        super().__init__()
        self._trainer = trainer
        placement = trainer.strategy.placement
        self._has_several_workers = placement.spans_processes or placement.is_elastic
        self._begin: tuple[float, int] | None = None
        self._shown = 0.0
        self._rate: float | None = None
        self._latest: StepLogs | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._restart()
        super().on_epoch_begin(epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._called_in_fit:
            self._finish()  # validation begins: its time is not training's
        else:
            self._restart()
        super().on_test_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._show(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._called_in_fit:
            self._show(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._finish()
        super().on_epoch_end(epoch, self._with_rate(logs))

    def on_test_end(self, logs: Any = None) -> None:
        if not self._called_in_fit:
            self._finish()
        super().on_test_end(self._with_rate(logs))

    def _restart(self) -> None:
        self._begin = self._rate = self._latest = None

    def _show(self, batch: int, logs: Any) -> None:
        """Updates the bar if it is due; only then are the logs computed."""
        self._latest = logs
        self.seen = batch + 1
        now = time.perf_counter()
        if self._begin is not None and now - self._shown < _INTERVAL:
            return
        # Steps that wait run on all workers at once, who do not all look at the same time.
        if self._has_several_workers and logs.step_is_waiting:
            return
        logs = dict(logs.items())  # waits for the step
        now = self._shown = time.perf_counter()
        if self._begin is None:
            self._begin = now, self._trainer.examples
        else:
            self._rate = (self._trainer.examples - self._begin[1]) / (now - self._begin[0])
        self._update_progbar(batch, self._with_rate(logs))

    def _finish(self) -> None:
        """Takes the rate of the whole epoch, once."""
        if self._latest is None or self._begin is None:
            return
        dict(self._latest.items())  # waits for the last step
        begin, examples = self._begin
        if self._trainer.examples > examples:
            self._rate = (self._trainer.examples - examples) / (time.perf_counter() - begin)
        self._latest = None

    def _with_rate(self, logs: Any) -> dict[str, Any]:
        logs = dict(logs or {})
        return logs if self._rate is None else {"examples/s": round(self._rate), **logs}


class CallbacksInOrder(keras.callbacks.CallbackList):
    """Keras' list of callbacks, all of which run in the thread that trains.

    Keras calls those of batches in other threads where it thinks that nobody could tell. What a
    signal handler raises while such a thread is started leaves it for ever.
    """

    def _configure_async_dispatch(self, callbacks: Any) -> None:
        self._async_train = self._async_test = self._async_predict = False


class StepCallbacks(CallbacksInOrder):
    """A list of callbacks that computes a step's logs only for callbacks that want them.

    They run between two steps, so that what they see and change is the state after the step they
    are told of.
    """

    def __init__(
        self,
        trainer: ReplicaTrainer,
        callbacks: Any,
        add_history: bool,
        verbose: Any,
        epochs: int,
    ):
        self._trainer = trainer
        self._progbar: keras.callbacks.ProgbarLogger | None = None
        verbose = 1 if verbose == "auto" else verbose
        super().__init__(callbacks, add_history=add_history, model=trainer.model)
        if add_history:
            trainer.callbacks_of_fit = list(self.callbacks)
            for callback in trainer.callbacks:  # after all others
                callback.set_model(trainer.model)
                self.callbacks.append(callback)
        if verbose and self._progbar is None:
            bar = ReplicaProgbar(trainer)
            bar.set_model(trainer.model)
            self._progbar = bar
            self.callbacks.append(bar)
        self._fixed_params = {"verbose": verbose, "epochs": epochs}
        self._bars = [c for c in self.callbacks if isinstance(c, ReplicaProgbar)]
        self._train_begin = self._overriding("on_train_batch_begin", "on_batch_begin")
        self._train_end = self._overriding("on_train_batch_end", "on_batch_end")
        self._test_begin = self._overriding("on_test_batch_begin")
        self._test_end = self._overriding("on_test_batch_end")
        self._may_wait = {
            "train": not (self._train_begin or self._train_end),
            "test": not (self._test_begin or self._test_end),
        }
        if trainer.strategy.placement.spans_processes:
            # The same steps must run together on all workers, also where one has more callbacks.
            of_all = all_gather_json(self._may_wait, "Whether callbacks look at every step")
            self._may_wait = {kind: all(own[kind] for own in of_all) for kind in self._may_wait}

    def _overriding(self, *names: str) -> list[keras.callbacks.Callback]:
        """Returns the callbacks, but for our bars, that define one of the methods themselves."""
        return [
            callback
            for callback in self.callbacks
            if not isinstance(callback, ReplicaProgbar)
            and any(not getattr(getattr(callback, n), "_is_default", False) for n in names)
        ]

    def on_train_begin(self, logs: Any = None) -> None:
        self.set_params({**self._fixed_params, "steps": self._trainer.steps_per_epoch})
        super().on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trainer.steps_may_wait = self._may_wait["train"]
        super().on_epoch_begin(epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        if not self.params:
            self.set_params({**self._fixed_params, "steps": self._trainer.steps_per_epoch})
        self._trainer.steps_may_wait = self._may_wait["test"]
        super().on_test_begin(logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._tell(self._train_begin, "on_train_batch_begin", batch, logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._tell(self._test_begin, "on_test_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._tell(self._train_end, "on_train_batch_end", batch, logs)
        for bar in self._bars:
            bar.on_train_batch_end(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._tell(self._test_end, "on_test_batch_end", batch, logs)
        for bar in self._bars:
            bar.on_test_batch_end(batch, logs)

    def _tell(
        self, callbacks: list[keras.callbacks.Callback], method: str, batch: int, logs: Any
    ) -> None:
        if not callbacks:
            return
        # A callback may look at the model without asking for `self.model`.
        self._trainer.model.jax_state_sync()
        values = _as_numbers(logs)
        for callback in callbacks:
            getattr(callback, method)(batch, logs=values)


def _as_numbers(logs: Any) -> dict[str, Any]:
    return {name: _as_number(value) for name, value in (logs or {}).items()}


def _as_number(value: Any) -> Any:
    return float(value) if getattr(value, "shape", None) == () else value
