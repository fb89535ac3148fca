"""Models as programs of Keras 2 use them: arguments, callbacks, files, and their own steps."""

import gzip
import json
import os

import keras
import numpy as np
import pytest

import unison.tf as tf
from keras_comparison import assert_close
from unison.keras.trainer import trainer_of
from unison.runtime import process_group

X = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def compiled(optimizer="sgd", **arguments):
    keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Dense(4, activation="tanh"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input((3,)), *layers])
    model.compile(optimizer, loss="mse", metrics=["mae"], **arguments)
    return model


# -- old arguments, old names ---------------------------------------------------------------


def test_arguments_of_keras_2s_queue_are_taken(two_replicas):
    with two_replicas.scope():
        model = compiled()
    queue = {"workers": 4, "use_multiprocessing": True, "max_queue_size": 5}
    model.fit(X, Y, verbose=0, **queue)
    model.evaluate(X, Y, verbose=0, **queue)
    assert model.predict(X, verbose=0, **queue).shape == (21, 1)


def test_compile_takes_what_chose_between_implementations(two_replicas, tmp_path):
    with two_replicas.scope():
        model = compiled(experimental_run_tf_function=False)
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    assert tf.keras.models.load_model(tmp_path / "model.keras").compiled


def test_other_unknown_arguments_are_still_errors():
    with pytest.raises(TypeError, match="workerz"):
        compiled().fit(X, Y, workerz=4)


def test_generators_have_methods_of_their_old_names():
    model = compiled()
    history = model.fit_generator(((X, Y) for _ in range(1)), steps_per_epoch=1, verbose=0)
    assert set(history.history) == {"loss", "mae"}


def test_metrics_names_are_those_of_what_evaluate_returns(two_replicas):
    with two_replicas.scope():
        model = compiled()
    values = model.evaluate(X, Y, verbose=0)
    assert model.metrics_names == ["loss", "mae"]
    assert dict(zip(model.metrics_names, values, strict=True)) == pytest.approx(
        model.evaluate(X, Y, verbose=0, return_dict=True)
    )


def test_metrics_go_on_over_batches_if_they_are_not_reset(two_replicas):
    def test_twice(model, reset):
        model.test_on_batch(X[:5], Y[:5])
        return model.test_on_batch(X[5:], Y[5:], reset_metrics=reset)

    with two_replicas.scope():
        model = compiled()
    assert test_twice(model, False) == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-5)
    assert test_twice(model, True) == pytest.approx(
        model.evaluate(X[5:], Y[5:], verbose=0), rel=1e-5
    )


def test_a_metric_has_reset_states():
    metric = tf.keras.metrics.Mean()
    metric.update_state(3.0)
    assert f"{metric.result():.2f}" == "3.00"
    metric.reset_states()
    assert metric.result().numpy() == 0.0


def test_a_stateful_model_has_reset_states():
    layer = tf.keras.layers.LSTM(2, stateful=True)
    model = tf.keras.Sequential([tf.keras.Input(batch_shape=(1, 3, 2)), layer])
    first = model(np.ones((1, 3, 2), "float32"))
    assert not np.allclose(model(np.ones((1, 3, 2), "float32")), first)
    model.reset_states()
    np.testing.assert_allclose(model(np.ones((1, 3, 2), "float32")), first, rtol=1e-6)


def test_a_model_names_its_strategy(two_replicas):
    with two_replicas.scope():
        model = compiled()
    assert model.distribute_strategy is two_replicas
    assert compiled().distribute_strategy is tf.distribute.get_strategy()


def test_a_layer_has_the_shapes_of_its_input_and_output():
    layer = compiled().layers[0]
    assert (layer.input_shape, layer.output_shape) == ((None, 3), (None, 4))


