"""A training program as data: a small tree of choices.

The default of every choice is its simplest value, so a program shrinks by defaults and by shorter
tuples. `describe` prints only what is not a default.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

VALIDATION_SPLIT = 0.4


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of a model.

    Attributes:
        kind: A name of `models.LAYERS`.
        regularizer: "l1", "l2" or "orthogonal", for the kernel of a layer that has one.
        activity: Whether its outputs are regularized.
        constrained: Whether its kernel has a constraint.
        frozen: Whether its weights are not trained.
    """

    kind: str = "dense"
    regularizer: str | None = None
    activity: bool = False
    constrained: bool = False
    frozen: bool = False


@dataclasses.dataclass(frozen=True)
class Input:
    """An input, and the layers behind it.

    Attributes:
        kind: "vector", "steps" (a sequence of vectors), "tokens" or "image".
        layers: The layers; those for other ranks are left out.
    """

    kind: str = "vector"
    layers: tuple[Layer, ...] = ()


@dataclasses.dataclass(frozen=True)
class Output:
    """An output, with its loss and metrics.

    Attributes:
        kind: "number", "binary", "classes", "one_hot", or "steps" (a number for each time step).
        loss: A name of `parts.LOSSES[kind]`.
        reduction: How the loss reduces the values of the examples.
        loss_weight: The loss's weight in the sum of the losses.
        weights: The weights of examples, or of their steps: None, "some", or "zeros" (many
            examples weigh nothing).
        metrics: Names of `parts.METRICS[kind]`.
        weighted_metrics: Likewise.
    """

    kind: str = "number"
    loss: str = "plain"
    reduction: str = "sum_over_batch_size"
    loss_weight: float = 1.0
    weights: str | None = None
    metrics: tuple[str, ...] = ()
    weighted_metrics: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        name: A name of `parts.OPTIMIZERS`.
        clip: None, "clipnorm", "global_clipnorm" or "clipvalue".
        ema: None, or after how many steps the average overwrites the weights (0: at the end only).
        weight_decay: The decay of the weights.
        accumulation: Over how many steps gradients are accumulated.
        schedule: Whether the learning rate decays.
        loss_scale: None, or the first scale of a `LossScaleOptimizer`.
        growth: After how many steps without overflow the loss scale doubles.
    """

    name: str = "SGD"
    clip: str | None = None
    ema: int | None = None
    weight_decay: float = 0.0
    accumulation: int = 1
    schedule: bool = False
    loss_scale: float | None = None
    growth: int = 2000


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: a model, its data, and what is done with them.

    Attributes:
        seed: The seed of the data and of the first weights.
        replicas: How many replicas run it.
        inputs: The inputs.
        head: The layers behind the merged inputs.
        outputs: The outputs.
        shared: Whether inputs of the first one's kind share its layers.
        named: Whether inputs and outputs are dictionaries rather than lists.
        optimizer: The optimizer.
        policy: A dtype policy: "float32", "mixed_bfloat16" or "mixed_float16".
        step: Who computes the step: "keras"; "stateless" (an own `train_step(self, state, data)`);
            "compute_loss", "average", "global_batch" or "loss_object" (an own `train_step(self,
            data)` with a tape); "loop" (a loop of `strategy.run` with a tape).
        applying: How a step with a tape applies gradients: "apply"; "clip_sums" (clips, by hand,
            what it has added up over the replicas); "minimize"; "two_optimizers" (half of the
            weights each).
        loop_loss: How a loop scales its loss: "average" (of a given batch size), "global_batch",
            or, by the number of replicas, "local_average" or "loss_object".
        examples: The number of examples.
        batch: The size of a batch.
        source: "arrays", "dataset" or "batches" (a sequence of batches of changing sizes).
        epochs: The epochs of each `fit`.
        steps_per_execution: As in `compile`.
        shuffle: Whether `fit` shuffles the examples.
        class_weight: Whether classes have weights.
        validation: None, "data" or "split" (the last `VALIDATION_SPLIT` of the examples).
        actions: What is done, in order: "fit", "evaluate", "predict", "train_on_batch",
            "test_on_batch", "predict_on_batch", "freeze", "unfreeze", "recompile",
            "save_model", "save_weights", "checkpoint".
    """

    seed: int = 0
    replicas: int = 2
    inputs: tuple[Input, ...] = (Input(),)
    head: tuple[Layer, ...] = ()
    outputs: tuple[Output, ...] = (Output(),)
    shared: bool = False
    named: bool = False
    optimizer: Optimizer = Optimizer()
    policy: str = "float32"
    step: str = "keras"
    applying: str = "apply"
    loop_loss: str = "average"
    examples: int = 8
    batch: int = 8
    source: str = "arrays"
    epochs: int = 1
    steps_per_execution: int = 1
    shuffle: bool = False
    class_weight: bool = False
    validation: str | None = None
    actions: tuple[str, ...] = ("fit",)

    def layers(self) -> tuple[Layer, ...]:
        """Returns all layers."""
        return (*(layer for each in self.inputs for layer in each.layers), *self.head)

    def has_layer(self, *kinds: str) -> bool:
        return any(layer.kind in kinds for layer in self.layers())

    def batches(self) -> list[int]:
        """Returns the sizes of the batches of an epoch of `fit`."""
        split = VALIDATION_SPLIT if self.validation == "split" else 0.0
        examples = math.floor(self.examples * (1 - split))  # as Keras rounds
        if self.source != "batches":
            full, rest = divmod(examples, self.batch)
            return [self.batch] * full + [rest] * (rest > 0)
        short = (self.batch + 1) // 2
        sizes, left = [], examples
        while left:
            sizes.append(min(left, (short, self.batch)[len(sizes) % 2]))
            left -= sizes[-1]
        return sizes


def describe(value: Any) -> str:
    """Returns a program as the Python expression that makes it, without what is a default.

    >>> describe(Program(seed=3, inputs=(Input(layers=(Layer("lstm"),)),)))
    "Program(seed=3, inputs=(Input(layers=(Layer(kind='lstm'),)),))"
    """
    if dataclasses.is_dataclass(value):
        default = type(value)()
        parts = [
            f"{field.name}={describe(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != getattr(default, field.name)
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple):
        inner = ", ".join(map(describe, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)
