"""Keras: `fit`, `evaluate`, `predict` from fixed weights and data, without shuffling."""

from __future__ import annotations

import numpy as np

from parity.answers import plain
from parity.facts import attempt, fact

RNG = np.random.default_rng(11)
INPUTS = RNG.normal(size=(16, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, 16)
WEIGHTS = [
    RNG.normal(size=(4, 5)).astype(np.float32),
    np.zeros(5, np.float32),
    RNG.normal(size=(5, 3)).astype(np.float32),
    np.zeros(3, np.float32),
]
GROWING = "round-off grows over the steps of the training"


def sgd(tf):
    return tf.keras.optimizers.SGD(0.1)


def built(tf, strategy, make_optimizer=sgd, **compiled):
    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.Input((4,)), tf.keras.layers.Dense(5, "relu"), tf.keras.layers.Dense(3)]
        )
        model.set_weights(WEIGHTS)
        model.compile(
            make_optimizer(tf),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **compiled,
        )
    return model


def outcome(model, history):
    return {"history": history.history, "weights": model.get_weights()}


def trained(tf, strategy, examples=16, batch=8, epochs=2, make_optimizer=sgd, **fitted):
    model = built(tf, strategy, make_optimizer)
    history = model.fit(
        INPUTS[:examples],
        LABELS[:examples],
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **fitted,
    )
    return outcome(model, history)


@fact(tolerance=2e-4, because=GROWING)
def two_epochs_of_sgd(tf, two):
    return trained(tf, two)


@fact(tolerance=2e-4, because=GROWING)
def two_epochs_on_four_replicas(tf, four):
    return trained(tf, four)


@fact(tolerance=2e-4, because=GROWING)
def two_epochs_of_momentum(tf, two):
    return trained(tf, two, make_optimizer=lambda tf: tf.keras.optimizers.SGD(0.05, momentum=0.9))


@fact(tolerance=2e-4, because=GROWING)
def two_epochs_of_adam(tf, two):
    return trained(tf, two, make_optimizer=lambda tf: tf.keras.optimizers.Adam(0.01))


@fact(tolerance=2e-4, because=GROWING)
def validation_and_sample_weights(tf, two):
    return trained(
        tf,
        two,
        sample_weight=np.linspace(0.1, 2.0, 16).astype(np.float32),
        validation_data=(INPUTS[:8], LABELS[:8]),
        validation_batch_size=8,
    )


@fact(tolerance=2e-4, because=GROWING)
def a_dataset_is_fitted(tf, two):
    model = built(tf, two)
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(8)
    return outcome(model, model.fit(dataset, epochs=2, verbose=0))


@fact(tolerance=2e-4, because=GROWING)
def a_repeated_dataset_is_fitted_by_steps(tf, two):
    model = built(tf, two)
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).repeat().batch(8)
    return outcome(model, model.fit(dataset, epochs=2, steps_per_epoch=3, verbose=0))


@fact
def evaluation(tf, two):
    model = built(tf, two)
    return model.evaluate(INPUTS, LABELS, batch_size=8, verbose=0)


@fact
def evaluation_as_a_dictionary(tf, two):
    model = built(tf, two)
    return model.evaluate(INPUTS, LABELS, batch_size=8, verbose=0, return_dict=True)


@fact
def prediction(tf, two):
    return built(tf, two).predict(INPUTS[:8], batch_size=4, verbose=0)


@fact
def a_call_outside_the_replicas(tf, two):
    return built(tf, two)(INPUTS[:2])


def _alone(examples, batch, epochs=2, **keywords):
    """What one device gives: computed here, in double precision, as the answer that is meant."""
    kernel1, bias1, kernel2, bias2 = (w.astype(np.float64) for w in WEIGHTS)
    x_all, y_all = INPUTS[:examples].astype(np.float64), LABELS[:examples]
    history = {"accuracy": [], "loss": []}
    clipnorm = keywords.get("clipnorm")
    for _ in range(epochs):
        losses, hits = [], []
        for start in range(0, examples, batch):
            x, y = x_all[start : start + batch], y_all[start : start + batch]
            hidden = x @ kernel1 + bias1
            active = np.maximum(hidden, 0)
            logits = active @ kernel2 + bias2
            shifted = np.exp(logits - logits.max(1, keepdims=True))
            likely = shifted / shifted.sum(1, keepdims=True)
            rows = np.arange(len(y))
            losses += list(-np.log(likely[rows, y]))
            hits += list(logits.argmax(1) == y)
            wrong = likely.copy()
            wrong[rows, y] -= 1
            wrong /= len(y)
            back = (wrong @ kernel2.T) * (hidden > 0)
            gradients = [x.T @ back, back.sum(0), active.T @ wrong, wrong.sum(0)]
            if clipnorm:
                gradients = [
                    g * min(1.0, clipnorm / max(np.linalg.norm(g), 1e-12)) for g in gradients
                ]
            kernel1, bias1, kernel2, bias2 = (
                w - 0.1 * g
                for w, g in zip((kernel1, bias1, kernel2, bias2), gradients, strict=True)
            )
        history["loss"].append(float(np.mean(losses)))
        history["accuracy"].append(float(np.mean(hits)))
    weights = [
        {"dtype": "float32", "shape": list(w.shape), "values": w.tolist()}
        for w in (kernel1, bias1, kernel2, bias2)
    ]
    return {"history": history, "weights": weights}


