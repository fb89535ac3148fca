"""What the tutorial "Distributed input" shows."""

import numpy as np

import unison.tf as tf

N_VIRTUAL_DEVICES = 2
physical_devices = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    physical_devices[0],
    [tf.config.LogicalDeviceConfiguration() for _ in range(N_VIRTUAL_DEVICES)],
)
print("Available devices:", len(tf.config.list_logical_devices()))

# -- one device ----------------------------------------------------------------------------

global_batch_size = 16
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)


@tf.function
def train_step(inputs):
    features, labels = inputs
    return labels - 0.3 * features


sizes = [len(train_step(inputs)) for inputs in dataset]
print("batches:", sizes)

# -- experimental_distribute_dataset -------------------------------------------------------

mirrored_strategy = tf.distribute.MirroredStrategy()
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
print(next(iter(dist_dataset)))

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = dataset.with_options(options)

# -- distribute_datasets_from_function -----------------------------------------------------


def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    dataset = dataset.batch(batch_size)
    return dataset.prefetch(2)


from_function = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
features, labels = next(iter(from_function))
print("from a function:", mirrored_strategy.experimental_local_results(features)[0].shape)

# -- iterators -----------------------------------------------------------------------------

for x in dist_dataset:
    loss = mirrored_strategy.run(train_step, args=(x,))
print("Loss is", loss)

num_epochs = 3
steps_per_epoch = 3
for _ in range(num_epochs):
    dist_iterator = iter(dist_dataset)
    for _ in range(steps_per_epoch):
        loss = mirrored_strategy.run(train_step, args=(next(dist_iterator),))
        loss = mirrored_strategy.run(train_step, args=(dist_iterator.get_next(),))

global_batch_size = 4
steps_per_loop = 5
strategy = tf.distribute.MirroredStrategy()
dataset = tf.data.Dataset.range(9).batch(global_batch_size)
distributed_iterator = iter(strategy.experimental_distribute_dataset(dataset))
steps_with_data = tf.Variable(0)


@tf.function
def train_fn(distributed_iterator):
    for _ in tf.range(steps_per_loop):
        optional_data = distributed_iterator.get_next_as_optional()
        if not optional_data.has_value():
            break
        per_replica_results = strategy.run(lambda x: x, args=(optional_data.get_value(),))
        tf.print(strategy.experimental_local_results(per_replica_results))
        steps_with_data.assign_add(1)


train_fn(distributed_iterator)
print("steps with data:", int(steps_with_data))

# -- element_spec --------------------------------------------------------------------------

global_batch_size = 16
mirrored_strategy = tf.distribute.MirroredStrategy()
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)


@tf.function(input_signature=[dist_dataset.element_spec])
def signed_train_step(per_replica_inputs):
    def step_fn(inputs):
        return tf.nest.map_structure(lambda x: 2 * x, inputs)

    return mirrored_strategy.run(step_fn, args=(per_replica_inputs,))


for _ in range(2):
    iterator = iter(dist_dataset)
    for _ in range(7):
        output = signed_train_step(next(iterator))
print("twice one:", float(mirrored_strategy.experimental_local_results(output[0])[0][0, 0]))

# -- preprocessing -------------------------------------------------------------------------

with strategy.scope():
    layer = tf.keras.layers.StringLookup(vocabulary=["a", "b", "c", "d", "f"])


def words(input_context):
    dataset = tf.data.Dataset.from_tensor_slices(["a", "c", "e"]).repeat()
    batch_size = input_context.get_per_replica_batch_size(4)
    dataset = dataset.batch(batch_size)
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    def preprocess_with_kpl(input):
        return layer(input)

    return dataset.map(preprocess_with_kpl)


distributed_dataset_iterator = iter(strategy.distribute_datasets_from_function(words))
for _ in range(3):
    looked_up = strategy.experimental_local_results(next(distributed_dataset_iterator))
    print("looked up:", [number.numpy().tolist() for number in looked_up])

# -- order ---------------------------------------------------------------------------------

dataset = tf.data.Dataset.range(24).enumerate().batch(6)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)


def predict(index, inputs):
    return index, 2 * inputs


result = {}
for index, inputs in dist_dataset:
    output_index, outputs = mirrored_strategy.run(predict, args=(index, inputs))
    rindices = []
    for a in mirrored_strategy.experimental_local_results(output_index):
        rindices.extend(a.numpy())
    routputs = []
    for a in mirrored_strategy.experimental_local_results(outputs):
        routputs.extend(a.numpy())
    for i, value in zip(rindices, routputs, strict=True):
        result[i] = value
print("in order:", result == {i: 2 * i for i in range(24)})

# -- without a dataset ---------------------------------------------------------------------


def value_fn(ctx):
    return tf.constant(ctx.replica_id_in_sync_group)


distributed_values = mirrored_strategy.experimental_distribute_values_from_function(value_fn)
for _ in range(2):
    result = mirrored_strategy.run(lambda x: x, args=(distributed_values,))
print("values:", [int(x) for x in mirrored_strategy.experimental_local_results(result)])


def input_gen():
    while True:
        yield np.random.rand(4)


dataset = tf.data.Dataset.from_generator(
    input_gen, output_types=(tf.float32), output_shapes=tf.TensorShape([4])
)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
iterator = iter(dist_dataset)
for _ in range(4):
    result = mirrored_strategy.run(lambda x: x, args=(next(iterator),))
print("from a generator:", [x.shape for x in mirrored_strategy.experimental_local_results(result)])
