"""The tutorial "Distributed training with Keras" as it was written before Keras 3.

Checkpoints have no extension and are found by `tf.train.latest_checkpoint`, a model is saved as a
directory with `save_format`, and the learning rate is `optimizer.lr`.
"""

import os
import sys

import sample

import unison.tf as tf

folder = sys.argv[1]
strategy = tf.distribute.MirroredStrategy()
(train_images, train_labels), (test_images, test_labels) = sample.load_data()
BATCH_SIZE = 16 * strategy.num_replicas_in_sync


def scale(image, label):
    return tf.cast(image, tf.float32) / 255, label


train_dataset = tf.data.Dataset.from_tensor_slices((train_images[..., None], train_labels))
train_dataset = train_dataset.map(scale).cache().shuffle(10000).batch(BATCH_SIZE)
eval_dataset = tf.data.Dataset.from_tensor_slices((test_images[..., None], test_labels))
eval_dataset = eval_dataset.map(scale).batch(BATCH_SIZE)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Flatten(input_shape=(28, 28, 1)),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(),
        metrics=["accuracy"],
    )

checkpoint_dir = os.path.join(folder, "training_checkpoints")
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}")


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"Learning rate for epoch {epoch + 1} is {model.optimizer.lr.numpy():.4f}")


callbacks = [
    tf.keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    tf.keras.callbacks.LearningRateScheduler(lambda epoch: 1e-3 if epoch < 1 else 1e-4),
    PrintLR(),
]
model.fit(train_dataset, epochs=2, callbacks=callbacks, verbose=0)

model.load_weights(tf.train.latest_checkpoint(checkpoint_dir))
eval_loss, eval_acc = model.evaluate(eval_dataset, verbose=0)
print(f"Eval accuracy: {eval_acc}")

path = os.path.join(folder, "saved_model/")
model.save(path, save_format="tf")
print("saved as a directory:", os.path.isdir(path))

unreplicated_model = tf.keras.models.load_model(path)
unreplicated_model.compile(
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=tf.keras.optimizers.Adam(),
    metrics=["accuracy"],
)
eval_loss, eval_acc = unreplicated_model.evaluate(eval_dataset, verbose=0)
print(f"Eval accuracy without a strategy: {eval_acc}")

with strategy.scope():
    replicated_model = tf.keras.models.load_model(path)
    replicated_model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(),
        metrics=["accuracy"],
    )
    eval_loss, eval_acc = replicated_model.evaluate(eval_dataset, verbose=0)
    print(f"Eval accuracy with a strategy: {eval_acc}")