@fact(
    alone=True,
    tolerance=2e-4,
    ours=_alone(examples=12, batch=7),
    because="TensorFlow averages the replicas' means, which is biased when their batches have "
    "different sizes; here the gradient is the mean over the global batch, as on one device",
)
def uneven_batches_are_fitted(tf, two):
    return attempt(lambda: trained(tf, two, examples=12, batch=7))


@fact(
    alone=True,
    tolerance=2e-4,
    ours=_alone(examples=11, batch=8),
    because="an uneven batch is weighted by its examples, as on one device",
)
def an_uneven_last_batch_is_fitted(tf, two):
    return attempt(lambda: trained(tf, two, examples=11, batch=8))


@fact(
    alone=True,
    tolerance=2e-4,
    ours=_alone(examples=16, batch=8, clipnorm=0.2),
    because="gradients are clipped after they are summed, as on one device; TensorFlow clips "
    "each replica's own gradient",
)
def clipped_gradients(tf, two):
    return trained(tf, two, make_optimizer=lambda tf: tf.keras.optimizers.SGD(0.1, clipnorm=0.2))


@fact(
    alone=True,
    tolerance=2e-4,
    ours=_alone(examples=16, batch=4),
    because="several steps in one execution work on any number of replicas; TensorFlow fails",
)
def several_steps_in_one_execution(tf, two):
    def fit():
        model = built(tf, two, steps_per_execution=2)
        return outcome(
            model, model.fit(INPUTS, LABELS, batch_size=4, epochs=2, shuffle=False, verbose=0)
        )

    return attempt(fit)


@fact(tolerance=2e-4, because=GROWING)
def training_on_single_batches(tf, two):
    model = built(tf, two)
    logs = [model.train_on_batch(INPUTS[:8], LABELS[:8], return_dict=True) for _ in range(2)]
    return [[float(each["loss"]) for each in logs], model.get_weights()]


def normalized(tf, two):
    with two.scope():
        model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.BatchNormalization()])
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    model.fit(INPUTS[:8], np.zeros((8, 4)), batch_size=8, epochs=1, shuffle=False, verbose=0)
    return model


@fact
def batch_normalization_normalizes_each_replicas_batch(tf, two):
    return normalized(tf, two).get_weights()[:2]


@fact(
    ours=plain((INPUTS[:4].mean(0) + INPUTS[4:8].mean(0)) / 2 * np.float32(0.01)),
    because="the moving statistics of the replicas are read as their mean, which is also what a "
    "saved model holds; TensorFlow's get_weights reads the first replica's",
)
def moving_statistics_outside_the_replicas(tf, two):
    return normalized(tf, two).get_weights()[2]


