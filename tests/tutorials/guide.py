"""What the guide "Distributed training with TensorFlow" shows: strategies, fit, and a loop."""

import numpy as np

import unison.tf as tf

# -- strategies ----------------------------------------------------------------------------

mirrored_strategy = tf.distribute.MirroredStrategy()
print("replicas:", mirrored_strategy.num_replicas_in_sync)

of_chosen_devices = tf.distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
with_chosen_collectives = tf.distribute.MirroredStrategy(
    cross_device_ops=tf.distribute.HierarchicalCopyAllReduce()
)
on_one_device = tf.distribute.OneDeviceStrategy(device="/cpu:0")

default_strategy = tf.distribute.get_strategy()
print("nothing to reduce:", default_strategy.reduce("SUM", 1.0, axis=None))

strategy = (
    tf.distribute.MirroredStrategy()
    if tf.config.list_physical_devices("GPU")
    else tf.distribute.get_strategy()
)
with strategy.scope():
    print(tf.Variable(1.0))

# -- fit -----------------------------------------------------------------------------------

with mirrored_strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(
                1, input_shape=(1,), kernel_regularizer=tf.keras.regularizers.L2(1e-4)
            )
        ]
    )
    model.compile(loss="mse", optimizer="sgd")

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(10)
model.fit(dataset, epochs=2, verbose=0)
print("loss of a dataset:", model.evaluate(dataset, verbose=0))

inputs, targets = np.ones((100, 1)), np.ones((100, 1))
model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)
print("loss of arrays:", model.evaluate(inputs, targets, verbose=0))

BATCH_SIZE_PER_REPLICA = 5
global_batch_size = BATCH_SIZE_PER_REPLICA * mirrored_strategy.num_replicas_in_sync
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
learning_rate = {5: 0.1, 10: 0.15, 20: 0.175}[global_batch_size]

# -- a loop of one's own -------------------------------------------------------------------

with mirrored_strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(
                1, input_shape=(1,), kernel_regularizer=tf.keras.regularizers.L2(1e-4)
            )
        ]
    )
    optimizer = tf.keras.optimizers.SGD(learning_rate)
    loss_object = tf.keras.losses.BinaryCrossentropy(
        from_logits=True, reduction=tf.keras.losses.Reduction.NONE
    )

dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)


def compute_loss(labels, predictions, model_losses):
    per_example_loss = loss_object(labels, predictions)
    loss = tf.nn.compute_average_loss(per_example_loss)
    if model_losses:
        loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
    return loss


def train_step(inputs):
    features, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@tf.function
def distributed_train_step(dist_inputs):
    per_replica_losses = mirrored_strategy.run(train_step, args=(dist_inputs,))
    return mirrored_strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)


losses = [float(distributed_train_step(dist_inputs)) for dist_inputs in dist_dataset]

iterator = iter(dist_dataset)
for _ in range(10):
    losses.append(float(distributed_train_step(next(iterator))))
print("steps:", len(losses))
print("first and last loss:", losses[0], losses[-1])
