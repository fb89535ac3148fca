"""Models, weights and checkpoints that are saved, and loaded under another strategy."""

from __future__ import annotations

from keras_features.program import feature, fitted, state_of


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
