"""Losses, metrics and optimizers of random programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import losses, metrics, ops

import unison.tf as tf
from generated_programs.choices import Optimizer, Program

#: The losses for each kind of output. Losses that compare the examples of a batch with each other
#: (Dice, Tversky) see those of their replica only, as docs/keras.md says, and are not here.
LOSSES: dict[str, dict[str, Callable[..., Any]]] = {
    "number": {
        "plain": losses.MeanSquaredError,
        "mae": losses.MeanAbsoluteError,
        "huber": losses.Huber,
        "log_cosh": losses.LogCosh,
        "own": lambda **options: OwnLoss(**options),
    },
    "binary": {
        "plain": losses.MeanSquaredError,
        "binary_crossentropy": losses.BinaryCrossentropy,
        "focal": losses.BinaryFocalCrossentropy,
        "hinge": losses.Hinge,
    },
    "classes": {
        "plain": losses.SparseCategoricalCrossentropy,
        "ignoring": lambda **options: losses.SparseCategoricalCrossentropy(
            ignore_class=1, **options
        ),
    },
    "one_hot": {
        "plain": losses.MeanSquaredError,
        "crossentropy": lambda **options: losses.CategoricalCrossentropy(
            label_smoothing=0.1, **options
        ),
        "focal": losses.CategoricalFocalCrossentropy,
        "divergence": losses.KLDivergence,
        "cosine": losses.CosineSimilarity,
        "poisson": losses.Poisson,
    },
}
LOSSES["steps"] = LOSSES["number"]
REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")

METRICS: dict[str, dict[str, Callable[[], Any]]] = {
    "number": {
        "mae": lambda: metrics.MeanAbsoluteError(name="mae"),
        "rmse": lambda: metrics.RootMeanSquaredError(name="rmse"),
        "r2": lambda: metrics.R2Score(name="r2"),
        "log_cosh": lambda: metrics.LogCoshError(name="log_cosh"),
        "function": lambda: square_of_error,
        "spread": lambda: Spread(name="spread"),
        "calls": lambda: Calls(name="calls"),
        "largest": lambda: Largest(name="largest"),
        "smallest": lambda: Smallest(name="smallest"),
        "level": lambda: Level(name="level"),
    },
    "binary": {
        "accuracy": lambda: metrics.BinaryAccuracy(name="accuracy"),
        "auc": lambda: metrics.AUC(20, name="auc"),
        "precision": lambda: metrics.Precision(name="precision"),
        "recall": lambda: metrics.Recall(name="recall"),
        "false_negatives": lambda: metrics.FalseNegatives(name="false_negatives"),
        "iou": lambda: metrics.BinaryIoU(name="iou"),
        "sensitivity": lambda: metrics.SensitivityAtSpecificity(0.5, 20, name="sensitivity"),
    },
    "classes": {
        "accuracy": lambda: metrics.SparseCategoricalAccuracy(name="accuracy"),
        "top": lambda: metrics.SparseTopKCategoricalAccuracy(2, name="top"),
        "word": lambda: "accuracy",
    },
    "one_hot": {
        "accuracy": lambda: metrics.CategoricalAccuracy(name="accuracy"),
        "f1": lambda: metrics.F1Score("macro", name="f1"),
        "cosine": lambda: metrics.CosineSimilarity(name="cosine"),
        "divergence": lambda: metrics.KLDivergence(name="divergence"),
        "iou": lambda: metrics.OneHotMeanIoU(3, name="iou"),
    },
}
METRICS["steps"] = {
    name: METRICS["number"][name]
    for name in ("mae", "rmse", "log_cosh", "spread", "calls", "level")
}


@keras.saving.register_keras_serializable("random programs")
class OwnLoss(losses.Loss):
    """A loss of one's own: the fourth power of the error, flattened."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.power(ops.tanh(y_pred - y_true), 4), axis=-1)


@keras.saving.register_keras_serializable("random programs")
def square_of_error(y_true: Any, y_pred: Any) -> Any:
    return ops.square(y_pred - y_true)


class _OwnMetric(metrics.Metric):
    def _variable(self, aggregation: str) -> Any:
        return self.add_variable((), "zeros", aggregation=aggregation, name=aggregation)


@keras.saving.register_keras_serializable("random programs")
class Spread(_OwnMetric):
    """The standard deviation of the predictions, of sums."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.count, self.total, self.squares = (self._variable("sum") for _ in range(3))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        y_pred = ops.cast(y_pred, self.dtype)
        self.count.assign_add(ops.cast(ops.size(y_pred), self.dtype))
        self.total.assign_add(ops.sum(y_pred))
        self.squares.assign_add(ops.sum(ops.square(y_pred)))

    def result(self) -> Any:
        count = ops.maximum(self.count, 1)
        return ops.sqrt(ops.maximum(self.squares / count - ops.square(self.total / count), 1e-3))


@keras.saving.register_keras_serializable("random programs")
class Calls(_OwnMetric):
    """How often it was updated; the first replica has examples in every batch."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.calls = self._variable("only_first_replica")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.calls.assign_add(1)

    def result(self) -> Any:
        return self.calls.value


