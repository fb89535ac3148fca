"""`Pipeline`: a Keras layer whose stages are computed by different devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unison.keras.variables import ReplicatedVariable
from unison.pipelining import (
    PACKED,
    STAGE_AXIS,
    check_schedule,
    pack_stages,
    pipeline,
    pipeline_loss,
    unpack_stage,
)

if TYPE_CHECKING:
    from unison.keras.pipelined_loss import PipelinedLoss

#: Odd, so that the random layers of all stages get distinct seeds modulo 2**32.
_STREAM_STRIDE = 0x85EBCA6B


@keras.saving.register_keras_serializable(package="unison")
class Pipeline(keras.layers.Layer):
    """Consecutive layers, in stages that the devices along mesh axis `"stage"` compute.

    Each device only has the weights of its stages; a batch passes through them in micro-batches.
    See `unison.pipelining` for the schedule. Without such an axis, one device computes all stages,
    with the same results. The weights are the rows of one variable, as long as the largest stage's:
    stages of equal size waste no memory. Operations of an optimizer on each weight by itself
    (`clipnorm`, LARS) apply to that variable.

    Args:
        stages: For each stage a layer, a model, or a list of layers. Their number is a multiple of
            the size of the mesh axis. They have no state except weights and random streams, and no
            regularizers.
        microbatches: The number of micro-batches, which must divide each replica's batch.
        schedule: `"gpipe"` or `"1f1b"`, which stores the inputs of fewer micro-batches. If the
            pipeline is the model's last layer, and the loss a mean over examples, it computes the
            loss as well, and computes no more than `"gpipe"`; otherwise, another forward pass. See
            `unison.pipelining.pipeline_loss`.
        kwargs: As for any layer: `name`.

    Raises:
        ValueError: There is no stage, or the schedule is unknown; or, when it is built, stages are
            not supported in a pipeline.

    Examples:
        ```
        strategy = unison.ModelParallelStrategy(mesh={"batch": 2, "stage": 4})
        with strategy.scope():
            blocks = [[keras.layers.Dense(64, "relu")] for _ in range(4)]
            model = keras.Sequential(
                [keras.Input((64,)), Pipeline(blocks, microbatches=8), keras.layers.Dense(10)]
            )
        ```
    """

    def __init__(
        self, stages: Sequence[Any], microbatches: int, schedule: str = "gpipe", **kwargs: Any
    ):
        super().__init__(**kwargs)
        check_schedule(schedule)
        if not stages or microbatches < 1:
            raise ValueError(
                "Expected at least one stage and one micro-batch. Received: "
                f"{len(stages)} stages, microbatches={microbatches!r}"
            )
        self.microbatches = microbatches
        self.schedule = schedule
        self._stages = _Stages([_as_layer(stage) for stage in stages])
        self._random = keras.random.SeedGenerator()
        self._loss: PipelinedLoss | None = None

    @classmethod
    def cut(
        cls, model: keras.Model, at: Sequence[str], microbatches: int, schedule: str = "gpipe"
    ) -> Pipeline:
        """Returns a pipeline of a Sequential or functional model, which cannot be used afterwards.

        Args:
            model: A built model of one input and one output.
            at: The names of the layers after whose outputs the next stages begin.
            microbatches: As for `Pipeline`.
            schedule: Likewise.

        Raises:
            ValueError: A layer does not exist, or a layer after a cut needs more than its output.
        """
        if len(model.inputs) != 1 or len(model.outputs) != 1:
            raise ValueError(
                "Expected a model of one input and one output to cut into stages. Received: "
                f"{model.name!r} with {len(model.inputs)} and {len(model.outputs)}."
            )
        ends = [*(model.get_layer(name).output for name in at), model.outputs[0]]
        starts = [model.inputs[0], *ends[:-1]]
        stages = [keras.Model(*cut) for cut in zip(starts, ends, strict=True)]
        return cls(stages, microbatches, schedule)

    def build(self, input_shape: Any) -> None:
        values = []
        shape = input_shape
        for stage in self._stages.layers:
            if not stage.built:
                stage.build(shape)
            shape = stage.compute_output_shape(shape)
            _check(stage)
            values.append(
                [_value_of(variable, self.name) for variable in stage.trainable_variables]
            )
        self._stages.like = [
            [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in own] for own in values
        ]
        packed = pack_stages(values)
        self.packed = self.add_weight(
            shape=packed.shape,
            initializer=lambda shape, dtype: packed,
            dtype=str(packed.dtype),
            name=PACKED,
        )
        for stage in self._stages.layers:
            for variable in stage.variables:
                _release(variable)

    def compute_output_shape(self, input_shape: Any) -> Any:
        for stage in self._stages.layers:
            input_shape = stage.compute_output_shape(input_shape)
        return input_shape

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        stages = [
            functools.partial(self._compute, stage, place, training)
            for place, stage in enumerate(self._stages.layers)
        ]
        packed = jnp.asarray(self.packed.value)
        like = self._stages.like
        seeds = self._seeds(training)
        if STAGE_AXIS not in jax.sharding.get_abstract_mesh().axis_names:
            # Otherwise, the micro-batches would have the same results.
            for stage, row, shapes in zip(stages, packed, like, strict=True):
                inputs = stage(unpack_stage(row, shapes), inputs, seeds[0])
            return inputs
        given: dict[str, Any] = {
            "like": like,
            "microbatches": self.microbatches,
            "seeds": seeds,
        }
        loss = self._loss
        if loss is None or not loss.is_of(len(inputs)):
            return pipeline(stages, packed, inputs, schedule=self.schedule, **given)
        value, results = pipeline_loss(
            stages, packed, inputs, loss.of_microbatch, loss.targets, **given
        )
        loss.tell(value, results)
        return results

    @contextlib.contextmanager
    def computing(self, loss: PipelinedLoss) -> Iterator[None]:
        """Inside, calls compute the loss with their results."""
        self._loss = loss
        try:
            yield
        finally:
            self._loss = None

    def _seeds(self, training: bool | None) -> jax.Array:
        """Returns a seed for each micro-batch, a new one in each step of a training."""
        seed = jnp.asarray(self._random.next()) if training else jnp.zeros(2, jnp.uint32)
        numbers = jnp.arange(self.microbatches, dtype=jnp.uint32)
        counters = seed[1] * jnp.uint32(self.microbatches) + numbers
        return jnp.stack([jnp.broadcast_to(seed[0], counters.shape), counters], axis=1)

    def _compute(
        self,
        stage: keras.layers.Layer,
        place: int,
        training: bool | None,
        weights: Sequence[jax.Array],
        inputs: jax.Array,
        seed: jax.Array,
    ) -> jax.Array:
        """Computes one stage; each of its random layers has its own stream."""
        first = sum(len(each.non_trainable_variables) for each in self._stages.layers[:place])
        streams = [
            seed + np.array([(first + number) * _STREAM_STRIDE % 2**32, 0], np.uint32)
            for number, _ in enumerate(stage.non_trainable_variables, 1)
        ]
        outputs, _ = stage.stateless_call(weights, streams, inputs, training=training)
        return outputs

    def stage_weights(self) -> list[list[np.ndarray]]:
        """Returns the weights of each stage, in the order of its `trainable_variables`."""
        rows = jnp.asarray(self.packed.numpy())
        like = self._stages.like
        return [
            [np.asarray(value) for value in unpack_stage(row, shapes)]
            for row, shapes in zip(rows, like, strict=True)
        ]

    def set_stage_weights(self, weights: Sequence[Sequence[Any]]) -> None:
        """Gives each stage weights of the same shapes, as returned by `stage_weights`.

        Raises:
            ValueError: The shapes differ.
        """
        shapes = [[tuple(like.shape) for like in own] for own in self._stages.like]
        received = [[np.shape(value) for value in own] for own in weights]
        if received != shapes:
            raise ValueError(f"Expected weights of the shapes {shapes}. Received: {received}")
        self.packed.assign(pack_stages([[jnp.asarray(v) for v in own] for own in weights]))

    def get_config(self) -> dict[str, Any]:
        stages = [keras.saving.serialize_keras_object(stage) for stage in self._stages.layers]
        return super().get_config() | {
            "stages": stages,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Pipeline:
        stages = [keras.saving.deserialize_keras_object(stage) for stage in config.pop("stages")]
        return cls(stages, **config)


@dataclasses.dataclass
class _Stages:
    """Hides the stages from Keras, which would train and save their variables.

    Attributes:
        layers: The stages.
        like: The shapes and dtypes of the weights of each; known once they are built.
    """

    layers: list[keras.layers.Layer]
    like: list[list[jax.ShapeDtypeStruct]] = dataclasses.field(default_factory=list)


def _as_layer(stage: Any) -> keras.layers.Layer:
    if isinstance(stage, list | tuple):
        return keras.Sequential(list(stage))
    if isinstance(stage, keras.layers.Layer):
        return stage
    raise ValueError(
        f"Expected a layer, a model or a list of layers as a stage. Received: {stage!r}"
    )


def _check(stage: keras.layers.Layer) -> None:
    """Raises a ValueError for features that do not work in a stage on micro-batches."""
    for variable in stage.non_trainable_variables:
        if variable.name != "seed_generator_state":
            raise ValueError(
                "Expected stages whose only state are weights and random streams. Received: "
                f"variable {variable.path!r} of stage {stage.name!r}. Use LayerNormalization or "
                "GroupNormalization instead of BatchNormalization, or leave the layer outside."
            )
    regularized = [v.path for v in stage.trainable_variables if v.regularizer is not None]
    if regularized:
        raise ValueError(
            "Expected stages without regularizers. Received: those of "
            f"{', '.join(regularized)}. Use the optimizer's weight_decay."
        )


def _value_of(variable: keras.Variable, name: str) -> np.ndarray:
    if variable._value is None:
        raise ValueError(
            f"Expected pipeline {name!r} to be built before its model runs. Received: a stage "
            "without weights yet. Give the model an Input."
        )
    return np.asarray(variable.numpy())


def _release(variable: keras.Variable) -> None:
    """Frees the memory of a variable whose values come from elsewhere."""
    if isinstance(variable, ReplicatedVariable):
        variable.cell.put(None)
    else:
        variable._value = None
