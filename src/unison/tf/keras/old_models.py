"""The attributes of Keras 2's models, layers, metrics and variables that Keras 3's do not have.

`patches` gives it to Keras' classes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from unison.identity_key import Reference
from unison.keras.control_flow import with_methods_converted
from unison.keras.host_layers import with_text_as_objects
from unison.keras.losses import scaled_loss, unscaled_loss
from unison.keras.scope import computes_by_its_variables
from unison.keras.stateful_step import call_assigning
from unison.keras.takeover import captured_is_an_error, trains_alone
from unison.keras.trainer import trainer_of
from unison.keras.values import values_in
from unison.keras.variables import annotate
from unison.strategies import get_strategy
from unison.tf.keras.masks import in_keras_step
from unison.tf.keras.utils import DatasetCreator
from unison.tf.tensors import start_devices
from unison.unsupported import UnsupportedMember

#: The arguments by which `fit` of Keras 2 configures its queue; Keras 3 asks `PyDataset` instead.
_QUEUE_ARGUMENTS = ("max_queue_size", "workers", "use_multiprocessing")

#: The methods of a model that leave its weights as they are.
_READING = ("evaluate", "predict", "test_on_batch", "predict_on_batch")


class ModelMethods:
    """For `keras.Model`."""

    save_spec = UnsupportedMember("use model.input_shape, or model.export(path)")

    @property
    def distribute_strategy(self: Any) -> Any:
        """The strategy in whose scope the model was created.

        TF: `tf.keras.Model.distribute_strategy`.
        """
        trainer = trainer_of(self)
        return get_strategy() if trainer is None else trainer.strategy

    @property
    def metrics_names(self: Any) -> list[str]:
        """The names of the results of `evaluate`, in order. TF: `tf.keras.Model.metrics_names`."""
        names: list[str] = []
        for metric in self.metrics:
            parts = getattr(metric, "metrics", None)  # of the metrics given to `compile`
            names += [metric.name] if parts is None else [part.name for part in parts]
        return names

    def reset_states(self: Any) -> None:
        """Resets the states of stateful layers. TF: `tf.keras.Model.reset_states`."""
        for layer in self._flatten_layers(include_self=False):
            if getattr(layer, "stateful", False) and hasattr(layer, "reset_state"):
                layer.reset_state()

    # -- losses and metrics in a `train_step` --

    def compiled_loss(
        self: Any,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
        regularization_losses: Any = None,
    ) -> Any:
        """Returns the compiled loss plus `regularization_losses`, and records it as `loss`.

        TF: `tf.keras.Model.compiled_loss` (Keras 2).
        """
        loss = self._compile_loss(y_true, y_pred, sample_weight)
        loss = sum(map(scaled_loss, regularization_losses or ()), loss)
        examples = keras.tree.flatten(y_pred)[0].shape[0]
        self._loss_tracker.update_state(unscaled_loss(loss), sample_weight=examples)
        return loss

    @property
    def compiled_metrics(self: Any) -> CompiledMetrics:
        """The metrics given to `compile`. TF: `tf.keras.Model.compiled_metrics` (Keras 2)."""
        return CompiledMetrics(self)


class CompiledMetrics:
    """The metrics given to `compile`, as a `train_step` of Keras 2 updates them."""

    def __init__(self, model: keras.Model):
        self._compiled = model._compile_metrics

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Updates all metrics; does nothing if there are none."""
        if self._compiled is not None:
            self._compiled.update_state(y_true, y_pred, sample_weight)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [] if self._compiled is None else self._compiled.metrics


