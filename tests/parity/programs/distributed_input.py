"""How a dataset is divided among replicas, and how it is iterated over."""

from __future__ import annotations

import numpy as np

from parity.facts import attempt, fact


def batches(strategy, distributed):
    """Every step's batches, one per replica."""
    return [strategy.experimental_local_results(batch) for batch in distributed]


def numbered(tf, examples, batch, **options):
    return tf.data.Dataset.range(examples).batch(batch, **options)


def split(examples, batch, replicas, **options):
    strategy_name = {1: "one", 2: "two", 4: "four"}[replicas]

    def on(tf, strategy):
        dataset = numbered(tf, examples, batch, **options)
        return batches(strategy, strategy.experimental_distribute_dataset(dataset))

    programs = {
        "one": lambda tf, one: on(tf, one),
        "two": lambda tf, two: on(tf, two),
        "four": lambda tf, four: on(tf, four),
    }
    without = "_without_the_rest" if options.get("drop_remainder") else ""
    fact(
        programs[strategy_name],
        name=f"{examples}_examples_by_{batch}_on_{replicas}_replicas{without}",
    )


for _examples, _batch, _replicas in (
    (8, 4, 1),
    (8, 4, 2),
    (6, 4, 2),
    (5, 4, 2),
    (9, 4, 2),
    (7, 3, 2),
    (9, 9, 4),
    (6, 6, 4),
    (5, 5, 4),
    (3, 3, 4),
    (1, 4, 4),
    (10, 8, 4),
    (9, 8, 4),
):
    split(_examples, _batch, _replicas)
split(6, 4, 2, drop_remainder=True)
split(10, 8, 4, drop_remainder=True)


@fact
def with_auto_sharding_off_the_last_batch_is_cut_at_the_full_size(tf, two):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = numbered(tf, 6, 4).with_options(options)
    return batches(two, two.experimental_distribute_dataset(dataset))


@fact
def with_sharding_by_data_one_worker_gets_everything(tf, two):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = numbered(tf, 6, 4).with_options(options)
    return batches(two, two.experimental_distribute_dataset(dataset))


@fact
def datasets_from_a_function_give_each_replica_its_own_batch(tf, two):
    distributed = two.distribute_datasets_from_function(lambda context: numbered(tf, 18, 4))
    return batches(two, distributed)


@fact
def the_function_is_told_how_to_divide_the_input(tf, four):
    told = []

    def dataset_fn(context):
        told.append(
            [
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.num_replicas_in_sync,
                context.get_per_replica_batch_size(8),
                attempt(lambda: context.get_per_replica_batch_size(9)),
            ]
        )
        return numbered(tf, 8, 2)

    four.distribute_datasets_from_function(dataset_fn)
    return told


@fact
def an_input_context_can_be_made_by_hand(tf):
    context = tf.distribute.InputContext(
        num_input_pipelines=3, input_pipeline_id=1, num_replicas_in_sync=6
    )
    return [
        context.num_input_pipelines,
        context.input_pipeline_id,
        context.num_replicas_in_sync,
        context.get_per_replica_batch_size(12),
    ]


@fact
def a_dictionary_of_pairs_is_divided_leaf_by_leaf(tf, two):
    dataset = tf.data.Dataset.from_tensor_slices(
        {"x": np.arange(6.0).reshape(3, 2), "y": (np.arange(3), np.arange(3) % 2 == 0)}
    ).batch(3)
    (batch,) = list(two.experimental_distribute_dataset(dataset))
    return {
        "x": two.experimental_local_results(batch["x"]),
        "y": [two.experimental_local_results(leaf) for leaf in batch["y"]],
        "is a tuple": isinstance(batch["y"], tuple),
    }


@fact
def text_is_divided_too(tf, two):
    dataset = tf.data.Dataset.from_tensor_slices(["a", "b", "c"]).batch(3)
    return batches(two, two.experimental_distribute_dataset(dataset))


@fact
def dtypes_are_kept(tf, two):
    dataset = tf.data.Dataset.from_tensor_slices(
        (np.ones(2, np.float64), np.ones(2, np.int64), np.ones(2, np.uint8), np.ones(2, np.float16))
    ).batch(2)
    (batch,) = list(two.experimental_distribute_dataset(dataset))
    return [two.experimental_local_results(leaf)[0].dtype.name for leaf in batch]


@fact
def an_unbatched_dataset_cannot_be_divided(tf, two):
    return attempt(
        lambda: batches(two, two.experimental_distribute_dataset(tf.data.Dataset.range(4)))
    )


@fact
def a_dataset_is_iterated_over_again(tf, two):
    distributed = two.experimental_distribute_dataset(numbered(tf, 4, 2))
    return [batches(two, distributed), batches(two, distributed)]


@fact
def next_raises_stop_iteration_at_the_end(tf, two):
    iterator = iter(two.experimental_distribute_dataset(numbered(tf, 2, 2)))
    next(iterator)
    return attempt(lambda: next(iterator))


