"""`fit`, `evaluate` and `predict`: their data, weights, losses, metrics and steps."""

from __future__ import annotations

from keras_features.program import (
    BATCH,
    CLASSES,
    UNEVEN,
    WEIGHTS,
    X,
    Y,
    feature,
    fitted,
    state_of,
)


@feature
def fit_evaluate_and_predict(program):
    model = program.compiled(metrics=["mae"])
    yield
    x, y = X[:UNEVEN], Y[:UNEVEN]
    result = fitted(model, x, y, validation_data=(x, y), validation_freq=2)
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    result["evaluated"] = {name: float(value) for name, value in evaluated.items()}
    result["predicted"] = model.predict(x, batch_size=BATCH, verbose=0).tolist()
    return result


@feature
def shuffled_examples_and_a_validation_split(program):
    model = program.compiled()
    yield
    program.keras.utils.set_random_seed(2)
    return fitted(model, shuffle=True, validation_split=0.5)


@feature
def steps_on_batches(program):
    model = program.compiled(metrics=["mae"])
    yield
    trained = [[*map(float, model.train_on_batch(X[:8], Y[:8]))] for _ in range(3)]
    weighted = model.train_on_batch(X[:5], Y[:5], sample_weight=WEIGHTS[:5])
    tested = model.test_on_batch(X[:7], Y[:7])
    predicted = model.predict_on_batch(X[:3]).tolist()
    told = {"trained": trained, "weighted": [*map(float, weighted)], "predicted": predicted}
    return {**told, "tested": [*map(float, tested)], **state_of(model)}


@feature
def several_steps_an_execution(program):
    model = program.compiled(steps_per_execution=2, metrics=["mae"])
    yield
    return fitted(model, epochs=3)


@feature
def datasets(program):
    data = program.face.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
    model = program.compiled()
    yield
    return fitted(model, data, None, batch_size=None, steps_per_epoch=2)


@feature
def generators(program):
    model = program.compiled()
    yield
    batches = ((X[begin : begin + BATCH], Y[begin : begin + BATCH]) for begin in (0, 8, 8, 0))
    return fitted(model, batches, None, batch_size=None, epochs=2, steps_per_epoch=2)


def _classifier(program, **arguments):
    model = program.dense(outputs=3)
    loss = program.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, **arguments)
    return model


@feature
def class_weights(program):
    model = _classifier(program, metrics=["accuracy"])
    yield
    return fitted(model, X, CLASSES, class_weight={0: 0.5, 1: 3.0, 2: 1.0})


@feature
def sample_weights(program):
    model = program.compiled(weighted_metrics=["mae"], metrics=["mse"])
    yield
    data = X[:UNEVEN], Y[:UNEVEN], WEIGHTS[:UNEVEN]
    return fitted(model, *data[:2], sample_weight=data[2], validation_data=data)


@feature
def metrics_with_thresholds(program):
    model = program.dense()
    metrics = program.keras.metrics
    model.compile(
        program.keras.optimizers.SGD(0.1),
        program.keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[metrics.AUC(from_logits=True, name="auc"), metrics.Precision(name="precision")],
    )
    yield
    return fitted(model, X, (Y > 0).astype("float32"), epochs=3)


@feature
def losses_of_layers_and_regularizers(program):
    class Penalized(program.keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * program.keras.ops.mean(inputs**2))
            return inputs

    model = program.compiled(
        Penalized(),
        program.keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l1"),
    )
    yield
    return fitted(model)


@feature
def metrics_of_a_loss_of_ones_own(program):
    keras = program.keras

    class Own(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.errors = keras.metrics.Mean(name="error")

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            self.errors.update_state(keras.ops.abs(y - y_pred))
            return 2 * super().compute_loss(x, y, y_pred, sample_weight, training)

    inputs = keras.Input((6,))
    model = Own(inputs, keras.layers.Dense(1)(keras.layers.Dense(4)(inputs)))
    model.compile("sgd", "mse")
    yield
    return fitted(model, X[:UNEVEN], Y[:UNEVEN])


@feature
def a_step_of_ones_own(program):
    """With a tape, as TensorFlow's guide to `fit` writes it, where the program is TensorFlow's."""
    keras, tf = program.keras, program.face

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            scores = [metric for metric in self.metrics if metric.name != "loss"]
            for metric in scores:
                metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in scores}

    class Passing(keras.Model):
        def train_step(self, *given):
            return super().train_step(*given)

    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(4, activation="tanh")(inputs))
    model = (Own if program.is_tensorflows else Passing)(inputs, outputs)
    model.compile("sgd", "mse", metrics=["mae"])
    yield
    result = fitted(model)
    result["history"].pop("loss", None)  # a replica's part of it, in TensorFlow
    return result
