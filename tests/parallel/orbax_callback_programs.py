"""Keras' callback `OrbaxCheckpoint` on several workers, which name one directory.

As in `programs.py`, each program takes a strategy and returns what JSON can say, so that workers
can be compared with one process. The form is how Keras comes to it.
"""

from __future__ import annotations

import os

import numpy as np

from keras_forms import scope_with_keras
from parallel.programs import multi_worker_strategy

X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
Y = X.sum(1, keepdims=True) / 4
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}

#: The options of the callbacks of `saved_as_asked`. The loss falls at first, and then rises.
OPTIONS = {
    "default": {},
    "in the foreground": {"save_on_background": False, "max_to_keep": 2},
    "by batches": {"save_freq": 3, "max_to_keep": 3},
    "the best": {"monitor": "loss", "save_best_only": True, "max_to_keep": None},
    "better than": {
        "monitor": "loss",
        "save_best_only": True,
        "initial_value_threshold": 1e-3,
    },
    "weights": {"save_weights_only": True},
}


def on_workers(name, *args):
    """Runs the named program as a worker."""
    os.environ["KERAS_BACKEND"] = "jax"
    return globals()[name](multi_worker_strategy(), *args)


def zero_on_workers(*args):
    """Runs `saved_and_loaded` with variables that are divided over the workers."""
    os.environ["KERAS_BACKEND"] = "jax"
    import unison

    strategy = unison.ModelParallelStrategy(mesh={"batch": 2}, zero=3)
    return saved_and_loaded(strategy, *args)


def build(keras, seed=1):
    """Returns a model; the names of its variables are the same each time."""
    keras.utils.set_random_seed(seed)
    x = keras.Input((6,), name="x")
    y = keras.layers.Dense(8, activation="tanh", name="hidden")(x)
    y = keras.layers.BatchNormalization(momentum=0.5, name="norm")(y)
    # Keras 3.15 loads nothing into a Sequential model that it rebuilds: it has other paths.
    model = keras.Model(x, keras.layers.Dense(1, name="out")(y), name="net")
    model.compile(keras.optimizers.Adam(0.01, name="adam"), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)  # whose slots are loaded, too
    return model


def build_small(keras):
    """Returns a model that is compiled soon."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def state_of(model):
    """The weights and the state of the optimizer."""
    variables = [*model.weights, *model.optimizer.variables]
    return [np.asarray(variable.numpy(), np.float64).tolist() for variable in variables]


def saved_as_asked(strategy, folder, form="keras"):
    """The steps that are there after `fit`, on each worker, by the options of the callback."""
    found = {}
    for name, options in OPTIONS.items():
        with scope_with_keras(strategy, form) as keras:
            model = build_small(keras)

        def rate(epoch, _):
            return 0.01 if epoch < 2 else 1.0

        directory = os.path.join(folder, name)
        callbacks = [
            keras.callbacks.LearningRateScheduler(rate),
            keras.callbacks.OrbaxCheckpoint(directory, **options),
        ]
        losses = model.fit(X, Y, epochs=4, callbacks=callbacks, **FIT).history["loss"]
        steps = sorted(map(int, os.listdir(directory))) if os.path.exists(directory) else []
        found[name] = {"steps": steps, "loss": losses}
    return found


def saved_and_loaded(strategy, folder, alone, form="keras"):
    """The state that is saved, and what each worker, and one alone, loads of it.

    Args:
        strategy: The strategy.
        folder: The directory of the callback.
        alone: A directory that one process has written.
        form: How Keras comes to it.
    """
    import jax

    with scope_with_keras(strategy, form) as keras:
        model, other = build(keras), build(keras, seed=2)
        callback = keras.callbacks.OrbaxCheckpoint(folder)
    model.fit(X, Y, epochs=2, callbacks=[callback], **FIT)
    result = {"saved": state_of(model)}
    for name, path in [("loaded", folder), ("loaded from alone", alone)]:
        other.load_weights(path)
        result[name] = state_of(other)
    with scope_with_keras(strategy, form) as keras:
        rebuilt = keras.saving.load_model(folder)
    result["rebuilt"] = state_of(rebuilt)
    result["predictions"] = rebuilt.predict(X, verbose=0).tolist()
    if jax.process_index() == 1:  # without the other, which does not wait for it
        import keras

        own = build(keras, seed=3)
        own.load_weights(folder)
        result["loaded by one"] = state_of(own)
    return result


def saved_by_the_first_alone(strategy, folder, form="keras"):
    """The directory after a `fit` in which only the first worker has the callback."""
    import jax

    with scope_with_keras(strategy, form) as keras:
        model = build(keras)
        callback = keras.callbacks.OrbaxCheckpoint(folder, max_to_keep=2)
    callbacks = [callback] if jax.process_index() == 0 else []
    model.fit(X, Y, epochs=3, callbacks=callbacks, **FIT)
    return sorted(os.listdir(folder)) if callbacks else []


def saved_in_two_fits(strategy, folder, form="keras"):
    """The directory after each of two calls of `fit`, and what a third says."""
    import keras

    from unison.errors import OpError

    callback = keras.callbacks.OrbaxCheckpoint(folder, max_to_keep=2)  # before the first scope
    with scope_with_keras(strategy, form) as keras:
        model = build(keras)
    found = []
    for first in (0, 2):
        model.fit(X, Y, initial_epoch=first, epochs=first + 2, callbacks=[callback], **FIT)
        found.append(sorted(os.listdir(folder)))
    model.fit(X, Y, epochs=1, callbacks=[callback], **FIT)  # an earlier step: it is skipped
    found.append(sorted(os.listdir(folder)))
    for is_async in (False, True):  # in the background, it is said at the next step
        callback = keras.callbacks.OrbaxCheckpoint(folder, save_on_background=is_async)
        try:
            model.fit(X, Y, initial_epoch=3, epochs=6, callbacks=[callback], **FIT)
        except (ValueError, OSError, OpError) as error:
            found.append(f"{type(error).__name__}: {error}")
    model.fit(X, Y, **FIT)  # which the workers begin at the same place of the program
    return found


def failing(strategy, folder, form="keras"):
    """The errors of a save in the foreground and in the background, if the first cannot write."""
    import jax

    with scope_with_keras(strategy, form) as keras:
        model = build(keras)
        import unison.saving.keras_orbax as room

    def fail(self, step, content):
        raise OSError(28, "No space left on device")

    if jax.process_index() == 0:
        room._Checkpointer._write = fail
    import keras

    errors = []
    for is_async in (False, True):
        callback = keras.callbacks.OrbaxCheckpoint(
            os.path.join(folder, str(is_async)), save_on_background=is_async
        )
        try:
            model.fit(X, Y, epochs=2, callbacks=[callback], **FIT)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def of_each_workers_own(strategy, folder, form="keras"):
    """The error for a model that was created outside of the scope."""
    with scope_with_keras(strategy, form) as keras:
        callback = keras.callbacks.OrbaxCheckpoint(folder)
    model = build(keras)
    try:
        model.fit(X, Y, callbacks=[callback], **FIT)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
