"""What the tutorial "Parameter server training with ParameterServerStrategy" shows.

The cluster of the tutorial, three workers and two parameter servers, is started on this machine.
"""

import multiprocessing
import os
import random
import sys

import unison.tf as tf

folder = sys.argv[1]
NUM_WORKERS = 3
NUM_PS = 2

cluster_spec = tf.train.ClusterSpec(
    {
        "worker": [f"localhost:{port}" for port in range(23450, 23450 + NUM_WORKERS)],
        "ps": [f"localhost:{port}" for port in range(23460, 23460 + NUM_PS)],
    }
)
worker_config = tf.compat.v1.ConfigProto()
if multiprocessing.cpu_count() < NUM_WORKERS + 1:
    worker_config.inter_op_parallelism_threads = NUM_WORKERS + 1
for i in range(NUM_WORKERS):
    tf.distribute.Server(
        cluster_spec, job_name="worker", task_index=i, config=worker_config, protocol="grpc"
    )
for i in range(NUM_PS):
    tf.distribute.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")
cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    cluster_spec, rpc_layer="grpc"
)

variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(256 << 10), max_shards=NUM_PS
)
strategy = tf.distribute.ParameterServerStrategy(
    cluster_resolver, variable_partitioner=variable_partitioner
)

# -- fit -----------------------------------------------------------------------------------

global_batch_size = 64
x = tf.random.uniform((10, 10))
# (10,) in the tutorial: a loss of Keras 3 takes targets that fit the predictions.
y = tf.random.uniform((10, 1))
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat()
dataset = dataset.batch(global_batch_size).prefetch(2)

with strategy.scope():
    model = tf.keras.models.Sequential([tf.keras.layers.Dense(10)])
    model.compile(tf.keras.optimizers.legacy.SGD(), loss="mse", steps_per_execution=10)

callbacks = [
    tf.keras.callbacks.ModelCheckpoint(filepath=os.path.join(folder, "ckpt.keras")),
    tf.keras.callbacks.BackupAndRestore(backup_dir=os.path.join(folder, "backup")),
]
model.fit(dataset, epochs=2, steps_per_epoch=20, callbacks=callbacks, verbose=0)

# -- a loop of one's own -------------------------------------------------------------------

feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]

with strategy.scope():
    feature_lookup_layer = tf.keras.layers.StringLookup(vocabulary=feature_vocab, mask_token=None)
    label_lookup_layer = tf.keras.layers.StringLookup(
        vocabulary=label_vocab, num_oov_indices=0, mask_token=None
    )
    raw_feature_input = tf.keras.layers.Input(shape=(3,), dtype=tf.string, name="feature")
    feature_preprocess_stage = tf.keras.Model(
        {"features": raw_feature_input}, feature_lookup_layer(raw_feature_input)
    )
    raw_label_input = tf.keras.layers.Input(shape=(1,), dtype=tf.string, name="label")
    label_preprocess_stage = tf.keras.Model(
        {"label": raw_label_input}, label_lookup_layer(raw_label_input)
    )


def feature_and_label_gen(num_examples=200):
    examples = {"features": [], "label": []}
    for _ in range(num_examples):
        features = random.sample(feature_vocab, 3)
        label = ["yes"] if "avenger" in features else ["no"]
        examples["features"].append(features)
        examples["label"].append(label)
    return examples


examples = feature_and_label_gen()


def preprocessed(raw_dataset):
    return raw_dataset.map(
        lambda x: (
            {"features": feature_preprocess_stage(x["features"])},
            label_preprocess_stage(x["label"]),
        )
    )


def dataset_fn(_):
    raw_dataset = tf.data.Dataset.from_tensor_slices(examples)
    return preprocessed(raw_dataset).shuffle(200).batch(32).repeat()


with strategy.scope():
    model_input = tf.keras.layers.Input(shape=(3,), dtype=tf.int64, name="model_input")
    emb_layer = tf.keras.layers.Embedding(
        input_dim=len(feature_lookup_layer.get_vocabulary()), output_dim=16384
    )
    # The tutorial has tf.reduce_mean here, which Keras 3 takes on tensors only.
    emb_output = tf.keras.ops.mean(emb_layer(model_input), axis=1)
    dense_output = tf.keras.layers.Dense(units=1, activation="sigmoid")(emb_output)
    model = tf.keras.Model({"features": model_input}, dense_output)
    # The tutorial has 0.1: where a sigmoid is saturated, Keras 3's loss has no gradient.
    optimizer = tf.keras.optimizers.legacy.RMSprop(learning_rate=0.001)
    accuracy = tf.keras.metrics.Accuracy()

print("shards:", len(emb_layer.weights), [tuple(shard.shape) for shard in emb_layer.weights])


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            per_example_loss = tf.keras.losses.BinaryCrossentropy(
                reduction=tf.keras.losses.Reduction.NONE
            )(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

num_epochs = 4
steps_per_epoch = 5
for i in range(num_epochs):
    accuracy.reset_states()
    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()
    print("Finished epoch %d, accuracy is %f." % (i, accuracy.result().numpy()))

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
print("Final loss is %f" % loss.fetch())

# -- evaluation ----------------------------------------------------------------------------

eval_dataset = preprocessed(
    tf.data.Dataset.from_tensor_slices(feature_and_label_gen(num_examples=16))
).batch(8)
eval_accuracy = tf.keras.metrics.Accuracy()
for batch_data, labels in eval_dataset:
    pred = model(batch_data, training=False)
    eval_accuracy.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int64))
print("Evaluation accuracy: %f" % eval_accuracy.result())

with strategy.scope():
    eval_accuracy = tf.keras.metrics.Accuracy()


@tf.function
def eval_step(iterator):
    def replica_fn(batch_data, labels):
        pred = model(batch_data, training=False)
        eval_accuracy.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int64))

    batch_data, labels = next(iterator)
    strategy.run(replica_fn, args=(batch_data, labels))


def eval_dataset_fn():
    examples = tf.data.Dataset.from_tensor_slices(feature_and_label_gen(num_examples=16))
    return preprocessed(examples).shuffle(16).repeat().batch(8)


per_worker_eval_dataset = coordinator.create_per_worker_dataset(eval_dataset_fn)
per_worker_eval_iterator = iter(per_worker_eval_dataset)
for _ in range(2):
    coordinator.schedule(eval_step, args=(per_worker_eval_iterator,))
coordinator.join()
print("Distributed evaluation accuracy: %f" % eval_accuracy.result())
