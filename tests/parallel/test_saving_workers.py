"""Workers that save: all to one path, each to its own, and the first one alone."""

import contextlib
import functools
import os

import numpy as np
import pytest

from keras_forms import FORMS, IMPORTED, forms, scope_with_keras
from unison.runtime import devices
from unison.train import latest_checkpoint, load_checkpoint
from warm_workers import launch

SECONDS = 150
VALUE = ".ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture(autouse=True, scope="module")
def four_devices():
    """Starts JAX with the four logical devices before reading a checkpoint does so with one."""
    devices.prepare_backend()


def on_workers(program, *args, workers=2, devices=1, form="keras"):
    return launch(
        program,
        workers,
        args,
        devices,
        imported=IMPORTED[form],
        timeout=SECONDS,
        on_line=lambda *line: None,
    )


def save_in_every_way(folder):
    """Saves mirrored and spread state to one path, to paths of their own, and alone."""
    import time

    import jax

    import unison
    import unison.tf as tf
    from unison.storage import atomic
    from unison.train import Checkpoint, CheckpointManager, CheckpointOptions, archive
    from unison.train import checkpoint as checkpoints
    from unison.train import manager as managers

    index = jax.process_index
    written = []
    write_archive = archive.write_archive

    def counting(prefix, *args):
        written.append(os.path.relpath(prefix, folder))
        write_archive(prefix, *args)

    import unison.saving.save
    import unison.train.archive_content as module

    module.write_archive = counting
    replacing_folder = atomic.replacing_folder

    def counting_folders(path, *names):
        written.append(os.path.relpath(path, folder))
        return replacing_folder(path, *names)

    atomic.replacing_folder = counting_folders
    update_state = checkpoints.update_checkpoint_state

    def slowly(*args):
        time.sleep(0.2)  # in which the others would look for the latest checkpoint
        update_state(*args)

    checkpoints.update_checkpoint_state = managers.update_checkpoint_state = slowly
    strategy = unison.MultiWorkerMirroredStrategy()
    with strategy.scope():
        mirrored = unison.Variable(np.float32(3.0))
        total = unison.Variable(
            np.float32(0.0),
            synchronization=unison.VariableSynchronization.ON_READ,
            aggregation=unison.VariableAggregation.SUM,
        )
    plain, spread = Checkpoint(mirrored=mirrored), Checkpoint(mirrored=mirrored, total=total)
    strategy.run(lambda: total.assign_add(2.0))

    # The first one alone, which nobody waits for.
    if index() == 0:
        Checkpoint(mirrored=mirrored).save(f"{folder}/alone/ckpt")
    # All, to one path and to their own, with and without a gather.
    latest = []
    for checkpoint, kind in ((plain, "plain"), (spread, "spread")):
        for _ in range(2):
            saved = checkpoint.save(f"{folder}/{kind}/one/ckpt")
            latest.append((saved, latest_checkpoint(f"{folder}/{kind}/one")))
        checkpoint.save(f"{folder}/{kind}/worker{index()}/ckpt")
        checkpoint.write(f"{folder}/{kind}/again")
    # In the background.
    spread.write(f"{folder}/background", CheckpointOptions(enable_async=True))
    spread.sync()

    # An object with a function, as a folder.
    class Counter(unison.Module):
        def __init__(self):
            super().__init__()
            self.mirrored, self.total = mirrored, total

        @tf.function(input_signature=[tf.TensorSpec((), np.float32)])
        def scaled(self, x):
            return x * self.mirrored

    unison.saving.save(Counter(), f"{folder}/counter")
    unison.saving.save(Counter(), f"{folder}/counter")  # which replaces the first one
    loaded = unison.saving.load(f"{folder}/counter")
    # By a manager, which one of them keeps.
    manager = CheckpointManager(spread, f"{folder}/managed", max_to_keep=2)
    for _ in range(3):
        strategy.run(lambda: total.assign_add(1.0))
        manager.save()
    total.assign(0.0)
    restored = CheckpointManager(spread, f"{folder}/managed", 2).restore_or_initialize()
    return {
        "written": written,
        "latest": latest,
        "managed": [os.path.basename(path) for path in manager.checkpoints],
        "restored": os.path.basename(restored),
        "total": float(total.numpy()),
        "loaded": [float(loaded.total), float(loaded.scaled(np.float32(2.0)))],
    }


