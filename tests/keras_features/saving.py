"""Models, weights and checkpoints that are saved, and loaded under another strategy."""

from __future__ import annotations

import contextlib

import fsspec

from keras_features.program import BATCH, X, feature, fitted, state_of


@feature
def models_that_are_loaded_under_another_strategy(program):
    model = program.compiled()
    yield
    path = str(program.folder / "model.keras")
    result = fitted(model)
    model.save(path)
    with program.scope(program.other):
        loaded = program.keras.models.load_model(path)
    return {"saved": result, "loaded": state_of(loaded), "trained on": fitted(loaded)}


@feature
def weights_that_are_loaded_under_another_strategy(program):
    model = program.compiled()
    yield
    path = str(program.folder / "model.weights.h5")
    fitted(model)
    model.save_weights(path)
    with program.scope(program.other):
        other = program.compiled()
        other.load_weights(path)
    return {"loaded": state_of(other)["weights"], "trained on": fitted(other)}


@feature
def checkpoints_of_a_model_and_its_optimizer(program):
    model = program.compiled()
    yield
    fitted(model)
    checkpoint = program.face.train.Checkpoint(model=model, optimizer=model.optimizer)
    if program.strategy is not None:
        path = checkpoint.save(str(program.folder / "checkpoint"))
        fitted(model)
        checkpoint.restore(path).assert_consumed()
    return fitted(model)


@feature
def models_that_leave_a_strategy_and_enter_it(program):
    """Files of a strategy's model are read without one, and the other way round."""
    model = program.compiled()
    yield
    load, folder = program.keras.models.load_model, program.folder

    def predicted(model):
        return model.predict(X, batch_size=BATCH, verbose=0).tolist()

    trained = fitted(model)
    model.save(str(folder / "model.keras"))
    model.save_weights(str(folder / "model.weights.h5"))
    left = load(str(folder / "model.keras"))
    alone = program.compiled()
    alone.load_weights(str(folder / "model.weights.h5"))
    result = {"trained": trained, "left": state_of(left), "weights": predicted(alone)}
    # A new optimizer's first step.
    alone.compile("sgd", "mse")
    result["alone"] = fitted(alone)
    alone.save(str(folder / "alone.keras"))
    with program.scope():
        entered = load(str(folder / "alone.keras"))
    return {**result, "entered": predicted(entered), "goes on": fitted(entered), **fitted(left)}


@feature
def files_that_appear_whole(program):
    """A file and a folder stay as they were where the next ones cannot be written."""
    keras = program.keras

    @keras.saving.register_keras_serializable("features")
    class Failing(keras.layers.Layer):
        fails = False

        def save_own_variables(self, store):
            if self.fails:
                raise OSError("no space")
            super().save_own_variables(store)

        def call(self, inputs):
            return inputs

    failing = Failing()
    model = program.compiled(failing)
    yield
    result = fitted(model)
    local, remote = str(program.folder / "model.keras"), f"memory:/{program.folder}/model.keras"
    paths = {local: {}, str(program.folder / "model"): {"zipped": False}, remote: {}}
    if program.strategy is None:  # Keras' own files are not replaced, and not behind fsspec
        return {"fitted": result, "loaded": [state_of(model)] * len(paths)}
    for path, options in paths.items():
        model.save(path, **options)
    fitted(model)
    failing.fails = True
    for path, options in paths.items():
        with contextlib.suppress(OSError):
            model.save(path, **options)
            raise AssertionError(f"{path} was written")
    copy = program.folder / "copy.keras"
    with fsspec.open(remote, "rb") as file:
        copy.write_bytes(file.read())
    read = (copy if path == remote else path for path in paths)
    loaded = [state_of(keras.models.load_model(str(path))) for path in read]
    return {"fitted": result, "loaded": loaded}


def _named(program):
    """A model whose variables have the same paths each time, as in processes of their own."""
    keras = program.keras
    layers = [keras.layers.Dense(3, name="hidden"), keras.layers.Dense(1, name="out")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="net")
    model.compile(keras.optimizers.Adam(0.05, name="adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@feature
def folders_of_the_orbax_callback(program):
    model = _named(program)
    yield
    folder = str(program.folder / "orbax")
    if program.strategy is None:
        result = fitted(model)
        return {**result, "loaded": state_of(model)}
    result = fitted(model, callbacks=[program.keras.callbacks.OrbaxCheckpoint(folder)])
    with program.scope(program.other):
        loaded = _named(program)
    loaded.load_weights(folder)
    return {**result, "loaded": state_of(loaded)}
