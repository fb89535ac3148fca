"""Callbacks: those that lead a training, and those that write files."""

from __future__ import annotations

import contextlib

from keras_features.program import X, Y, as_numbers, feature, fitted, state_of


@feature
def callbacks_that_lead_the_training(program):
    callbacks = program.keras.callbacks
    model = program.compiled(metrics=["mae"])
    rates, begun = [], []

    class Noting(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            begun.append([batch, float(logs["loss"])])

        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    yield
    result = fitted(
        model,
        epochs=8,
        initial_epoch=1,
        validation_split=0.5,
        callbacks=[
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * (2 if epoch == 2 else 1)),
            callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.02),
            callbacks.EarlyStopping(
                "val_loss", patience=2, min_delta=0.05, restore_best_weights=True
            ),
            Noting(),
        ],
    )
    return {**result, "rates": rates, "batches": begun}


@feature
def checkpoints_of_the_best_epoch(program):
    model = program.compiled()
    yield
    best = str(program.folder / "best.keras")
    weights = str(program.folder / "{epoch}.weights.h5")
    result = fitted(
        model,
        epochs=3,
        validation_data=(-X, Y),
        callbacks=[
            program.keras.callbacks.ModelCheckpoint(best, "val_loss", save_best_only=True),
            program.keras.callbacks.ModelCheckpoint(weights, save_weights_only=True),
            program.keras.callbacks.CSVLogger(str(program.folder / "log.csv")),
        ],
    )
    result["best"] = state_of(program.keras.models.load_model(best))
    model.load_weights(weights.format(epoch=2))
    result["after two epochs"] = state_of(model)["weights"]
    lines = (program.folder / "log.csv").read_text().splitlines()
    result["logged"] = [[*map(float, line.split(","))] for line in lines[1:]]
    result["files"] = as_numbers(path.name for path in program.folder.iterdir())
    return result


@feature
def files_of_tensorboard(program):
    model = program.compiled()
    yield
    if program.is_tensorflows:
        board = program.keras.callbacks.TensorBoard(str(program.folder))
    else:  # Keras' own needs TensorFlow
        import unison.keras

        board = unison.keras.TensorBoard(str(program.folder))
    result = fitted(model, validation_split=0.5, callbacks=[board])
    folders = {path.parent.name for path in program.folder.rglob("events.out.tfevents.*")}
    result["folders"] = as_numbers(folders)
    return result


@feature
def backups(program):
    """A training that is interrupted within an epoch, and called again."""
    callbacks = program.keras.callbacks
    model = program.compiled(program.keras.layers.Dense(3))

    class Interrupting(callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if self.batches == 3:
                raise InterruptedError

    yield
    given = {}
    if program.strategy is not None:
        backup = callbacks.BackupAndRestore(str(program.folder / "backup"), save_freq=1)
        given["callbacks"] = [Interrupting(), backup]
        with contextlib.suppress(InterruptedError):
            fitted(model, **given)
        with program.scope():  # another process would build it again
            model = program.compiled(program.keras.layers.Dense(3))
        given["callbacks"] = [backup]
    result = fitted(model, **given)
    result["history"] = {name: values[-1] for name, values in result["history"].items()}
    return result


def failing_once(callbacks):
    """Returns a callback that raises at the end of its first epoch, and notes those that begin."""

    class FailingOnce(callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.has_raised = False
            self.begun = []

        def on_epoch_begin(self, epoch, logs=None):
            self.begun.append(epoch)

        def on_epoch_end(self, epoch, logs=None):
            if not self.has_raised:
                self.has_raised = True
                raise InterruptedError

    return FailingOnce()


@feature
def backups_beside_a_callback_that_raises(program):
    """An epoch is repeated if the callback stands before the backup, as in Keras."""
    callbacks = program.keras.callbacks
    # Keras notes in a model where its training goes on, and leaves that there.
    models = {order: program.compiled() for order in ("behind", "before")}

    yield
    begun = {}
    for order, model in models.items():
        failing = failing_once(callbacks)
        for _ in range(2):
            backup = callbacks.BackupAndRestore(str(program.folder / order))
            given = [backup, failing] if order == "behind" else [failing, backup]
            with contextlib.suppress(InterruptedError):
                fitted(model, callbacks=given)
        begun[order] = failing.begun
    return begun


#: What a callback logs in each epoch: it ends the training, and lowers the learning rate before.
SCORES = [5.0, 3.0, 4.0, 3.5, 6.0, 7.0, 1.0, 0.5]


@feature
def backups_of_what_callbacks_remember(program):
    """A training that is interrupted, and goes on as one to which nothing happened."""
    callbacks = program.keras.callbacks
    model = program.compiled()

    class Scoring(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = SCORES[epoch]

    class Counting(callbacks.Callback):
        """A callback of the user's, which says what it remembers."""

        def __init__(self):
            super().__init__()
            self.seen = []

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append(epoch)

        def get_state(self):
            return {"seen": self.seen}

        def set_state(self, state):
            self.seen = state["seen"]

    class Interrupting(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 3:
                raise InterruptedError

    yield

    def trained(model, *others):
        early = callbacks.EarlyStopping("score", patience=4, mode="min", restore_best_weights=True)
        never = callbacks.EarlyStopping("score", patience=9, mode="min")
        plateau = callbacks.ReduceLROnPlateau(
            "score", factor=0.5, patience=2, cooldown=1, mode="min"
        )
        path = str(program.folder / "best-{epoch}.keras")
        best = callbacks.ModelCheckpoint(path, "score", save_best_only=True, mode="min")
        counting = Counting()
        given = [Scoring(), early, never, plateau, best, counting, *others]
        result = fitted(model, epochs=len(SCORES), callbacks=given)
        result["history"] = {name: values[-1] for name, values in result["history"].items()}
        return {
            **result,
            "waits": [early.wait, never.wait, plateau.wait, plateau.cooldown_counter],
            "bests": [float(each.best) for each in (early, never, plateau, best)],
            "epochs": [early.best_epoch, early.stopped_epoch, *counting.seen],
            "files": as_numbers(path.name for path in program.folder.glob("best*")),
        }

    if program.strategy is None:
        return trained(model)
    folder = str(program.folder / "backup")
    with contextlib.suppress(InterruptedError):
        trained(model, callbacks.BackupAndRestore(folder), Interrupting())
    with program.scope():  # another process would build it again
        model = program.compiled()
    return trained(model, callbacks.BackupAndRestore(folder))