def compile_ignoring(arguments: Sequence[str], compile: Callable[..., None]) -> Callable[..., None]:
    """Returns `compile` that takes, without effect, some arguments of Keras 2."""

    @functools.wraps(compile)
    def wrapper(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        for argument in arguments:
            kwargs.pop(argument, None)
        compile(self, *args, **kwargs)

    return wrapper


def step_with_or_without_state(name: str) -> Callable[..., Any]:
    """Returns Keras' own `train_step`, ... which, given a batch only, reads and assigns variables.

    This is how a `train_step(self, data)` calls `super().train_step(data)`. Python's control flow
    over tensors in the model's layers is converted.
    """
    step = getattr(keras.Model, name)

    @functools.wraps(step)
    def wrapper(self: keras.Model, *args: Any) -> Any:
        with in_keras_step.bound_to(name == "train_step"):
            if len(args) == 1:
                return call_assigning(self, step, name, *args)
            return with_methods_converted(self, lambda: captured_is_an_error(self, step, *args))

    return wrapper


def results_with_values(results: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Any]:
    """Returns `Model.get_metrics_result`, for metrics whose `result` returns a variable."""

    @functools.wraps(results)
    def get_metrics_result(model: keras.Model) -> dict[str, Any]:
        return values_in(results(model))

    return get_metrics_result


def entry_point(name: str) -> Callable[..., Any]:
    """Returns `fit`, `evaluate`, `train_on_batch`, ... of `keras.Model` for programs of Keras 2.

    It has the arguments of Keras 2, of which those of the queue are ignored, and trains a model
    whose steps Keras cannot run on JAX (see `unison.keras.takeover.trains_alone`), or whose
    variables are a strategy's, by a trainer of ours.
    """
    method = getattr(keras.Model, name)
    is_on_batch = name.endswith("_on_batch")

    @functools.wraps(method)
    def wrapper(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if trains_alone(self) or (name in _READING and computes_by_its_variables(self)):
            return getattr(self, name)(*args, **kwargs)
        trainer = trainer_of(self)
        if trainer is not None and trainer.takes_text:
            args, kwargs = with_text_as_objects((args, kwargs))
        args, kwargs = _with_created_batches(self, args, kwargs)
        for argument in _QUEUE_ARGUMENTS:
            kwargs.pop(argument, None)
        keeps_metrics = is_on_batch and not kwargs.pop("reset_metrics", True)
        with _metrics_kept(self) if keeps_metrics else contextlib.nullcontext():
            # By name: while a scope is open, another function is found here.
            return getattr(super(keras.Model, self), name)(*args, **kwargs)

    added = ("reset_metrics",) if is_on_batch else _QUEUE_ARGUMENTS
    vars(wrapper)["__signature__"] = _with_parameters(method, added)
    return wrapper


def _with_created_batches(
    model: keras.Model, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with the batches that a `DatasetCreator` makes in its place."""

    def batches(value: Any) -> Any:
        if isinstance(value, DatasetCreator):
            trainer = trainer_of(model)
            takes_text = trainer is not None and trainer.takes_text
            return value.batches_for(model.distribute_strategy, needs_whole=takes_text)
        return value

    return tuple(map(batches, args)), {name: batches(value) for name, value in kwargs.items()}


@contextlib.contextmanager
def _metrics_kept(model: keras.Model) -> Iterator[None]:
    """Inside, `model` does not reset its metrics."""
    own = vars(model).get("reset_metrics")
    vars(model)["reset_metrics"] = lambda: None
    try:
        yield
    finally:
        if own is None:
            del vars(model)["reset_metrics"]
        else:
            vars(model)["reset_metrics"] = own


def _with_parameters(function: Callable[..., Any], names: tuple[str, ...]) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    variadic = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in names]
    return signature.replace(parameters=[*own, *added, *variadic])


class ShapeOf:
    """The shape of a layer's `input` or `output`, unless the layer sets the attribute itself.

    TF: `tf.keras.layers.Layer.input_shape` and `output_shape` (Keras 2).
    """

    def __init__(self, tensors: str):
        self._tensors = tensors

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        tensors = getattr(layer, self._tensors)
        return keras.tree.map_structure(lambda tensor: tensor.shape, tensors)


def method_adding_weights(owner: Any) -> Callable[..., Any]:
    """Returns `add_weight` of layers or metrics with Keras 2's arguments.

    The name may come first, and annotations may be TensorFlow's.
    """
    original = owner.add_weight

    @functools.wraps(original)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            kwargs["name"], args = args[0], args[1:]
        kwargs.pop("use_resource", None)
        synchronization = kwargs.pop("synchronization", None)
        aggregation = kwargs.pop("aggregation", None)
        variable = original(self, *args, **kwargs)
        annotate(variable, synchronization, aggregation)
        return variable

    return add_weight


class MetricMethods:
    """For `keras.metrics.Metric`."""

    def reset_states(self: Any) -> None:
        """Resets the metric. TF: `tf.keras.metrics.Metric.reset_states` (Keras 2)."""
        self.reset_state()


def init_starting_devices(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a variable's `__init__` that starts the devices as the program stated them.

    A model may be a program's first use of a device; see `unison.tf.tensors.start_devices`.
    """

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        start_devices()
        original(self, *args, **kwargs)

    return init


class VariableMethods:
    """For `keras.Variable`."""

    def ref(self: Any) -> Reference:
        """Returns a key for dictionaries and sets. TF: `tf.Variable.ref`."""
        return Reference(self)

    def read_value(self: Any) -> Any:
        """Returns the value. TF: `tf.Variable.read_value`."""
        return self.value
