"""Ragged batches on several replicas: each gets its rows, and results are those of one device."""

import numpy as np
import pytest

import unison.tf as tf

ROWS = [[3, 1], [], [4], [1, 5, 9], [2, 6], [5], [3, 5, 8, 9, 7]]
NESTED = [[[1], [2, 3]], [], [[4, 5, 6], []], [[7]], [[], [8]]]


def strategy_of(replicas):
    return (
        tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
        if replicas > 1
        else tf.distribute.OneDeviceStrategy("CPU:0")
    )


def distributed(strategy, size, lists=ROWS):
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.ragged.constant(lists), np.arange(len(lists), dtype=np.float32))
    )
    return strategy.experimental_distribute_dataset(dataset.batch(size))


def rows_of(strategy, batch):
    return [part.to_list() for part in strategy.experimental_local_results(batch)]


def test_each_replica_gets_its_rows():
    strategy = strategy_of(2)
    batches = [rows_of(strategy, x) for x, _ in distributed(strategy, 4)]
    assert batches == [[ROWS[:2], ROWS[2:4]], [ROWS[4:6], ROWS[6:]]]


def test_a_replica_without_rows_gets_an_empty_ragged_tensor():
    strategy = strategy_of(4)
    batches = [rows_of(strategy, x) for x, _ in distributed(strategy, 4, ROWS[:5])]
    assert batches[1] == [[ROWS[4]], [], [], []]


def test_nested_rows_are_divided():
    strategy = strategy_of(2)
    batches = [rows_of(strategy, x) for x, _ in distributed(strategy, 3, NESTED)]
    assert batches == [[NESTED[:2], NESTED[2:3]], [NESTED[3:4], NESTED[4:]]]


def test_the_spec_of_a_distributed_batch_has_one_of_every_replica():
    spec, _ = distributed(strategy_of(2), 4).element_spec
    of_replica = tf.RaggedTensorSpec([None, None], tf.int32)
    assert spec.value_specs == (of_replica, of_replica)


def trained(replicas, lists, size):
    """The losses, row sums and table of an embedding that is trained on ragged batches."""
    strategy = strategy_of(replicas)
    with strategy.scope():
        table = tf.Variable(
            np.linspace(-1, 1, 30).reshape(10, 3).astype(np.float32),
            aggregation=tf.VariableAggregation.SUM,
        )

    def step(x, y):
        with tf.GradientTape() as tape:
            embedded = tf.nn.embedding_lookup(table, x)
            while embedded.ragged_rank > 1:
                embedded = tf.reduce_sum(embedded, axis=2)
            pooled = tf.reduce_sum(embedded, axis=1)
            weights = tf.nn.softmax(tf.cast(x, tf.float32))
            loss = tf.reduce_sum(pooled * y[:, tf.newaxis]) + tf.reduce_sum(weights * weights)
        gradient = tape.gradient(loss, table)
        context = tf.distribute.get_replica_context()
        table.assign_sub(0.01 * context.all_reduce("sum", gradient) / replicas)
        return loss, tf.reduce_sum(x), tf.size(x), 2 * x

    losses, values, doubled = [], [], []
    for batch in distributed(strategy, size, lists):
        loss, total, count, twice = strategy.run(step, args=batch)
        losses.append(float(strategy.reduce("SUM", loss, axis=None)))
        values.append([int(strategy.reduce("SUM", value, axis=None)) for value in (total, count)])
        for part in strategy.experimental_local_results(twice):
            doubled += part.to_list()
    return losses, values, doubled, np.asarray(table)


@pytest.mark.parametrize("lists", [ROWS, NESTED], ids=["rows", "nested rows"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_training_on_replicas_is_training_on_one_device(replicas, lists):
    losses, values, doubled, table = trained(replicas, lists, 4)
    expected = trained(1, lists, 4)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    assert (values, doubled) == expected[1:3]
    np.testing.assert_allclose(table, expected[3], rtol=1e-5, atol=1e-6)


def test_batches_of_similar_sizes_run_the_same_program():
    strategy = strategy_of(2)
    traces = []

    def step(x, _):
        traces.append(x)
        return tf.reduce_sum(x, axis=1)

    lists = [[1] * length for length in (5, 8, 6, 7, 7, 5, 8, 8)]
    for batch in distributed(strategy, 4, lists):
        strategy.run(step, args=batch)
    assert len(traces) == 1


def test_ragged_text_stays_on_the_host():
    strategy = strategy_of(2)
    words = tf.strings.split(["a b", "c", "", "d e f"])
    dataset = tf.data.Dataset.from_tensor_slices(words).batch(4)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    assert rows_of(strategy, batch) == [[[b"a", b"b"], [b"c"]], [[], [b"d", b"e", b"f"]]]


def test_datasets_of_a_function_give_replicas_batches_in_turn():
    strategy = strategy_of(2)

    def dataset_fn(context):
        return tf.data.Dataset.from_tensor_slices(tf.ragged.constant(ROWS)).batch(3)

    batches = [rows_of(strategy, x) for x in strategy.distribute_datasets_from_function(dataset_fn)]
    assert batches == [[ROWS[:3], ROWS[3:6]], [ROWS[6:], []]]


def test_each_worker_off_the_shards_gets_batches_of_its_rows():
    strategy = strategy_of(2)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(ROWS)).batch(4)
    batches = strategy.experimental_distribute_dataset(dataset.with_options(options))
    found = [row for batch in batches for part in rows_of(strategy, batch) for row in part]
    assert found == ROWS


def test_a_ragged_tensor_of_every_replica_is_an_argument():
    strategy = strategy_of(2)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group
    )
    x = tf.ragged.constant([[1], [2, 3]])
    results = strategy.run(lambda x, index: tf.reduce_sum(x + index, axis=1), args=(x, values))
    parts = strategy.experimental_local_results(results)
    assert [part.tolist() for part in parts] == [[1, 5], [2, 7]]


@pytest.mark.parametrize("how", ["reduce", "gather", "all_reduce", "all_gather"])
def test_a_ragged_tensor_is_not_combined_over_replicas(how):
    strategy = strategy_of(2)
    x, _ = next(iter(distributed(strategy, 4)))

    def combine(x):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", x) if how == "all_reduce" else context.all_gather(x, 0)

    actions = {
        "reduce": lambda: strategy.reduce("SUM", x, axis=None),
        "gather": lambda: strategy.gather(x, axis=0),
    }
    action = actions.get(how, lambda: strategy.run(combine, args=(x,)))
    with pytest.raises(TypeError, match="experimental_local_results"):
        action()


def test_a_compiled_loop_around_a_strategy_takes_ragged_batches():
    strategy = strategy_of(2)

    @tf.function
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(x,)), axis=None)

    totals = [int(step(*batch)) for batch in distributed(strategy, 4)]
    assert totals == [sum(map(sum, ROWS[:4])), sum(map(sum, ROWS[4:]))]


def test_values_with_padding_are_refused_in_replicas():
    strategy = strategy_of(2)
    ((x, _), *_) = distributed(strategy, 4)
    for name in ("values", "flat_values"):
        with pytest.raises(ValueError, match=r"end with padding.*map_flat_values"):
            strategy.run(lambda x, name=name: tf.reduce_sum(getattr(x, name)), args=(x,))
    doubled = strategy.run(lambda x: tf.ragged.map_flat_values(lambda v: 2 * v, x), args=(x,))
    assert rows_of(strategy, doubled)[0] == [[6, 2], []]