@keras.saving.register_keras_serializable("random programs")
class Level(_OwnMetric):
    """The sum of the predictions, as a mean over the replicas of multiples of their parts."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.level = self._variable("mean")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self.level.assign_add(replicas * ops.sum(ops.cast(y_pred, self.dtype)))

    def result(self) -> Any:
        return self.level.value


@keras.saving.register_keras_serializable("random programs")
class Largest(metrics.Metric):
    """The largest prediction: a state that is no sum."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_pred))))

    def result(self) -> Any:
        return self.largest + 0.0


@keras.saving.register_keras_serializable("random programs")
class Smallest(metrics.Metric):
    """The smallest prediction."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.smallest = self.add_variable((), "ones", name="smallest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.smallest.assign(ops.minimum(self.smallest, ops.min(y_pred)))

    def result(self) -> Any:
        return self.smallest + 0.0


#: Metrics whose states are extremes: they need an example.
EXTREMES = ("largest", "smallest")

#: A large epsilon: a gradient that is zero but for round-off (that of a bias before a
#: normalization) would otherwise be divided by itself, and move its weight at random.
EPSILON = 1e-2
OPTIMIZERS: dict[str, tuple[type[keras.optimizers.Optimizer], dict[str, Any]]] = {
    "SGD": (keras.optimizers.SGD, {"learning_rate": 0.05}),
    "momentum": (
        keras.optimizers.SGD,
        {"learning_rate": 0.03, "momentum": 0.8, "nesterov": True},
    ),
    "Adam": (keras.optimizers.Adam, {"learning_rate": 0.01, "epsilon": EPSILON}),
    "amsgrad": (
        keras.optimizers.Adam,
        {"learning_rate": 0.01, "epsilon": EPSILON, "amsgrad": True},
    ),
    "AdamW": (
        keras.optimizers.AdamW,
        {"learning_rate": 0.01, "epsilon": EPSILON, "weight_decay": 0.1},
    ),
    "Adamax": (keras.optimizers.Adamax, {"learning_rate": 0.01, "epsilon": EPSILON}),
    "Nadam": (keras.optimizers.Nadam, {"learning_rate": 0.01, "epsilon": EPSILON}),
    "RMSprop": (keras.optimizers.RMSprop, {"learning_rate": 0.005, "epsilon": EPSILON}),
    "Adagrad": (keras.optimizers.Adagrad, {"learning_rate": 0.02, "epsilon": EPSILON}),
    "Adadelta": (keras.optimizers.Adadelta, {"learning_rate": 0.1, "epsilon": EPSILON}),
    "Ftrl": (keras.optimizers.Ftrl, {"learning_rate": 0.02}),
    "Lamb": (keras.optimizers.Lamb, {"learning_rate": 0.01, "epsilon": EPSILON}),
}
_CLIPS = {"clipnorm": 0.1, "global_clipnorm": 0.2, "clipvalue": 0.05}


def make_optimizers(program: Program) -> list[keras.optimizers.Optimizer]:
    """Returns as many new optimizers as a program has."""
    number = 2 if program.applying == "two_optimizers" else 1
    return [make_optimizer(program.optimizer) for _ in range(number)]


def make_optimizer(optimizer: Optimizer) -> keras.optimizers.Optimizer:
    """Returns a new Keras optimizer."""
    kind, options = OPTIMIZERS[optimizer.name]
    options = dict(options)
    if optimizer.schedule:
        schedule = keras.optimizers.schedules.ExponentialDecay
        options["learning_rate"] = schedule(options["learning_rate"], 2, 0.7)
    if optimizer.clip is not None:
        options[optimizer.clip] = _CLIPS[optimizer.clip]
    if optimizer.ema is not None:
        options |= {"use_ema": True, "ema_momentum": 0.6}
        options["ema_overwrite_frequency"] = optimizer.ema or None
    if optimizer.weight_decay:
        options["weight_decay"] = optimizer.weight_decay
    if optimizer.accumulation > 1:
        options["gradient_accumulation_steps"] = optimizer.accumulation
    made = kind(**options)
    if optimizer.loss_scale is not None:
        scaling = keras.optimizers.LossScaleOptimizer
        return scaling(made, optimizer.loss_scale, dynamic_growth_steps=optimizer.growth)
    return made
