"""What the tutorial "Multi-worker training with Keras" shows, as one of its workers runs it.

Without `TF_CONFIG` there is one worker; with it, as many as it says.
"""

import json
import os
import sys

import numpy as np
import sample

import unison.tf as tf

folder = sys.argv[1]


def mnist_dataset(batch_size):
    (x_train, y_train), _ = sample.load_data()
    x_train = x_train / np.float32(255)
    y_train = y_train.astype(np.int64)
    return (
        tf.data.Dataset.from_tensor_slices((x_train, y_train))
        .shuffle(60000)
        .repeat()
        .batch(batch_size)
    )


def build_and_compile_cnn_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(input_shape=(28, 28)),
            tf.keras.layers.Reshape(target_shape=(28, 28, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


tf_config = json.loads(os.environ.get("TF_CONFIG", "{}"))
num_workers = len(tf_config.get("cluster", {}).get("worker", ["this one"]))

strategy = tf.distribute.MultiWorkerMirroredStrategy()

per_worker_batch_size = 32
single_worker_dataset = mnist_dataset(per_worker_batch_size)
global_batch_size = per_worker_batch_size * num_workers
multi_worker_dataset = mnist_dataset(global_batch_size)

with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=20, verbose=0)
print("accuracy:", history.history["accuracy"][-1])

options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
dataset_no_auto_shard = multi_worker_dataset.with_options(options)

# -- saving --------------------------------------------------------------------------------

model_path = os.path.join(folder, "keras-model.keras")


def _is_chief(task_type, task_id):
    return (task_type == "worker" and task_id == 0) or task_type is None


def _get_temp_dir(dirpath, task_id):
    temp_dir = os.path.join(dirpath, f"workertemp_{task_id}")
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id):
    dirpath, base = os.path.dirname(filepath), os.path.basename(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
write_model_path = write_filepath(model_path, task_type, task_id)
multi_worker_model.save(write_model_path)
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))

loaded_model = tf.keras.models.load_model(model_path)
history = loaded_model.fit(single_worker_dataset, epochs=1, steps_per_epoch=20, verbose=0)
print("accuracy of the loaded model:", history.history["accuracy"][-1])

# -- checkpoints ---------------------------------------------------------------------------

checkpoint_dir = os.path.join(folder, "ckpt")
checkpoint = tf.train.Checkpoint(model=multi_worker_model)
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id)
checkpoint_manager = tf.train.CheckpointManager(
    checkpoint, directory=write_checkpoint_dir, max_to_keep=1
)
checkpoint_manager.save()
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(write_checkpoint_dir)

latest_checkpoint = tf.train.latest_checkpoint(checkpoint_dir)
checkpoint.restore(latest_checkpoint)
history = multi_worker_model.fit(multi_worker_dataset, epochs=1, steps_per_epoch=20, verbose=0)
print("accuracy after restoring:", history.history["accuracy"][-1])

callbacks = [tf.keras.callbacks.BackupAndRestore(backup_dir=os.path.join(folder, "backup"))]
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
history = multi_worker_model.fit(
    multi_worker_dataset, epochs=3, steps_per_epoch=20, callbacks=callbacks, verbose=0
)
print("accuracy with backups:", history.history["accuracy"][-1])