@fact
def get_next_raises_out_of_range_at_the_end(tf, two):
    iterator = iter(two.experimental_distribute_dataset(numbered(tf, 2, 2)))
    first = two.experimental_local_results(iterator.get_next())
    return [first, attempt(lambda: iterator.get_next())]


@fact
def the_end_is_caught_as_tf_errors_out_of_range(tf, two):
    iterator = iter(two.experimental_distribute_dataset(numbered(tf, 6, 4)))
    steps = 0
    try:
        while True:
            iterator.get_next()
            steps += 1
    except tf.errors.OutOfRangeError:
        return steps


@fact
def optionals_say_whether_there_is_more(tf, two):
    iterator = iter(two.experimental_distribute_dataset(numbered(tf, 5, 4)))
    seen = []
    for _ in range(3):
        optional = iterator.get_next_as_optional()
        more = bool(optional.has_value())
        seen.append(two.experimental_local_results(optional.get_value()) if more else None)
    return seen


@fact
def a_loop_with_optionals_in_a_tf_function(tf, two):
    iterator = iter(two.experimental_distribute_dataset(numbered(tf, 9, 4)))
    total = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def run_steps(iterator):
        for _ in tf.range(5):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            sums = two.run(tf.reduce_sum, args=(optional.get_value(),))
            total.assign_add(two.reduce("SUM", sums, axis=None))

    run_steps(iterator)
    return total.read_value()


@fact
def a_for_loop_over_a_distributed_dataset_in_a_tf_function(tf, two):
    distributed = two.experimental_distribute_dataset(numbered(tf, 10, 4))

    @tf.function
    def total(dataset):
        result = tf.constant(0, tf.int64)
        for batch in dataset:
            result += two.reduce("SUM", two.run(tf.reduce_sum, args=(batch,)), axis=None)
        return result

    return total(distributed)


@fact
def next_of_an_iterator_in_a_tf_function(tf, two):
    iterator = iter(two.experimental_distribute_dataset(numbered(tf, 8, 4)))

    @tf.function
    def step(iterator):
        return two.reduce("SUM", two.run(tf.reduce_sum, args=(next(iterator),)), axis=None)

    return [step(iterator), step(iterator)]


@fact
def replicas_without_data_run_with_empty_batches(tf, four):
    distributed = four.experimental_distribute_dataset(numbered(tf, 5, 5))

    def count(batch):
        return tf.shape(batch)[0]

    (batch,) = list(distributed)
    return four.experimental_local_results(four.run(count, args=(batch,)))


@fact
def the_cardinality_of_a_distributed_dataset(tf, two):
    distributed = two.experimental_distribute_dataset(numbered(tf, 9, 4))
    return attempt(lambda: int(distributed.cardinality))


@fact
def one_device_gets_plain_tensors(tf, one):
    distributed = one.experimental_distribute_dataset(numbered(tf, 3, 2))
    return list(distributed)


@fact
def the_default_strategy_gives_the_dataset_back(tf):
    dataset = numbered(tf, 3, 2)
    return tf.distribute.get_strategy().experimental_distribute_dataset(dataset) is dataset


@fact
def the_element_spec_of_two_replicas(tf, two):
    distributed = two.experimental_distribute_dataset(numbered(tf, 8, 4, drop_remainder=True))

    @tf.function(input_signature=[distributed.element_spec])
    def double(batch):
        return two.run(lambda x: 2 * x, args=(batch,))

    return [two.experimental_local_results(double(batch)) for batch in distributed]


@fact
def an_input_signature_takes_an_uneven_batch(tf, two):
    distributed = two.experimental_distribute_dataset(numbered(tf, 5, 4))

    @tf.function(input_signature=[distributed.element_spec])
    def double(batch):
        return two.run(lambda x: 2 * x, args=(batch,))

    return [two.experimental_local_results(double(batch)) for batch in distributed]


@fact
def a_generator_is_distributed(tf, two):
    def examples():
        for i in range(4):
            yield [float(i), 10.0 * i]

    dataset = tf.data.Dataset.from_generator(
        examples, output_types=tf.float32, output_shapes=tf.TensorShape([2])
    ).batch(4)
    return batches(two, two.experimental_distribute_dataset(dataset))


@fact
def predictions_are_put_in_order_by_index(tf, two):
    dataset = tf.data.Dataset.range(100, 106).enumerate().batch(4)
    found = {}
    for index, inputs in two.experimental_distribute_dataset(dataset):
        indices, outputs = two.run(lambda i, x: (i, 2 * x), args=(index, inputs))
        pairs = zip(
            two.experimental_local_results(indices),
            two.experimental_local_results(outputs),
            strict=True,
        )
        for several, values in pairs:
            for i, value in zip(several.numpy(), values.numpy(), strict=True):
                found[int(i)] = int(value)
    return found