def test_a_layer_may_have_an_attribute_of_that_name():
    class Shaped(tf.keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.output_shape = "mine"

    assert Shaped().output_shape == "mine"


def test_weights_are_added_by_name_and_with_tensorflows_annotations(two_replicas):
    class Counting(tf.keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight("kernel", shape=[int(shape[-1]), 2])
            self.calls = self.add_weight(
                "calls",
                shape=(),
                initializer="zeros",
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        def call(self, x):
            self.calls.assign_add(1.0)
            return x @ self.kernel

    with two_replicas.scope():
        layer = Counting()
    two_replicas.run(layer, args=(X,))
    assert layer.kernel.name == "kernel"
    assert float(layer.calls.numpy()) == 2.0


def test_synchronized_normalization_outside_scopes_normalizes_by_its_batch(tmp_path):
    layer = tf.keras.layers.BatchNormalization(synchronized=True)
    plain = tf.keras.layers.BatchNormalization()
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    assert_close(layer(x, training=True), plain(x, training=True))
    assert_close(layer.get_weights(), plain.get_weights())
    assert isinstance(layer, tf.keras.layers.BatchNormalization)
    assert layer.synchronized
    model = tf.keras.Sequential([tf.keras.Input((2,)), layer])
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras").layers[0]
    assert loaded.synchronized
    assert not plain.synchronized
    assert_close(loaded.get_weights(), layer.get_weights())


def test_synchronized_normalization_of_an_own_class_names_the_class_to_derive_it_from():
    class Own(tf.keras.layers.BatchNormalization):
        pass

    with pytest.raises(ValueError, match="derive it from Unison"):
        Own(synchronized=True)
    assert not Own().synchronized


def test_a_metric_adds_weights_by_name():
    class Total(tf.keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.total = self.add_weight("total", initializer="zeros")

        def update_state(self, value, sample_weight=None):
            self.total.assign_add(value)

        def result(self):
            return self.total.value

    total = Total()
    total.update_state(2.0)
    assert (total.total.name, float(total.result())) == ("total", 2.0)


def test_variables_of_models_are_keys_by_reference():
    one, other = compiled().trainable_variables[:2]
    assert {one.ref(): "one", other.ref(): "other"}[one.ref()] == "one"
    assert one.ref().deref() is one


# -- callbacks ------------------------------------------------------------------------------


def test_callbacks_read_and_set_the_learning_rate_by_its_old_name(two_replicas):
    seen = []

    class PrintLR(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(float(self.model.optimizer.lr.numpy()))

    with two_replicas.scope():
        model = compiled()
    schedule = tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1))
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[schedule, PrintLR()])
    assert seen == [0.5, 0.25]


def test_weights_are_checkpointed_under_names_without_extension(two_replicas, tmp_path):
    with two_replicas.scope():
        model = compiled("adam")
    prefix = os.path.join(tmp_path, "checkpoints", "ckpt_{epoch}")
    checkpoint = tf.keras.callbacks.ModelCheckpoint(filepath=prefix, save_weights_only=True)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[checkpoint])
    latest = tf.train.latest_checkpoint(tmp_path / "checkpoints")
    assert latest == os.path.join(tmp_path, "checkpoints", "ckpt_2")
    again = compiled("adam")
    again.load_weights(latest)
    assert_close(again.get_weights(), model.get_weights())


def test_every_second_epoch_is_checkpointed(tmp_path):
    checkpoint = tf.keras.callbacks.ModelCheckpoint(
        tmp_path / "{epoch}.weights.h5", save_weights_only=True, period=2
    )
    compiled().fit(X, Y, epochs=4, verbose=0, callbacks=[checkpoint])
    assert sorted(os.listdir(tmp_path)) == ["2.weights.h5", "4.weights.h5"]


def test_the_best_model_is_saved_as_a_directory(two_replicas, tmp_path):
    with two_replicas.scope():
        model = compiled()
    checkpoint = tf.keras.callbacks.ModelCheckpoint(
        tmp_path / "best", monitor="loss", save_best_only=True
    )
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[checkpoint])
    assert tf.keras.models.load_model(tmp_path / "best").predict(X, verbose=0).shape == (21, 1)


def test_an_unknown_argument_of_a_callback_is_an_error():
    with pytest.raises(TypeError, match="pariod"):
        tf.keras.callbacks.ModelCheckpoint("x.keras", pariod=2)


def test_an_interrupted_training_is_resumed(two_replicas, tmp_path):
    class Interrupt(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def callbacks(*more):
        return [tf.keras.callbacks.experimental.BackupAndRestore(tmp_path / "backup"), *more]

    uninterrupted = compiled("adam").fit(X, Y, epochs=3, shuffle=False, verbose=0).history
    with two_replicas.scope():
        model = compiled("adam")
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, epochs=3, shuffle=False, verbose=0, callbacks=callbacks(Interrupt()))
    with two_replicas.scope():
        again = compiled("adam")
    history = again.fit(X, Y, epochs=3, shuffle=False, verbose=0, callbacks=callbacks()).history
    np.testing.assert_allclose(history["loss"], uninterrupted["loss"][2:], rtol=1e-4)


