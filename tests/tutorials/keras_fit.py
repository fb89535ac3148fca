"""What the tutorial "Distributed training with Keras" shows."""

import os
import sys

import sample

import unison.tf as tf

folder = sys.argv[1]
strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

(train_images, train_labels), (test_images, test_labels) = sample.load_data()
BUFFER_SIZE = 10000
BATCH_SIZE_PER_REPLICA = 16
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def scale(image, label):
    image = tf.cast(image, tf.float32)
    image /= 255
    return image, label


mnist_train = tf.data.Dataset.from_tensor_slices((train_images[..., None], train_labels))
mnist_test = tf.data.Dataset.from_tensor_slices((test_images[..., None], test_labels))
train_dataset = mnist_train.map(scale).cache().shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
eval_dataset = mnist_test.map(scale).batch(BATCH_SIZE)


def compiled(model):
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(learning_rate=0.001),
        metrics=["accuracy"],
    )
    return model


with strategy.scope():
    model = compiled(
        tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(8, 3, activation="relu", input_shape=(28, 28, 1)),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(10),
            ]
        )
    )

checkpoint_dir = os.path.join(folder, "training_checkpoints")
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}.weights.h5")


def decay(epoch):
    if epoch < 1:
        return 1e-3
    elif epoch < 2:
        return 5e-4
    else:
        return 1e-4


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = model.optimizer.learning_rate.numpy()
        print(f"Learning rate for epoch {epoch + 1} is {rate:.4f}")


callbacks = [
    tf.keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    tf.keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]
model.fit(train_dataset, epochs=3, callbacks=callbacks, verbose=0)
print("checkpoints:", *sorted(os.listdir(checkpoint_dir)))

model.load_weights(os.path.join(checkpoint_dir, "ckpt_3.weights.h5"))
eval_loss, eval_acc = model.evaluate(eval_dataset, verbose=0)
print(f"Eval accuracy: {eval_acc}")

path = os.path.join(folder, "my_model.keras")
model.save(path)

unreplicated_model = compiled(tf.keras.models.load_model(path))
eval_loss, eval_acc = unreplicated_model.evaluate(eval_dataset, verbose=0)
print(f"Eval accuracy without a strategy: {eval_acc}")

with strategy.scope():
    replicated_model = compiled(tf.keras.models.load_model(path))
    eval_loss, eval_acc = replicated_model.evaluate(eval_dataset, verbose=0)
    print(f"Eval accuracy with a strategy: {eval_acc}")
