"""`tf.train`: checkpoints, their manager, and what a restored variable holds."""

from __future__ import annotations

import os

import numpy as np

from parity.facts import attempt, fact


@fact
def a_checkpoint_is_restored(tf, folder):
    v, w = tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(v=v, w=w)
    path = checkpoint.save(f"{folder}/ckpt")
    v.assign([0.0, 0.0])
    w.assign(0)
    checkpoint.restore(path).assert_consumed()
    return [v.numpy(), w.numpy(), os.path.basename(path)]


@fact
def checkpoints_are_numbered(tf, folder):
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    paths = [checkpoint.save(f"{folder}/ckpt") for _ in range(3)]
    latest = tf.train.latest_checkpoint(folder)
    return [
        [os.path.basename(path) for path in paths],
        os.path.basename(latest),
        int(checkpoint.save_counter.numpy()),
    ]


@fact
def an_empty_directory_has_no_latest_checkpoint(tf, folder):
    return [tf.train.latest_checkpoint(folder), tf.train.latest_checkpoint(f"{folder}/no")]


@fact
def restoring_nothing_changes_nothing(tf):
    v = tf.Variable(1.0)
    tf.train.Checkpoint(v=v).restore(None)
    return v.numpy()


@fact
def a_missing_checkpoint_is_not_found(tf, folder):
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    return attempt(lambda: checkpoint.restore(f"{folder}/missing") and None)


@fact
def writing_does_not_number(tf, folder):
    v = tf.Variable(5.0)
    path = tf.train.Checkpoint(v=v).write(f"{folder}/exact")
    v.assign(0.0)
    tf.train.Checkpoint(v=v).read(path).assert_consumed()
    return [v.numpy(), os.path.basename(path)]


@fact
def what_is_made_later_is_restored_when_it_comes(tf, folder):
    path = tf.train.Checkpoint(v=tf.Variable(7.0)).save(f"{folder}/ckpt")
    holder = tf.train.Checkpoint()
    status = holder.restore(path)
    holder.v = tf.Variable(0.0)
    status.assert_existing_objects_matched()
    return holder.v.numpy()


@fact
def what_the_checkpoint_lacks_is_noticed(tf, folder):
    path = tf.train.Checkpoint(v=tf.Variable(7.0)).save(f"{folder}/ckpt")
    other = tf.train.Checkpoint(v=tf.Variable(0.0), extra=tf.Variable(1.0))
    status = other.restore(path)
    return [
        attempt(lambda: status.assert_consumed() and None),
        attempt(lambda: status.assert_existing_objects_matched() and None),
        other.v.numpy(),
    ]


@fact
def what_the_program_lacks_is_noticed(tf, folder):
    path = tf.train.Checkpoint(v=tf.Variable(7.0), w=tf.Variable(8.0)).save(f"{folder}/ckpt")
    v = tf.Variable(0.0)
    status = tf.train.Checkpoint(v=v).restore(path)
    status.expect_partial()
    return [
        attempt(lambda: status.assert_consumed() and None),
        attempt(lambda: status.assert_existing_objects_matched() and None),
        v.numpy(),
    ]


@fact
def another_shape_is_refused(tf, folder):
    path = tf.train.Checkpoint(v=tf.Variable([1.0, 2.0])).save(f"{folder}/ckpt")
    other = tf.train.Checkpoint(v=tf.Variable([1.0, 2.0, 3.0]))
    return attempt(lambda: other.restore(path) and None)


@fact
def lists_and_dictionaries_are_followed(tf, folder):
    class Holder(tf.Module):
        def __init__(self, start):
            self.items = [tf.Variable(start), {"deep": tf.Variable(start + 1)}]

    path = tf.train.Checkpoint(holder=Holder(1.0)).save(f"{folder}/ckpt")
    restored = Holder(0.0)
    tf.train.Checkpoint(holder=restored).restore(path).assert_existing_objects_matched()
    return [restored.items[0].numpy(), restored.items[1]["deep"].numpy()]


@fact
def a_shared_variable_is_saved_once(tf, folder):
    shared = tf.Variable(2.0)
    checkpoint = tf.train.Checkpoint(a=shared, b=shared)
    path = checkpoint.save(f"{folder}/ckpt")
    shared.assign(0.0)
    checkpoint.restore(path)
    return shared.numpy()