def test_other_callbacks_are_keras_own(two_replicas, tmp_path):
    with two_replicas.scope():
        model = compiled()
    log = tmp_path / "log.csv"
    stop = tf.keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=100.0)
    history = model.fit(
        X, Y, epochs=9, verbose=0, callbacks=[stop, tf.keras.callbacks.CSVLogger(log)]
    )
    assert len(history.history["loss"]) == 2
    assert log.read_text().startswith("epoch,loss,mae")


def test_tensorboard_writes_events_and_does_not_make_steps_wait(two_replicas, tmp_path):
    pytest.importorskip("tensorboardX")
    with two_replicas.scope():
        model = compiled()
    board = tf.keras.callbacks.TensorBoard(tmp_path / "logs", histogram_freq=1, write_grads=True)
    model.fit(X, Y, epochs=2, verbose=0, validation_data=(X, Y), callbacks=[board])
    assert os.listdir(tmp_path / "logs" / "train")
    assert os.listdir(tmp_path / "logs" / "validation")
    assert board.on_train_batch_end._is_default


@pytest.mark.parametrize("profiled", [2, (2, 3), "2,3", (2, 500)])
def test_tensorboard_profiles_all_workers_into_one_trace(profiled, two_replicas, tmp_path):
    pytest.importorskip("tensorboardX")
    with two_replicas.scope():
        model = compiled()
    board = tf.keras.callbacks.TensorBoard(tmp_path, profile_batch=profiled)
    model.fit(X, Y, batch_size=len(X) // 4, epochs=1, verbose=0, callbacks=[board])
    with gzip.open(tmp_path / "profile" / "trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    # Aggregation may be in one operation with others, in so small a model.
    assert names >= {"forward", "backward", "update"}
    assert not (tmp_path / "train" / "plugins").exists()  # Keras' own profile
    (written,) = (tmp_path / "train").glob("events.out.tfevents.*")
    assert b"profile/backward_milliseconds" in written.read_bytes()


def test_tensorboard_writes_nothing_on_workers_but_the_first(monkeypatch, two_replicas, tmp_path):
    pytest.importorskip("tensorboardX")
    with two_replicas.scope():
        model = compiled()
    monkeypatch.setattr(process_group, "index", lambda: 1)
    board = tf.keras.callbacks.TensorBoard(tmp_path / "logs", histogram_freq=1, update_freq=1)
    model.fit(X, Y, epochs=1, verbose=0, validation_data=(X, Y), callbacks=[board])
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("profiled", [(3, 2), -1, (1, 2, 3)])
def test_tensorboard_says_which_batches_it_can_profile(profiled, tmp_path):
    with pytest.raises(ValueError, match="profile_batch must be a non-negative integer or 2-tuple"):
        tf.keras.callbacks.TensorBoard(tmp_path, profile_batch=profiled)


# -- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model", "model.keras", "model.h5"])
def test_a_model_goes_on_training_after_loading_on_other_replicas(
    name, two_replicas, four_replicas, tmp_path
):
    with two_replicas.scope():
        model = compiled("adam")
    model.fit(X, Y, verbose=0, shuffle=False)
    model.save(tmp_path / name)
    with four_replicas.scope():
        together = tf.keras.models.load_model(tmp_path / name)
    alone = tf.keras.models.load_model(tmp_path / name)
    expected = model.fit(X, Y, verbose=0, shuffle=False).history
    for again in (together, alone):
        assert_close(again.fit(X, Y, verbose=0, shuffle=False).history, expected)


def test_save_format_names_a_format(tmp_path):
    model = compiled()
    tf.keras.models.save_model(model, tmp_path / "plain", save_format="h5")
    again = tf.keras.models.load_model(tmp_path / "plain")
    assert_close(again.get_weights(), model.get_weights())
    model.save(tmp_path / "directory", save_format="tf", include_optimizer=True)
    assert (tmp_path / "directory").is_dir()


@pytest.mark.parametrize("name", ["weights", "x/my_checkpoint", "x.weights.h5", "x.h5"])
def test_weights_are_saved_under_any_name(name, two_replicas, tmp_path):
    (tmp_path / "x").mkdir()
    with two_replicas.scope():
        model = compiled()
    model.save_weights(tmp_path / name)
    again = compiled()
    again.set_weights([np.zeros_like(weight) for weight in again.get_weights()])
    again.load_weights(tmp_path / name)
    assert_close(again.get_weights(), model.get_weights())


def test_weights_of_a_checkpoint_say_how_loading_went(tmp_path):
    compiled().save_weights(tmp_path / "weights")
    compiled().load_weights(tmp_path / "weights").expect_partial()


def test_weights_of_kerass_orbax_callback_are_loaded(tmp_path, two_replicas):
    def named():
        with two_replicas.scope():
            layer = tf.keras.layers.Dense(1, name="out")
            model = tf.keras.Sequential([tf.keras.Input((3,)), layer], name="net")
            model.compile(tf.keras.optimizers.SGD(name="sgd"), "mse")
        return model

    saved = named()
    callback = tf.keras.callbacks.OrbaxCheckpoint(str(tmp_path / "orbax"))
    saved.fit(X, Y, verbose=0, callbacks=[callback])
    loaded = named()
    loaded.load_weights(str(tmp_path / "orbax"))
    np.testing.assert_equal(loaded.get_weights(), saved.get_weights())


def test_model_of_kerass_orbax_callback_is_loaded(tmp_path, two_replicas):
    with two_replicas.scope():
        x = tf.keras.Input((3,), name="x")
        saved = tf.keras.Model(x, tf.keras.layers.Dense(1, name="out")(x))
        saved.compile("sgd", "mse")
    callback = tf.keras.callbacks.OrbaxCheckpoint(str(tmp_path / "orbax"))
    saved.fit(X, Y, verbose=0, callbacks=[callback])
    loaded = tf.keras.models.load_model(str(tmp_path / "orbax"))
    np.testing.assert_equal(loaded.get_weights(), saved.get_weights())


def test_a_model_is_cloned_into_a_scope(two_replicas):
    model = compiled()
    with two_replicas.scope():
        clone = tf.keras.models.clone_model(model)
        clone.compile("sgd", "mse")
    clone.fit(X, Y, verbose=0)
    assert trainer_of(clone).strategy is two_replicas


# -- steps of the model's own ---------------------------------------------------------------


class Taped(tf.keras.Model):
    """The step of TensorFlow's guide "Customizing what happens in fit()"."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=x.shape[0])
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class OfKeras2(tf.keras.Model):
    """The same as Keras 2 wants it."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compiled_loss(y, y_pred, regularization_losses=self.losses)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        self.compiled_metrics.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class Delegating(tf.keras.Model):
    def train_step(self, data):
        return super().train_step(data)

    def test_step(self, data):
        return super().test_step(data)

    def predict_step(self, data):
        return 2 * super().predict_step(data)


def plain(cls):
    keras.utils.set_random_seed(0)
    inputs = tf.keras.Input((3,))
    hidden = tf.keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
    model = cls(inputs, tf.keras.layers.Dense(1)(hidden))
    model.compile("adam", loss="mse", metrics=["mae"])
    return model


def trained(model):
    data = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, validation_data=(X, Y), **data).history, model.get_weights()


@pytest.fixture(scope="module")
def by_keras():
    return trained(plain(tf.keras.Model))


def test_a_step_with_a_tape_trains_as_keras_own_does(by_keras):
    assert_close(trained(plain(Taped)), by_keras)


@pytest.mark.parametrize("cls", [OfKeras2, Delegating])
def test_a_step_with_a_tape_trains_on_several_replicas(cls, by_keras, four_replicas):
    with four_replicas.scope():
        model = plain(cls)
    assert_close(trained(model), by_keras)  # the last batch of 5 leaves a replica idle


def test_steps_for_test_and_predict_may_assign_too(two_replicas):
    with two_replicas.scope():
        model = plain(Delegating)
    np.testing.assert_allclose(model.predict(X, verbose=0), 2 * np.asarray(model(X)), rtol=1e-4)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(
        plain(tf.keras.Model).evaluate(X, Y, verbose=0), rel=1e-4
    )


class Adversaries(tf.keras.Model):
    """A GAN as in TensorFlow's guide: two optimizers, no `call`, metrics of its own."""

    def __init__(self):
        super().__init__()
        layers = tf.keras.layers
        self.discriminator = tf.keras.Sequential([layers.Dense(5, "relu"), layers.Dense(1)])
        self.generator = tf.keras.Sequential([layers.Dense(3)])
        self.seen = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss = tf.keras.metrics.Mean(name="d_loss")
        self.g_loss = tf.keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def update(self, part, optimizer, loss):
        with tf.GradientTape() as tape:
            value = loss()
        gradients = tape.gradient(value, part.trainable_weights)
        optimizer.apply_gradients(zip(gradients, part.trainable_weights, strict=True))
        return value

    def train_step(self, real):
        count = tf.shape(real)[0]
        noise = tf.ones((count, 4))
        both = tf.concat([self.generator(noise), real], axis=0)
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        d_loss = self.update(
            self.discriminator,
            self.d_optimizer,
            lambda: self.loss_fn(labels, self.discriminator(both)),
        )
        g_loss = self.update(
            self.generator,
            self.g_optimizer,
            lambda: self.loss_fn(tf.zeros((count, 1)), self.discriminator(self.generator(noise))),
        )
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        self.seen.assign_add(1)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


def adversaries():
    keras.utils.set_random_seed(1)
    model = Adversaries()
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), tf.keras.optimizers.Adam(0.01), loss)
    return model