def custom_step_fitted(tf, two):
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(3, kernel_initializer="ones")
            self.tracker = tf.keras.metrics.Mean(name="tracked")

        def call(self, x):
            return self.dense(x)

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.tracker.update_state(loss)
            return {"tracked": self.tracker.result()}

    with two.scope():
        model = Model()
        model.build((None, 4))
        model.compile(
            tf.keras.optimizers.SGD(0.1),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    history = model.fit(INPUTS, LABELS, batch_size=8, epochs=1, shuffle=False, verbose=0)
    return model.get_weights(), history.history["tracked"][0]


@fact(tolerance=2e-4, because=GROWING)
def a_custom_train_step(tf, two):
    weights, _ = custom_step_fitted(tf, two)
    return weights


@fact(tolerance=2e-4, because=GROWING)
def the_loss_that_a_custom_train_step_tracks(tf, two):
    _, tracked = custom_step_fitted(tf, two)
    return tracked


@fact
def learning_rates_and_iterations(tf, two):
    model = built(tf, two, lambda tf: tf.keras.optimizers.SGD(0.5))
    model.fit(INPUTS, LABELS, batch_size=8, epochs=3, verbose=0)
    rates = [float(model.optimizer.learning_rate.numpy())]
    model.optimizer.learning_rate = 0.25
    rates.append(float(model.optimizer.learning_rate.numpy()))
    return [rates, int(model.optimizer.iterations.numpy())]


@fact
def a_learning_rate_schedule_by_callback(tf, two):
    model = built(tf, two)
    rates = []

    class Noting(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    schedule = tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    model.fit(INPUTS, LABELS, batch_size=8, epochs=3, verbose=0, callbacks=[schedule, Noting()])
    return rates


@fact
def weights_are_saved_and_loaded(tf, two, folder):
    model = built(tf, two)
    path = f"{folder}/model.weights.h5"
    model.fit(INPUTS, LABELS, batch_size=8, epochs=1, shuffle=False, verbose=0)
    expected = model.evaluate(INPUTS, LABELS, batch_size=8, verbose=0)
    model.save_weights(path)
    fresh = built(tf, two)
    fresh.load_weights(path)
    return [expected, fresh.evaluate(INPUTS, LABELS, batch_size=8, verbose=0)]


@fact
def a_saved_model_is_loaded_with_and_without_a_scope(tf, two, folder):
    model = built(tf, two)
    path = f"{folder}/model.keras"
    model.save(path)
    alone = tf.keras.models.load_model(path)
    with two.scope():
        mirrored = tf.keras.models.load_model(path)
    return [alone(INPUTS[:1]), mirrored.predict(INPUTS[:2], verbose=0)]


@fact
def text_is_looked_up(tf):
    layer = tf.keras.layers.StringLookup(vocabulary=["a", "b", "c"])
    back = tf.keras.layers.StringLookup(vocabulary=["a", "b", "c"], invert=True)
    return [
        layer(tf.constant(["a", "c", "z"])),
        layer.get_vocabulary(),
        back(tf.constant([1, 2])),
    ]


@fact
def text_is_looked_up_in_a_pipeline(tf):
    layer = tf.keras.layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=0)
    dataset = tf.data.Dataset.from_tensor_slices(["b", "a"]).map(layer)
    return list(dataset)


@fact
def functions_of_symbolic_tensors_are_refused(tf):
    x = tf.keras.layers.Embedding(4, 2)(tf.keras.Input((3,)))
    return attempt(lambda: tf.reduce_mean(x, axis=1).shape)


@fact
def metrics_alone(tf):
    mean, accuracy = tf.keras.metrics.Mean(), tf.keras.metrics.Accuracy()
    mean.update_state([1.0, 2.0, 6.0], sample_weight=[1.0, 1.0, 0.0])
    accuracy.update_state([1, 2, 3], [1, 2, 4])
    return [float(mean.result()), float(accuracy.result())]


@fact
def losses_and_their_reductions(tf):
    y, p = [[1.0, 0.0]], [[0.8, 0.4]]
    return [
        tf.keras.losses.MeanSquaredError()(y, p),
        tf.keras.losses.MeanSquaredError(reduction="none")(y, p),
        tf.keras.losses.BinaryCrossentropy(reduction="sum")(y, p),
        tf.keras.losses.binary_crossentropy(y, p),
    ]


@fact
def one_hot_labels(tf):
    return [
        tf.keras.utils.to_categorical([0, 2], 3),
        tf.keras.utils.normalize(np.array([[3.0, 4.0]])),
    ]


@fact(
    ours=plain(np.array([[0.9], [0.9]], np.float32)),
    because="Adam, RMSprop, Adagrad, Nadam and Ftrl of Keras 3 under TensorFlow square the "
    "gradients of a row's lookups one by one, so that a row that a batch looks up n times moves by "
    "√n times the rate; here, as in Keras on JAX, it is the square of their sum",
)
def adam_on_a_row_that_is_looked_up_several_times(tf):
    table = tf.keras.layers.Embedding(2, 1, embeddings_initializer="ones")
    table.build(())
    optimizer = tf.keras.optimizers.Adam(0.1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table(np.array([0, 0, 0, 0, 1])))
    gradients = tape.gradient(loss, table.trainable_variables)
    optimizer.apply_gradients(zip(gradients, table.trainable_variables, strict=True))
    return tf.convert_to_tensor(table.embeddings)


@fact
def the_metrics_of_fit_leave_out_masked_padding(tf, two):
    words = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 1], [2, 2, 2, 0]])
    targets = np.arange(16, dtype=np.float32).reshape(4, 4, 1)
    with two.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((4,), dtype="int32"),
                tf.keras.layers.Embedding(4, 2, mask_zero=True),
                tf.keras.layers.Dense(1, kernel_initializer="zeros"),
            ]
        )
        model.compile(tf.keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    return model.fit(words, targets, batch_size=4, verbose=0).history["mae"]


@fact
def a_model_of_a_trained_models_layers_predicts_outside_the_scope(tf, two):
    with two.scope():
        inputs = tf.keras.Input((3,))
        hidden = tf.keras.layers.Dense(2, kernel_initializer="ones")(inputs)
        tf.keras.Model(inputs, tf.keras.layers.Dense(1)(hidden))
    return tf.keras.Model(inputs, hidden).predict(np.ones((4, 3), np.float32), verbose=0)
