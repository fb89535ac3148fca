"""Backups of `fit`, as `BackupAndRestore` writes them: where it was, and what its callbacks say."""

from __future__ import annotations

import contextlib
import functools
import io
import json

import numpy as np

import unison
import unison.tf as tf
from fuzzed.changes import change_members, comparable, outside_of
from fuzzed.format import Format
from fuzzed.mutations import changed_value, hostile
from unison.data import Dataset

X = np.linspace(-1, 1, 96, dtype=np.float32).reshape(16, 6)
Y = X[:, :1] * 2

EPOCHS = 3


class StoppedError(Exception):
    """What ends a training."""


class StopAt(tf.keras.callbacks.Callback):
    """Ends the training behind a batch of an epoch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.place = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            raise StoppedError


@functools.cache
def model_and_values():
    """A model that is compiled once, with its first values."""
    tf.keras.utils.set_random_seed(0)
    with unison.MirroredStrategy(["CPU:0"]).scope():
        model = tf.keras.Sequential([tf.keras.Input((6,)), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    variables = model.variables + model.optimizer.variables
    return model, [(variable, variable.numpy()) for variable in variables]


def arrays():
    return {"x": X, "y": Y, "batch_size": 4}


def within_a_pass():
    batches = Dataset.from_tensor_slices((X, Y)).shuffle(9, seed=3).batch(4).repeat()
    return {"x": batches, "steps_per_epoch": 3}


def without_a_length():
    batches = Dataset.from_tensor_slices((X, Y)).cache().shuffle(9, seed=3)
    return {"x": batches.filter(lambda x, y: True).batch(4)}


def train(folder, inputs, stop=(None, None)):
    """What became of a training, and of its callbacks."""
    model, values = model_and_values()
    for variable, value in values:
        variable.assign(value)
    tf.keras.utils.set_random_seed(1)
    early = tf.keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    plateau = tf.keras.callbacks.ReduceLROnPlateau("loss", patience=9)
    best = tf.keras.callbacks.ModelCheckpoint(
        str(folder / "best.weights.h5"), "loss", save_best_only=True, save_weights_only=True
    )
    backup = tf.keras.callbacks.BackupAndRestore(folder / "backup", 2, delete_checkpoint=False)
    callbacks = [backup, early, plateau, best, StopAt(*stop)]
    with contextlib.suppress(StoppedError):
        model.fit(**inputs(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    found = [early.wait, early.best_epoch, plateau.wait, best.filepath, model.get_weights()]
    return comparable(found)


def writes_backup(inputs):
    return lambda folder: train(folder, inputs, (1, 2))


#: What `fit` documents as a ValueError: a state of other workers, and a cache without elements.
DOCUMENTED = ("saved in the middle of an epoch, of which", "The dataset is empty")


def reads_backup(inputs):
    def read(folder):
        try:
            return train(folder, inputs)
        except ValueError as error:
            if any(message in str(error) for message in DOCUMENTED):
                return "as documented"
            raise

    return read


def change_latest(folder, change):
    """Changes the members of the latest backup; all checksums are right again."""
    path = max((folder / "backup").glob("backup-*.index"), key=lambda path: int(path.stem[7:]))

    def changed(members):
        index = json.loads(members["checkpoint.json"])
        how = change(index, members)
        members["checkpoint.json"] = json.dumps(index)
        return how

    return change_members(path, changed)


def nodes_with_states(index):
    return [node for node in index["nodes"] if node["state"] is not None]


def position_in(index):
    """What the state of the position in `fit` is in JSON: of the nodes, the one with an epoch."""
    (found,) = (
        node["state"]["value"]["dict"]
        for node in nodes_with_states(index)
        if "epoch" in node["state"]["value"].get("dict", {})
    )
    return found


def state(folder, chance):
    def change(index, members):
        node = chance.choice(nodes_with_states(index))
        node["state"], how = changed_value(node["state"], chance, outside_of(folder))
        return how

    return change_latest(folder, change)


def position(folder, chance):
    """Changes one of the fields of the position, or of the data's."""

    def change(index, members):
        fields = position_in(index)
        fields = chance.choice([fields, fields["data"]["dict"]])
        begun = chance.choice(["begun", "now"])
        if begun in fields and chance.random() < 0.5:
            fields = fields[begun]["dict"]
        name = chance.choice([*fields])
        numbers = [-1, 0, 1, 2, 3, 5, 9, 2**31, 2**40, 2**62, 2**63 - 1, 1.0, True, None]
        fields[name] = chance.choice([*numbers, hostile(chance, outside_of(folder))])
        return f"{name}={str(fields[name])[:40]}"

    return change_latest(folder, change)


ATTRIBUTES = (
    "filepath", "monitor", "monitor_op", "model", "_model", "params", "patience", "save_freq",
    "verbose", "on_epoch_end", "set_params", "__class__", "__dict__", "best", "best_weights",
    "best_epoch", "wait", "_last_batch_seen", "_batches_seen_since_last_saving",
)  # fmt: skip


def attribute(folder, chance):
    """Gives a callback an attribute."""

    def change(index, members):
        callbacks = position_in(index)["callbacks"]["dict"]
        name = chance.choice(sorted(callbacks))
        attribute = chance.choice(ATTRIBUTES)
        value = chance.choice(
            [hostile(chance, outside_of(folder)), f"{outside_of(folder)}/x.weights.h5"]
        )
        callbacks[name]["dict"][attribute] = value if not isinstance(value, list | dict) else None
        return f"{name}.{attribute}={str(value)[:40]}"

    return change_latest(folder, change)


def array(folder, chance):
    """An array of a state, of another shape or dtype, or with other numbers."""

    def change(index, members):
        keys = [key for key in index["arrays"] if "VARIABLE_VALUE" not in key]
        key = chance.choice(keys)
        shape = chance.choice([(624,), (625,), (2,), (), (0,), (1, 624)])
        dtype = np.dtype(chance.choice(["<u4", "<i8", "<f4", "|u1", "|b1", "<M8[s]", "|S3"]))
        content = bytes(chance.choice([0, 1, 255]) for _ in range(700))
        values = np.resize(np.frombuffer(content * dtype.itemsize, dtype), shape)
        file = io.BytesIO()
        np.save(file, values)
        members[f"{key}.npy"] = file.getvalue()
        index["arrays"][key] = {"shape": list(shape), "dtype": dtype.str}
        return f"{key} {shape} {dtype}"

    return change_latest(folder, change)


def memories(folder, chance):
    """Changes what earlier passes over the dataset left, which is JSON in the state."""

    def change(index, members):
        data = position_in(index)["data"]["dict"]
        begun = data[chance.choice(["begun", "now"])]
        begun = data["begun"] if begun is None else begun
        held = begun["dict"]["memories"]["list"]
        value, how = changed_value(json.loads(held[0]), chance, outside_of(folder))
        held[0] = json.dumps(value)
        return how

    return change_latest(folder, change)


def backups(inputs, *structures):
    """The format of the backups of a training with such inputs."""
    return Format(writes_backup(inputs), reads_backup(inputs), structures, changes_bytes=False)


FORMATS = {
    "backup": backups(arrays, state, position, position, attribute, array),
    "backup-pass": backups(within_a_pass, state, position, position, array, memories),
    "backup-stream": backups(without_a_length, state, position, position, memories),
}