def test_two_optimizers_and_a_model_without_call_train_on_several_replicas(two_replicas):
    alone = adversaries()
    expected = alone.fit(X[:20], batch_size=20, epochs=2, shuffle=False, verbose=0).history
    with two_replicas.scope():
        together = adversaries()
    history = together.fit(X[:20], batch_size=20, epochs=2, shuffle=False, verbose=0).history
    # As on TensorFlow, a replica's loss is its part of the global one.
    parts = {name: [value / 2 for value in values] for name, values in expected.items()}
    assert_close(history, parts)
    assert_close(together.generator.get_weights(), alone.generator.get_weights())
    assert int(together.d_optimizer.iterations.numpy()) == 2
    assert (int(alone.seen), int(together.seen)) == (2, 4)


def test_a_step_with_a_tape_is_compiled_once_a_shape(two_replicas):
    traced = []

    class Tracing(Taped):
        def train_step(self, data):
            traced.append(data[0].shape)
            return super().train_step(data)

    with two_replicas.scope():
        model = plain(Tracing)
    model.fit(X[:16], Y[:16], batch_size=8, epochs=3, verbose=0)
    assert len(traced) == 2  # to find what it touches, and to compile


def test_a_model_with_a_step_of_its_own_is_compiled_anew(two_replicas):
    with two_replicas.scope():
        model = adversaries()
        model.fit(X[:8], batch_size=8, verbose=0)
        loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.SGD(0.1), tf.keras.optimizers.SGD(0.1), loss)
    model.fit(X[:8], batch_size=8, verbose=0)
    assert int(model.d_optimizer.iterations.numpy()) == 1