@functools.cache
def saved(folder):
    return on_workers(save_in_every_way, str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


def test_first_worker_saves_mirrored_state_alone(folder):
    saved(folder)
    assert latest_checkpoint(folder / "alone") == str(folder / "alone" / "ckpt-1")


def test_path_that_all_name_is_written_once(folder):
    first, second = saved(folder)
    shared = {
        "plain/one/ckpt-1",
        "plain/one/ckpt-2",
        "plain/again",
        "spread/one/ckpt-1",
        "spread/one/ckpt-2",
        "spread/again",
        "background",
        "managed/ckpt-4",
        "managed/ckpt-5",
        "managed/ckpt-6",
    }
    assert shared <= set(first["written"])
    # What the first one has written alone before may be taken for its part of the first save.
    assert shared.intersection(second["written"]) <= {"plain/one/ckpt-1"}


@pytest.mark.parametrize("kind", ["plain", "spread"])
def test_each_worker_writes_a_path_of_its_own(folder, kind):
    saved(folder)
    for worker in range(2):
        path = latest_checkpoint(folder / kind / f"worker{worker}")
        assert load_checkpoint(path).get_tensor(f"mirrored/{VALUE}") == 3.0


def test_checkpoint_holds_the_combined_values_of_all(folder):
    saved(folder)
    for path in ("spread/again", "background"):
        assert load_checkpoint(folder / path).get_tensor(f"total/{VALUE}") == 4.0


def test_folder_that_all_name_is_written_once_and_holds_what_all_have(folder):
    first, second = saved(folder)
    assert first["written"].count("counter") == 2
    assert second["written"].count("counter") == 0
    assert first["loaded"] == second["loaded"] == [4.0, 6.0]


def test_what_has_been_saved_is_the_latest_for_all(folder):
    first, second = saved(folder)
    for path, latest in second["latest"]:
        assert latest == path
    assert first["latest"] == second["latest"]


def test_one_manager_keeps_the_folder_and_all_know_what_is_there(folder):
    for result in saved(folder):
        assert result["managed"] == ["ckpt-5", "ckpt-6"]
        assert (result["restored"], result["total"]) == ("ckpt-6", 10.0)
    there = sorted(os.listdir(folder / "managed"))
    assert there == ["checkpoint", "ckpt-5.index", "ckpt-6.index"]


def save_alone(folder, worker, while_training, form):
    """Trains, and saves on one worker alone, in each epoch or when the others may have ended."""
    import logging

    import jax

    import unison

    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("unison").addHandler(handler)
    strategy = unison.MultiWorkerMirroredStrategy()
    with scope_with_keras(strategy, form) as keras:
        keras.utils.set_random_seed(0)
        total = unison.Variable(
            np.float32(0.0),
            name="examples",
            synchronization=unison.VariableSynchronization.ON_READ,
            aggregation=unison.VariableAggregation.SUM,
        )
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", metrics=["mae"])
    strategy.run(lambda: total.assign_add(2.0 + jax.process_index()))
    is_saver = jax.process_index() == worker
    callbacks = []
    if is_saver and while_training:
        path = f"{folder}/{{epoch}}.keras"
        callbacks = [keras.callbacks.ModelCheckpoint(path, save_freq="epoch")]
    history = model.fit(*data(), batch_size=8, epochs=3, verbose=0, callbacks=callbacks).history
    if is_saver and not while_training:
        model.save(f"{folder}/end.keras")
        unison.train.Checkpoint(total=total).write(f"{folder}/counts")
        unison.saving.save(model, f"{folder}/folder")
    return history["loss"], model.get_weights()[0], warnings


@forms("tf", soaked=["keras"])
@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("while_training", [True, False], ids=["training", "end"])
def test_one_worker_alone_saves_its_own_copies_and_is_warned_once(
    tmp_path, worker, while_training, form
):
    results = on_workers(save_alone, str(tmp_path), worker, while_training, form, form=form)
    assert results[0][0] == results[1][0]
    (warning,) = results[worker][2]
    assert "this worker's copies of" in warning
    assert not results[1 - worker][2]
    import keras

    weights = results[worker][1]
    if while_training:
        assert sorted(os.listdir(tmp_path)) == ["1.keras", "2.keras", "3.keras"]
        last = keras.models.load_model(tmp_path / "3.keras")
    else:
        last = keras.models.load_model(tmp_path / "end.keras")
        assert load_checkpoint(tmp_path / "counts").get_tensor(f"total/{VALUE}") == 2.0 + worker
        assert (tmp_path / "folder" / "saved_model.json").exists()
    np.testing.assert_array_equal(last.get_weights()[0], weights)


# -- Keras' callbacks ----------------------------------------------------------------------------


def data():
    random = np.random.default_rng(0)
    return random.normal(size=(44, 6)).astype(np.float32), random.normal(size=(44, 1))


def train(strategy, folder, stop=None, form="keras"):
    """Trains three epochs with backups of every batch, or up to a batch of an epoch."""
    with scope_with_keras(strategy, form) as keras:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse", metrics=["mae"])

    class Watcher(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            losses[f"{self.epoch} {batch}"] = logs["loss"], logs["mae"]
            if [self.epoch, batch] == stop:
                raise InterruptedError

    losses = {}
    callbacks = [
        keras.callbacks.ModelCheckpoint(f"{folder}/model-{{epoch}}.keras"),
        Watcher(),
        keras.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=1, delete_checkpoint=False),
    ]
    with contextlib.suppress(InterruptedError):
        model.fit(*data(), batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    return losses


def train_on_workers(folder, form):
    """Goes on with the training of one process, saves the model in every way, and loads it."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    import unison

    strategy = unison.MultiWorkerMirroredStrategy()
    index = jax.process_index()
    losses = train(strategy, folder, form=form)
    import keras

    from unison.keras import sharded_update
    from unison.saving import keras_directory

    # A large layer, whose slots are sharded, as on the devices of one process.
    sharded_update._is_worth_sharding = lambda *of: True
    with strategy.scope():
        large = keras.Sequential([keras.Input((256,)), keras.layers.Dense(512)])
        large.compile("adam", "mse")
    large.fit(np.ones((8, 256)), np.ones((8, 512)), batch_size=8, verbose=0)
    layouts = sorted({variable.cell.layout.value for variable in large.optimizer.variables})
    large.save(f"{folder}/large.keras")
    large.save(f"{folder}/large-{index}.keras")
    large.save_weights(f"{folder}/large.weights.h5")
    unison.saving.save(large, f"{folder}/large")
    rebuilt = keras_directory.load_model(f"{folder}/large")
    loaded = keras.models.load_model(f"{folder}/large.keras")
    momenta = [variable.numpy() for variable in loaded.optimizer.variables]
    kept = [variable.numpy() for variable in large.optimizer.variables]
    return {
        "losses": losses,
        "layouts": layouts,
        "rebuilt": all(
            np.array_equal(a, b)
            for a, b in zip(rebuilt.get_weights(), large.get_weights(), strict=True)
        ),
        "equal": all(np.array_equal(a, b) for a, b in zip(momenta, kept, strict=True)),
    }


def assert_same(resumed, whole):
    assert resumed.keys() == whole.keys()
    for place, values in whole.items():
        np.testing.assert_allclose(resumed[place], values, rtol=1e-4, err_msg=place)


def stop_on_workers(folder, form):
    """Trains up to a batch in the middle of an accumulation, and of an epoch."""
    os.environ["KERAS_BACKEND"] = "jax"
    import unison

    return train(unison.MultiWorkerMirroredStrategy(), folder, stop=[1, 2], form=form)


@forms(*FORMS)
def test_training_of_two_workers_of_two_replicas_goes_on_in_one_process(tmp_path, form):
    import unison

    alone = unison.OneDeviceStrategy("CPU:0")
    whole = train(alone, tmp_path / "whole")
    folder = str(tmp_path / "stopped")
    stopped, same = on_workers(stop_on_workers, folder, form, devices=2, form=form)
    assert stopped == same
    resumed = train(alone, tmp_path / "stopped")
    assert next(iter(resumed)) == "1 2"
    assert_same(stopped | resumed, whole)


@forms(*FORMS)
def test_training_of_one_process_goes_on_on_two_workers(tmp_path, form):
    import unison

    alone = unison.OneDeviceStrategy("CPU:0")
    whole = train(alone, tmp_path / "whole")
    losses = train(alone, tmp_path / "stopped", stop=[1, 2])
    first, second = on_workers(train_on_workers, str(tmp_path / "stopped"), form, form=form)
    assert first == second
    assert next(iter(first["losses"])) == "1 2"
    assert_same(losses | first["losses"], whole)
    # What Keras saved is whole, and written once.
    assert first["layouts"] == ["mirrored", "sharded"]
    assert first["equal"]
    assert first["rebuilt"]
    assert sorted(name for name in os.listdir(tmp_path / "stopped") if "backup" not in name) == [
        "large",
        "large-0.keras",
        "large-1.keras",
        "large.keras",
        "large.weights.h5",
        "model-1.keras",
        "model-2.keras",
        "model-3.keras",
    ]
