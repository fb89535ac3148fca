"""Draws random programs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from generated_programs.choices import Input, Layer, Optimizer, Output, Program
from generated_programs.layers import shares
from generated_programs.models import LAYERS, RANDOM, REGULARIZED
from generated_programs.parts import EXTREMES, LOSSES, METRICS, OPTIMIZERS, REDUCTIONS
from generated_programs.steps import APPLYING, STEPS, TAPED

#: Layers that take means over the examples of their replica. (One that is synchronized is an error
#: in a function of one's own, if a replica without examples leaves its collective operation out.)
_MEANS = ("batch_norm", "sync_batch_norm", "adds_loss")

#: Layers that end with the addition of a bias. In front of a batch normalization it has no gradient
#: but round-off, which some optimizers make as large as any other, and which in half precision is
#: not small.
_ENDING_WITH_BIAS = (
    "spectral_norm", "batch_norm", "sync_batch_norm", "attention", "query_attention", "conv1d",
    "conv2d", "strided_conv2d", "separable_conv2d", "depthwise_conv2d", "transposed_conv2d",
)  # fmt: skip

#: Layers that choose between the states of two steps where a mask says so.
_RECURRENT = ("lstm", "gru", "simple_rnn", "bidirectional", "recurrent_dropout")

#: Metrics that compare predictions with each other or with a threshold.
_COUNTING = (
    "accuracy", "auc", "precision", "recall", "false_negatives", "iou", "sensitivity", "top",
    "word", "f1",
)  # fmt: skip

#: Keras' own first one is 2^15; with 2^40, the first steps of half precision are skipped.
LOSS_SCALES = (64.0, 2.0**15, 2.0**40)

ACTIONS = (
    "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
    "freeze", "unfreeze", "recompile", "save_model", "save_weights", "checkpoint",
)  # fmt: skip
_ACTIONS_OF_LOOPS = ("fit", "predict", "predict_on_batch", "save_weights", "checkpoint")

#: Actions that change what trains next.
_CHANGING = ("freeze", "unfreeze", "recompile", "save_model", "save_weights", "checkpoint")


def draw_program(seed: int, number: int) -> Program:
    """Returns a program: always the same for a seed and a number."""
    return consistent(_Drawing(random.Random(f"program {seed} {number}")).program())


class _Drawing:
    """Draws the choices of a program, one after the other."""

    def __init__(self, chance: random.Random):
        self._chance = chance

    def _is(self, probability: float) -> bool:
        return self._chance.random() < probability

    def _one(self, values: Any) -> Any:
        return self._chance.choice(list(values))

    def _some(self, values: Any, most: int) -> tuple[Any, ...]:
        values = list(values)
        return tuple(self._chance.sample(values, min(self._chance.randint(0, most), len(values))))

    def program(self) -> Program:
        step = self._one([*STEPS, *["keras"] * 8, *["loop"] * 3])
        by_steps = self._is(0.2)
        inputs = self._inputs(by_steps)
        head = tuple(self._layer("steps" if by_steps else "vector") for _ in range(self._few(2)))
        outputs = tuple(self._output(by_steps, step) for _ in range(self._one([1, 1, 2])))
        return Program(
            seed=self._chance.randrange(1000),
            replicas=self._one([2, 3, 4]),
            inputs=inputs,
            head=head,
            outputs=outputs,
            shared=self._is(0.4),
            named=self._is(0.4),
            optimizer=self._optimizer(),
            policy=self._one(["float32"] * 8 + ["mixed_bfloat16", "mixed_float16"]),
            step=step,
            applying=self._one(["apply", *APPLYING]) if step in TAPED else "apply",
            loop_loss=self._one(["average", "global_batch", "local_average", "loss_object"]),
            **self._sizes(),
            source=self._one(["arrays", "arrays", "dataset", "batches"]),
            epochs=self._one([1, 1, 2]),
            steps_per_execution=self._one([1, 1, 2, 3]),
            shuffle=self._is(0.3),
            class_weight=self._is(0.3),
            validation=self._one([None, None, "data", "split"]),
            actions=self._actions(step == "loop"),
        )

    def _sizes(self) -> dict[str, int]:
        batch = self._chance.randint(1, 13)
        if self._is(0.3):  # even for all numbers of replicas
            return {"examples": 24, "batch": 12}
        return {"examples": self._chance.randint(2, 26), "batch": batch}

    def _few(self, most: int) -> int:
        return self._chance.randint(0, most)

    def _inputs(self, by_steps: bool) -> tuple[Input, ...]:
        kinds = ["steps", "tokens"] if by_steps else ["vector", "vector", "steps", "tokens"]
        first = self._one(kinds if by_steps else [*kinds, "image"])
        made = [Input(first, self._layers(first))]
        if not by_steps and self._is(0.35):
            second = first if self._is(0.5) else self._one([*kinds, "image"])
            made.append(Input(second, self._layers(second)))
        return tuple(made)

    def _layers(self, kind: str) -> tuple[Layer, ...]:
        rank = "steps" if kind == "tokens" else kind
        return tuple(self._layer(rank) for _ in range(self._few(2)))

    def _layer(self, rank: str) -> Layer:
        kinds = [kind for kind, (ranks, _) in LAYERS.items() if rank in ranks]
        if self._is(0.75):  # programs with random layers are not compared with one device
            kinds = [kind for kind in kinds if kind not in RANDOM]
        kind = self._one(kinds)
        if kind not in REGULARIZED:
            return Layer(kind, frozen=self._is(0.1))
        regularizer = self._one([None, None, None, "l1", "l2", "orthogonal"])
        if kind in ("conv1d", "conv2d") and regularizer == "orthogonal":
            regularizer = "l2"  # of matrices only
        return Layer(kind, regularizer, self._is(0.15), self._is(0.15), self._is(0.1))

    def _output(self, by_steps: bool, step: str) -> Output:
        kind = "steps" if by_steps else self._one(["number", "binary", "classes", "one_hot"])
        # In functions given to `strategy.run`, states are added up, as in TensorFlow.
        names = [name for name in METRICS[kind] if step != "loop" or name not in EXTREMES]
        metrics = self._some(names, 2)
        others = [name for name in names if name not in metrics and name != "calls"]
        return Output(
            kind,
            self._one(LOSSES[kind]),
            self._one(REDUCTIONS),
            self._one([1.0, 0.3]),
            self._one([None, None, "some", "zeros"]),
            metrics,
            self._some(others, 1),
        )

    def _optimizer(self) -> Optimizer:
        return Optimizer(
            self._one([*OPTIMIZERS, "SGD", "Adam"]),
            self._one([None, None, None, "clipnorm", "global_clipnorm", "clipvalue"]),
            self._one([None, None, None, 0, 2]),
            self._one([0.0, 0.0, 0.05]),
            self._one([1, 1, 1, 2, 3]),
            self._is(0.15),
            self._one(LOSS_SCALES) if self._is(0.08) else None,
            self._one([2000, 2000, 1]),
        )

    def _actions(self, is_loop: bool) -> tuple[str, ...]:
        kinds = _ACTIONS_OF_LOOPS if is_loop else ACTIONS
        further = [self._one(kinds) for _ in range(self._one([0, 1, 1, 2]))]
        actions = ("fit" if self._is(0.8) else self._one(kinds), *further)
        return (*actions, "fit") if actions[-1] in _CHANGING and self._is(0.7) else actions


def consistent(program: Program) -> Program:
    """Returns a program without combinations that Keras refuses, or that have no right answer."""
    while (changed := _with_fewer_conflicts(program)) != program:
        program = changed
    return program


def _with_fewer_conflicts(program: Program) -> Program:
    """Returns a consistent program, but for what a change has made necessary."""
    outputs = program.outputs
    change: dict[str, Any] = {}
    if program.step not in TAPED:
        change["applying"] = "apply"
    elif program.applying == "clip_sums" and program.step != "loop" and _has_idle_replicas(program):
        # A mean over no examples is NaN, as on TensorFlow, and so is a sum by hand that has it.
        program = _with_layers(program, _without_means)
    if program.step == "stateless" or program.applying != "apply":
        # Keras' loss scale is not known while its optimizer is not built, as in its guide's step.
        # It belongs to one optimizer, whose `apply_gradients` takes it out of the gradients.
        policy = "mixed_bfloat16" if program.policy == "mixed_float16" else program.policy
        unscaled = dataclasses.replace(program.optimizer, loss_scale=None)
        program = dataclasses.replace(program, policy=policy, optimizer=unscaled)
    if program.applying == "two_optimizers" and program.optimizer.ema is not None:
        # Keras overwrites all weights of the model by the averages of its one optimizer.
        optimizer = dataclasses.replace(program.optimizer, ema=None)
        program = dataclasses.replace(program, optimizer=optimizer)
    has_tokens = any(each.kind == "tokens" for each in program.inputs)
    is_masked = has_tokens or program.has_layer("masking")
    if is_masked and program.has_layer(*_RECURRENT) and _has_idle_replicas(program):
        # Keras chooses what is masked by `jnp.where`, which of no rows has no gradient on JAX.
        program = _with_layers(program, _without_sums)
    sums_by_hand = program.step == "stateless" or program.applying == "clip_sums"
    is_idle = _has_idle_replicas(program) or program.validation is not None
    if (program.has_layer("centers") or sums_by_hand) and is_idle:
        # What is summed by hand there is of no examples, of which there is no largest.
        change["outputs"] = outputs = tuple(_without_metrics(each, EXTREMES) for each in outputs)
    scale = program.optimizer.loss_scale
    if (scale or program.policy == "mixed_float16") and program.optimizer.ema is not None:
        # At the end of `fit` Keras replaces weights by their averages, which are zeros where all
        # steps have been skipped. Under a strategy it does not.
        optimizer = dataclasses.replace(program.optimizer, ema=None)
        program = dataclasses.replace(program, optimizer=optimizer)
    if program.optimizer.name == "Lamb" and program.has_layer("batch_norm"):
        # The mean of one normalized example is 0 whatever the scale: its gradient is round-off,
        # even in float64, and Lamb makes a step of the size of the weights of any gradient.
        optimizer = dataclasses.replace(program.optimizer, name="Adam")
        program = dataclasses.replace(program, optimizer=optimizer)
    has_sums = any(output.reduction == "sum" for output in outputs)
    if program.policy == "mixed_float16" and has_sums and scale in (None, 2.0**15):
        # A sum over the batch may be infinite in float16, and the replicas' parts of it not.
        optimizer = dataclasses.replace(program.optimizer, loss_scale=LOSS_SCALES[0])
        program = dataclasses.replace(program, optimizer=optimizer)
    if program.policy == "mixed_float16" and program.has_layer("attention", "query_attention"):
        change["policy"] = "mixed_bfloat16"  # which XLA multiplies on a CPU
    elif (
        program.policy == "mixed_float16"
        and program.step == "loop"
        and not program.optimizer.loss_scale
    ):
        # Elsewhere `compile` gives the optimizer this one.
        change["optimizer"] = dataclasses.replace(program.optimizer, loss_scale=2.0**15)
    biases = sum(layer.kind in _ENDING_WITH_BIAS for layer in program.layers())
    if program.has_layer("batch_norm", "sync_batch_norm") and biases > 1:
        change["policy"] = "float32"
    weighted = any(output.weights is not None for output in outputs)
    is_one = len(outputs) == 1 and not program.named and outputs[0].kind == "classes"
    if weighted or not is_one or program.step == "loop":
        change["class_weight"] = False
    if program.step == "loss_object" or program.loop_loss == "loss_object":
        # What a step's own losses are divided by is the replica's: docs/keras.md.
        change["outputs"] = tuple(
            dataclasses.replace(each, reduction="sum") if _divides_by_replica(each) else each
            for each in outputs
        )
    if program.source != "arrays" and program.validation == "split":
        change["validation"] = None  # of arrays only
    if program.source != "arrays":
        change["shuffle"] = False
    if program.has_layer("spectral_norm") and _has_idle_replicas(program):
        # A replica without examples leaves its statistics alone, as docs/keras.md says of those of
        # batch normalization: its vectors stay behind those of the others.
        source = "dataset" if program.source == "batches" else program.source
        program = dataclasses.replace(program, examples=24, batch=12, source=source)
        if program.validation == "split":
            change["validation"] = "data"
    if program.step == "loop":
        program = dataclasses.replace(program, validation=None)
        change |= {"source": "dataset", "steps_per_execution": 1, "validation": None}
        if not _is_even(program):
            # A function that is given to `run` divides means by the number of replicas, as on
            # TensorFlow: that is the mean over the global batch where replicas have equal shares.
            program = _with_layers(program, _without_means)
            if program.loop_loss in ("local_average", "loss_object"):
                change["loop_loss"] = "global_batch"
    program = dataclasses.replace(program, **change)
    if program.policy != "float32":
        # A rounding can be one example more or less of a count.
        outputs = tuple(_without_metrics(each, _COUNTING) for each in program.outputs)
        program = dataclasses.replace(program, outputs=outputs)
    return program


def on_replicas(program: Program, replicas: int) -> Program:
    """Returns a program for another number of replicas, on which what has an answer depends."""
    return consistent(dataclasses.replace(program, replicas=replicas))


def _without_metrics(output: Output, names: tuple[str, ...]) -> Output:
    """Leaves out metrics of these names."""
    return dataclasses.replace(
        output,
        metrics=tuple(name for name in output.metrics if name not in names),
        weighted_metrics=tuple(name for name in output.weighted_metrics if name not in names),
    )


def _divides_by_replica(output: Output) -> bool:
    """Whether a loss is divided by something else than the number of examples."""
    is_masked = output.kind == "steps" or output.loss == "ignoring"
    weighs = output.weights is not None and output.reduction == "mean_with_sample_weight"
    return is_masked or weighs


def _has_idle_replicas(program: Program) -> bool:
    """Whether a batch leaves a replica without examples."""
    return any(len(shares(size, program.replicas)) < program.replicas for size in program.batches())


def _is_even(program: Program) -> bool:
    """Whether all replicas have equal shares of all batches, and batches are equal."""
    sizes = {*program.batches(), program.batch}
    return len(sizes) == 1 and program.batch % program.replicas == 0


def _with_layers(
    program: Program, change: Callable[[tuple[Layer, ...]], tuple[Layer, ...]]
) -> Program:
    """Returns a program whose layers are changed."""
    inputs = tuple(dataclasses.replace(each, layers=change(each.layers)) for each in program.inputs)
    return dataclasses.replace(program, inputs=inputs, head=change(program.head))


def _without_means(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Returns layers that compute no means over the examples of a replica."""
    return tuple(
        dataclasses.replace(layer, activity=False) for layer in layers if layer.kind not in _MEANS
    )


def _without_sums(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Returns layers that compute nothing over all replicas."""
    kinds = ("centers", "sync_batch_norm")
    return tuple(layer for layer in layers if layer.kind not in kinds)
