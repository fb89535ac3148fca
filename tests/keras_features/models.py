"""Models, optimizers and precision, and what is compiled or built again."""

from __future__ import annotations

import contextlib

import numpy as np

from keras_features.program import BATCH, CLASSES, EXAMPLES, X, Y, feature, fitted


@feature
def mixed_precision_with_loss_scaling(program):
    keras = program.keras
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((6,)), *layers])
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=1024.0, dynamic_growth_steps=4
        )
        model.compile(optimizer, "mse")
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    yield
    result = fitted(model, epochs=3)
    assert model.layers[0].compute_dtype == "float16"
    return result


@feature
def normalization_over_the_replicas(program):
    is_one = program.strategy is None
    model = program.compiled(program.keras.layers.BatchNormalization(synchronized=not is_one))
    yield
    result = fitted(model)
    return {**result, "predicted": model.predict(X, BATCH, verbose=0).tolist()}


@feature
def optimizers_with_averages_and_clipping(program):
    keras = program.keras
    model = program.dense()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    model.compile(
        keras.optimizers.AdamW(
            schedule, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=4
        ),
        "mse",
    )
    yield
    return fitted(model, epochs=3)


@feature
def accumulated_gradients(program):
    model = program.dense()
    optimizer = program.keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    model.compile(optimizer, "mse")
    yield
    return fitted(model, epochs=3)


@feature
def several_inputs_and_outputs(program):
    keras = program.keras
    first, second = keras.Input((3,), name="first"), keras.Input((3,), name="second")
    hidden = keras.layers.Concatenate()([first, keras.layers.Dense(3)(second)])
    outputs = {"sum": keras.layers.Dense(1)(hidden), "class": keras.layers.Dense(3)(hidden)}
    model = keras.Model({"first": first, "second": second}, outputs)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        "adam",
        {"sum": "mse", "class": cross_entropy},
        loss_weights={"sum": 2.0, "class": 0.5},
        metrics={"class": "accuracy"},
    )
    yield
    return fitted(model, {"first": X[:, :3], "second": X[:, 3:]}, {"sum": Y, "class": CLASSES})


def _subclass(program):
    class Subclass(program.keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = program.keras.layers.Dense(4, activation="relu")
            self.last = program.keras.layers.Dense(1)

        def call(self, inputs, training=False):
            return self.last(self.hidden(inputs)) * (2.0 if training else 1.0)

    return Subclass()


@feature
def subclasses_that_fit_builds(program):
    model = _subclass(program)
    model.compile("adam", "mse", metrics=["mae"])
    yield
    program.keras.utils.set_random_seed(4)
    return fitted(model, validation_data=(X, Y))


@feature
def recurrent_layers_with_masks(program):
    keras = program.keras
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(9, 3, mask_zero=True), layers.LSTM(3)]
    )
    model.add(layers.Dense(1))
    model.compile("sgd", "mse")
    yield
    tokens = np.random.default_rng(6).integers(0, 9, (EXAMPLES, 5)).astype("int32")
    return fitted(model, tokens, Y)


@feature
def layers_that_are_frozen_later(program):
    model = program.compiled()
    yield
    before = fitted(model)
    with program.scope():
        model.layers[0].trainable = False
        model.compile(program.keras.optimizers.SGD(0.1), "mae")
    return {"before": before, "after": fitted(model)}


@feature
def clones(program):
    model = program.compiled()
    yield
    result = fitted(model)
    with program.scope():
        clone = program.keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        clone.compile("sgd", "mse")
    return {"original": result, "clone": fitted(clone)}


@feature
def models_of_a_trained_models_layers(program):
    model = program.compiled()
    yield
    fitted(model)
    # TensorFlow's programs look into models outside scopes, too.
    with contextlib.nullcontext() if program.is_tensorflows else program.scope():
        inner = program.keras.Model(model.inputs, model.layers[0].output)
    return inner.predict(X, batch_size=BATCH, verbose=0).tolist()


@feature
def compiled_in_a_second_scope(program):
    model = program.dense()
    yield
    with program.scope():
        model.compile("adam", "mse", metrics=["mae"])
    return fitted(model)


@feature
def built_in_a_second_scope(program):
    yield
    program.keras.utils.set_random_seed(0)
    with program.scope():
        model = program.compiled(metrics=["mae"])
        return fitted(model, validation_split=0.5)