def test_a_step_with_a_tape_runs_on_batches(two_replicas):
    with two_replicas.scope():
        model = plain(OfKeras2)
    assert np.isfinite(model.train_on_batch(X, Y, return_dict=True)["loss"])


def test_a_model_made_outside_is_not_trained_inside_a_scope(two_replicas):
    model = plain(Taped)
    with two_replicas.scope(), pytest.raises(ValueError, match="was built outside it"):
        model.fit(X, Y, verbose=0)


# -- models of a trained model's layers -------------------------------------------------------


def of_the_first_layer(strategy):
    with strategy.scope():
        inputs = tf.keras.Input((3,))
        hidden = tf.keras.layers.Dense(2, kernel_initializer="ones")(inputs)
        tf.keras.Model(inputs, tf.keras.layers.Dense(1)(hidden))
    return tf.keras.Model(inputs, hidden)


def test_such_a_model_predicts_outside_the_scope(two_replicas):
    inner = of_the_first_layer(two_replicas)
    predicted = inner.predict(np.ones((5, 3), np.float32), verbose=0)
    np.testing.assert_allclose(predicted, np.full((5, 2), 3.0))


def test_such_a_model_is_evaluated_outside_the_scope(two_replicas):
    inner = of_the_first_layer(two_replicas)
    inner.compile(loss="mse")
    examples = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    assert inner.evaluate(*examples, verbose=0) == pytest.approx(4.0)


# -- DatasetCreator -------------------------------------------------------------------------


def test_a_dataset_creator_makes_a_batch_for_every_replica(two_replicas):
    sizes = []

    def dataset_fn(context):
        sizes.append(context.get_per_replica_batch_size(8))
        return tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(sizes[-1])

    creator = tf.keras.utils.experimental.DatasetCreator(dataset_fn)
    with two_replicas.scope():
        model = compiled()
    history = model.fit(creator, epochs=2, steps_per_epoch=2, verbose=0).history
    assert sizes == [4]
    assert len(history["loss"]) == 2
    together = next(creator.batches_for(two_replicas))
    np.testing.assert_array_equal(together[0], X[:8])
