"""What the tutorial on parameter servers says of a coordinator that fails: it is started again.

The first start ends after some epochs, as if it had failed; the next one restores what the first
has saved, and continues with the epoch that is due.
"""

import socket
import sys

import unison.tf as tf

folder, last_epoch = sys.argv[1], int(sys.argv[2])
NUM_EPOCHS = 3
STEPS_PER_EPOCH = 5


def free_ports(count):
    listening = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in listening]
    for each in listening:
        each.close()
    return ports


ports = free_ports(3)
cluster_spec = tf.train.ClusterSpec(
    {
        "worker": [f"localhost:{port}" for port in ports[:2]],
        "ps": [f"localhost:{port}" for port in ports[2:]],
    }
)
for index in range(2):
    tf.distribute.Server(cluster_spec, job_name="worker", task_index=index, protocol="grpc")
tf.distribute.Server(cluster_spec, job_name="ps", task_index=0, protocol="grpc")
strategy = tf.distribute.ParameterServerStrategy(
    tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")
)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.05)
    optimizer.build(model.trainable_variables)


def dataset_fn(_):
    x = tf.random.uniform((64, 4))
    y = tf.reduce_sum(x, axis=1, keepdims=True)
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).repeat().batch(16)


@tf.function
def step_fn(iterator):
    def replica_fn(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    x, y = next(iterator)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_fn, (x, y)), axis=None)


per_worker_iterator = iter(
    coordinator.create_per_worker_dataset(
        lambda: strategy.distribute_datasets_from_function(dataset_fn)
    )
)

checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=NUM_EPOCHS)
if manager.latest_checkpoint:
    checkpoint.restore(manager.latest_checkpoint)

starting_epoch = int(optimizer.iterations.numpy()) // STEPS_PER_EPOCH
print("begins with epoch", starting_epoch)
for epoch in range(starting_epoch, NUM_EPOCHS):
    if epoch == last_epoch:
        print("fails before epoch", epoch)
        break
    for _ in range(STEPS_PER_EPOCH):
        result = coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()
    manager.save(checkpoint_number=epoch + 1)
    print("epoch %d, loss: %f" % (epoch, result.fetch()))
