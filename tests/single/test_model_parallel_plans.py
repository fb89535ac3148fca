"""Steps of divided models, compiled for a TPU slice that is not here."""

from __future__ import annotations

import jax
import keras
import pytest

import unison
from unison.keras import Pipeline
from unison.planning import plan_fit
from unison.runtime.planned import NotRunHereError

pytest.importorskip("libtpu", reason="libtpu, which compiles for TPUs, has no wheel here")
pytestmark = pytest.mark.timeout(600)  # XLA compiles on one core; the machine may be busy

FEATURES, HIDDEN, CLASSES, BATCH = 256, 1024, 8, 512
FLOAT = 4
RULES = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(layers):
    model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(CLASSES)])
    model.compile("adam", LOSS)
    return model


def plan(strategy, layers):
    with strategy.scope():
        model = model_of(layers())
    images = jax.ShapeDtypeStruct((BATCH, FEATURES), "float32")
    return model, plan_fit(model, images, jax.ShapeDtypeStruct((BATCH,), "int32"))


def two_products():
    up = keras.layers.Dense(HIDDEN, "relu", name="up")
    return [up, keras.layers.Dense(FEATURES, name="down")]


def tensor_parallel(zero):
    mesh = {"batch": 2, "model": 4}
    return unison.ModelParallelStrategy(mesh=mesh, rules=RULES, zero=zero, topology="v5e:2x4")


#: A device's part of the two large weights, between the model axis, and all weights.
LARGE = 2 * FEATURES * HIDDEN // 4
SMALL = HIDDEN // 4 + FEATURES + FEATURES * CLASSES + CLASSES
METRIC = 2  # the loss's total and count


def test_cores_add_up_activations_and_replicas_gradients():
    _, planned = plan(tensor_parallel(zero=0), two_products)
    assert planned.num_replicas == 2
    sent = {(one.kind, one.group_size, one.bytes, one.runs) for one in planned.collectives}
    assert sent == {
        # What `down` makes of each core's part of `up`, for half of the batch.
        ("all-reduce", 4, BATCH // 2 * FEATURES * FLOAT, 1),
        ("all-reduce", 2, (LARGE + SMALL + METRIC) * FLOAT, 1),
    }


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_scatter_gradients_and_gather_weights(zero):
    strategy = tensor_parallel(zero)
    model, planned = plan(strategy, two_products)
    of_replicas = [one for one in planned.collectives if one.group_size == 2]
    scattered = sum(one.bytes * one.runs for one in of_replicas if one.kind == "reduce-scatter")
    gathered = sum(one.bytes * one.runs for one in of_replicas if one.kind == "all-gather")
    divided = (LARGE + FEATURES * CLASSES) * FLOAT
    assert scattered == gathered == divided  # each core its own part
    predicted = strategy.predicted_bytes(model.trainable_variables)
    assert planned.memory.state["trainable_variables"] == predicted["weights"]
    counters = planned.memory.state["optimizer_variables"] - predicted["optimizer"]
    assert 0 <= counters <= 16


@pytest.mark.parametrize("cores", [1, 4])
def test_a_chip_has_few_whole_weights_at_a_time(cores):
    layers, width, batch = 12, 1024, 8 // cores
    mesh, rules = {"batch": batch, "model": cores}, {"kernel": (None, "model")}
    strategy = unison.ModelParallelStrategy(mesh=mesh, rules=rules, zero=3, topology="v5e:2x4")
    with strategy.scope():
        hidden = [keras.layers.Dense(width, "tanh") for _ in range(layers)]
        model = keras.Sequential([keras.Input((width,)), *hidden])
        model.compile("adam", "mse")
    examples = jax.ShapeDtypeStruct((64, width), "float32")
    planned = plan_fit(model, examples, examples)
    whole = layers * width * width // cores * FLOAT
    assert planned.memory.temporaries < 0.5 * whole
    gathered = sum(
        one.bytes * one.runs
        for one in planned.collectives
        if (one.kind, one.group_size) == ("all-gather", batch)
    )
    assert 1.5 * whole < gathered < 2 * whole  # for the forward pass, and most for the gradient


class Stacked(keras.layers.Layer):
    """Layers whose weights are stacked, and which a loop goes through."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def build(self, shape):
        self.kernels = self.add_weight(shape=(self.layers, shape[-1], shape[-1]))

    def call(self, inputs):
        def layer(hidden, kernel):
            return jax.numpy.tanh(hidden @ kernel), None

        return jax.lax.scan(layer, inputs, keras.ops.convert_to_tensor(self.kernels))[0]


def test_a_loop_over_stacked_layers_gathers_one_at_a_time():
    layers, width = 12, 1024
    mesh = {"batch": 8}
    strategy = unison.ModelParallelStrategy(mesh=mesh, zero=3, topology="v5e:2x4")
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,)), Stacked(layers)])
        model.compile("adam", "mse")
    examples = jax.ShapeDtypeStruct((64, width), "float32")
    planned = plan_fit(model, examples, examples)
    layer = width * width * FLOAT
    sent = {(one.kind, one.bytes, one.runs) for one in planned.collectives if one.bytes >= layer}
    # Forward and for the gradient, within the two loops: a layer in each of their steps.
    assert sent == {("all-gather", layer, 2 * layers), ("reduce-scatter", layer, layers)}
    assert planned.memory.temporaries < layers * layer / 8 + 4 * layer


def test_stages_send_activations_to_their_neighbours():
    strategy = unison.ModelParallelStrategy(mesh={"batch": 2, "stage": 4}, topology="v5e:2x4")

    def layers():
        blocks = [[keras.layers.Dense(FEATURES, "relu")] for _ in range(4)]
        return [Pipeline(blocks, microbatches=8)]

    model, planned = plan(strategy, layers)
    of_microbatch = BATCH // 2 // 8 * FEATURES * FLOAT
    sent = [one.bytes for one in planned.collectives if one.kind == "collective-permute"]
    assert of_microbatch in sent
    predicted = strategy.predicted_bytes(model.trainable_variables)
    assert planned.memory.state["trainable_variables"] == predicted["weights"]
    stage = (FEATURES * FEATURES + FEATURES) * FLOAT
    assert predicted["weights"] == stage + (FEATURES * CLASSES + CLASSES) * FLOAT


def test_a_pipeline_that_computes_the_loss_keeps_few_inputs_and_computes_nothing_more():
    def planned(schedule):
        strategy = unison.ModelParallelStrategy(mesh={"batch": 2, "stage": 4}, topology="v5e:2x4")
        with strategy.scope():
            blocks = [[keras.layers.Dense(FEATURES, "tanh")] for _ in range(4)]
            model = keras.Sequential(
                [keras.Input((FEATURES,)), Pipeline(blocks, microbatches=32, schedule=schedule)]
            )
            model.compile("sgd", "mse")
        examples = jax.ShapeDtypeStruct((8 * BATCH, FEATURES), "float32")
        return plan_fit(model, examples, examples)

    gpipe, in_turns = planned("gpipe"), planned("1f1b")
    of_microbatch = 8 * BATCH // 2 // 32 * FEATURES * FLOAT
    # Of 32 micro-batches' inputs and results, the inputs of 2 S - 1.
    assert in_turns.memory.temporaries < gpipe.memory.temporaries - 32 * of_microbatch
    assert in_turns.flops < 1.1 * gpipe.flops


def test_running_is_refused():
    with tensor_parallel(zero=0).scope():
        model = model_of(two_products())
    with pytest.raises(NotRunHereError, match="v5e:2x4"):
        model.predict(keras.ops.zeros((8, FEATURES)), verbose=0)