@fact
def a_manager_keeps_the_last(tf, folder):
    v = tf.Variable(0.0)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=v), directory=folder, max_to_keep=2)
    nothing_yet = manager.latest_checkpoint
    for value in (1.0, 2.0, 3.0):
        v.assign(value)
        manager.save()
    return [
        nothing_yet,
        [os.path.basename(path) for path in manager.checkpoints],
        os.path.basename(manager.latest_checkpoint),
    ]


@fact
def a_manager_restores_or_begins(tf, folder):
    def manager_of(v):
        return tf.train.CheckpointManager(tf.train.Checkpoint(v=v), folder, max_to_keep=1)

    first = tf.Variable(4.0)
    begun = manager_of(first).restore_or_initialize()
    manager_of(first).save()
    second = tf.Variable(0.0)
    restored = manager_of(second).restore_or_initialize()
    return [begun, os.path.basename(restored), second.numpy()]


@fact
def a_manager_takes_a_number_and_a_name(tf, folder):
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(v=tf.Variable(1.0)), folder, max_to_keep=3, checkpoint_name="model"
    )
    return [
        os.path.basename(manager.save()),
        os.path.basename(manager.save(checkpoint_number=40)),
        os.path.basename(manager.save()),
    ]


def saved_and_restored(aggregation, saver, reader):
    """Copies written by one strategy, saved, and read by another."""

    def program(tf, one, two, four, folder):
        strategies = {"one": one, "two": two, "four": four}

        def made(strategy):
            with strategy.scope():
                return tf.Variable(
                    0.0,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=getattr(tf.VariableAggregation, aggregation),
                )

        writing, reading = strategies[saver], strategies[reader]
        variable = made(writing)

        def write():
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            variable.assign(tf.cast(index, tf.float32) * 10.0 + 2.0)

        writing.run(write)
        path = tf.train.Checkpoint(v=variable).save(f"{folder}/ckpt")
        restored = made(reading)
        tf.train.Checkpoint(v=restored).restore(path)
        copies = reading.experimental_local_results(reading.run(lambda: restored.read_value() + 0))
        return [copies, restored.read_value()]

    return program


for _aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
    for _saver, _reader in (("two", "four"), ("two", "one"), ("one", "two")):
        fact(
            saved_and_restored(_aggregation, _saver, _reader),
            name=f"on_read_{_aggregation}_saved_on_{_saver}_and_restored_on_{_reader}",
        )


@fact
def a_mirrored_variable_is_restored_on_every_replica(tf, two, folder):
    path = tf.train.Checkpoint(v=tf.Variable([1.0, 2.0])).save(f"{folder}/ckpt")
    with two.scope():
        v = tf.Variable([0.0, 0.0])
    tf.train.Checkpoint(v=v).restore(path)
    return two.experimental_local_results(two.run(lambda: v.read_value() + 0))


@fact
def a_model_and_its_optimizer_go_on(tf, folder):
    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)

    def made():
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.set_weights([np.array([[0.5], [-0.5]]), np.zeros(1)])
        model.compile(tf.keras.optimizers.Adam(0.1), "mse")
        return model

    trained = made()
    trained.fit(x, y, epochs=2, batch_size=4, shuffle=False, verbose=0)
    path = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).save(f"{folder}/ckpt")
    resumed = made()
    tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(path)
    resumed.fit(x, y, epochs=2, batch_size=4, shuffle=False, verbose=0)
    trained.fit(x, y, epochs=2, batch_size=4, shuffle=False, verbose=0)
    same = all(
        np.allclose(a, b, atol=1e-6)
        for a, b in zip(trained.get_weights(), resumed.get_weights(), strict=True)
    )
    return [same, resumed.get_weights()]


@fact
def variables_of_a_checkpoint_are_listed(tf, folder):
    path = tf.train.Checkpoint(v=tf.Variable([[1.0, 2.0]])).save(f"{folder}/ckpt")
    names_and_shapes = tf.train.list_variables(path)
    return sorted(shape for name, shape in names_and_shapes if not name.startswith("_"))
