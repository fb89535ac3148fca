"""`strategy.experimental_distribute_dataset` and its kin: how batches reach the replicas.

What TensorFlow answers is in the facts about `tf.data`.
"""

import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison
from unison.data import (
    AutoShardPolicy,
    Dataset,
    InputOptions,
    InputReplicationMode,
    Options,
)


@pytest.fixture
def strategy():
    return unison.MirroredStrategy()  # the four devices of conftest.py


def chunks_of(examples: int, replicas: int) -> list[list[int]]:
    strategy = unison.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    (batch,) = strategy.experimental_distribute_dataset([np.arange(examples)])
    return [component.tolist() for component in batch.values]


@pytest.mark.parametrize(
    ("examples", "replicas", "chunks"),
    [
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (9, 4, [[0, 1, 2], [3, 4, 5], [6, 7, 8], []]),
        (6, 4, [[0, 1], [2, 3], [4, 5], []]),
        (4, 3, [[0, 1], [2, 3], []]),
        (1, 2, [[0], []]),
        (0, 2, [[], []]),
    ],
)
def test_a_batch_is_cut_into_contiguous_chunks_as_tensorflow_cuts_it(examples, replicas, chunks):
    assert chunks_of(examples, replicas) == chunks


def test_the_arrays_of_a_batch_keep_their_structure(strategy):
    batch = {"image": np.zeros((8, 3)), "label": (np.zeros(8, "int32"), None)}
    (divided,) = strategy.experimental_distribute_dataset([batch])
    assert divided["image"].values[3].shape == (2, 3)
    assert divided["label"][0].values[3].shape == (2,)
    assert divided["label"][1] is None


def test_even_chunks_lie_on_the_devices_of_their_replicas(strategy):
    (batch,) = strategy.experimental_distribute_dataset([jnp.arange(8)])
    devices = [component.devices() for component in batch.components]
    assert devices == [{device} for device in strategy.placement.devices]


@pytest.mark.parametrize("examples", [8, 9])
def test_every_example_is_counted_once(strategy, examples):
    def count(batch):
        ones = jnp.ones_like(batch)
        return unison.get_replica_context().all_reduce("SUM", (jnp.sum(ones), jnp.sum(batch)))

    (batch,) = strategy.experimental_distribute_dataset([np.arange(examples, dtype="float32")])
    counted, total = strategy.run(count, args=(batch,))
    assert float(counted.values[0]) == examples
    assert float(total.values[0]) == sum(range(examples))


def test_one_replica_gets_the_batches_as_they_are():
    batch = np.arange(5)
    strategy = unison.OneDeviceStrategy("CPU:0")
    (received,) = strategy.experimental_distribute_dataset([batch])
    assert received is batch


def test_a_list_of_batches_has_a_length_and_can_be_iterated_again(strategy):
    batches = strategy.experimental_distribute_dataset([np.arange(4), np.arange(2)])
    assert len(batches) == 2
    assert len(list(batches)) == len(list(batches)) == 2


def test_a_generator_has_no_length_and_is_read_as_it_is_used(strategy):
    drawn = []

    def batches():
        for number in range(3):
            drawn.append(number)
            yield np.full(4, number)

    distributed = strategy.experimental_distribute_dataset(batches())
    with pytest.raises(TypeError, match="has no len"):
        len(distributed)
    next(iter(distributed))
    assert drawn == [0]


def test_a_keras_dataset_gives_its_batches(strategy):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.full((4, 2), index), np.full(4, index)

    distributed = strategy.experimental_distribute_dataset(Batches())
    assert len(distributed) == 2
    assert [float(labels.values[3][0]) for _, labels in distributed] == [0.0, 1.0]


def test_arrays_of_different_lengths_are_an_error_that_shows_them(strategy):
    batches = strategy.experimental_distribute_dataset([(np.zeros((4, 2)), np.zeros(3))])
    with pytest.raises(ValueError, match=r"Received shapes: \[\(4, 2\), \(3,\)\]"):
        next(iter(batches))


def test_a_batch_without_an_axis_of_examples_is_an_error(strategy):
    with pytest.raises(ValueError, match="number of examples along their first axis"):
        next(iter(strategy.experimental_distribute_dataset([1.0])))


@pytest.mark.parametrize("source", [np.zeros((4, 2)), {"x": np.zeros(4)}, (np.zeros(4),), 3])
def test_what_is_no_iterable_of_batches_is_refused(strategy, source):
    with pytest.raises(TypeError, match="Expected an iterable of batches"):
        strategy.experimental_distribute_dataset(source)


def test_input_is_distributed_around_the_replicas_only(strategy):
    def inside():
        strategy.experimental_distribute_dataset([np.zeros(4)])

    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(inside)


# -- datasets ------------------------------------------------------------------------------


def values(batches):
    return [[part.tolist() for part in batch.values] for batch in batches]


def test_the_batches_of_a_dataset_are_divided_and_their_number_is_known(strategy):
    distributed = strategy.experimental_distribute_dataset(Dataset.range(10).batch(8))
    assert values(distributed) == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [9], [], []]]
    assert len(distributed) == distributed.cardinality == 2
    assert values(distributed) == values(distributed)


def test_shuffled_batches_come_in_another_order_in_every_pass(strategy):
    dataset = Dataset.range(32).shuffle(32, seed=1).batch(8)
    distributed = strategy.experimental_distribute_dataset(dataset)
    first, second = values(distributed), values(distributed)
    assert first != second
    assert sorted(np.ravel(first).tolist()) == sorted(np.ravel(second).tolist()) == list(range(32))


@pytest.mark.parametrize("examples", [8, 9])
def test_every_part_lies_on_the_device_of_its_replica(strategy, examples):
    dataset = Dataset.range(examples).batch(examples)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    devices = [component.devices() for component in batch.components]
    assert devices == [{device} for device in strategy.placement.devices]


def test_batches_stay_on_the_host_where_that_is_asked_for(strategy):
    options = InputOptions(experimental_fetch_to_device=False)
    (batch,) = strategy.experimental_distribute_dataset(Dataset.range(8).batch(8), options)
    assert all(isinstance(component, np.ndarray) for component in batch.components)


def test_one_replica_gets_the_batches_of_a_dataset_on_its_device():
    strategy = unison.OneDeviceStrategy("CPU:1")
    batches = list(strategy.experimental_distribute_dataset(Dataset.range(3).batch(2)))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2]]
    assert {device for batch in batches for device in batch.devices()} == {jax.devices()[1]}


def test_text_is_divided_too(strategy):
    dataset = Dataset.from_tensor_slices({"text": list("abcde"), "number": np.arange(5)}).batch(5)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    assert [part.tolist() for part in batch["text"].values] == [
        [b"a", b"b"],
        [b"c", b"d"],
        [b"e"],
        [],
    ]


@pytest.mark.parametrize("examples", [8, 9])
def test_every_example_of_a_dataset_is_counted_once(strategy, examples):
    def count(batch):
        ones = jnp.ones_like(batch)
        return unison.get_replica_context().all_reduce("SUM", (jnp.sum(ones), jnp.sum(batch)))

    dataset = Dataset.from_tensor_slices(np.arange(examples, dtype="float32")).batch(5)
    totals = [
        strategy.run(count, args=(batch,))
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    assert sum(float(counted.values[0]) for counted, _ in totals) == examples
    assert sum(float(total.values[0]) for _, total in totals) == sum(range(examples))


def test_batches_are_put_on_the_devices_ahead_of_time_and_no_further_than_asked(strategy):
    drawn = []
    three_are_drawn = threading.Event()

    def rows():
        for number in range(100):
            drawn.append(number)
            if len(drawn) == 3:
                three_are_drawn.set()
            yield np.full(4, number)

    dataset = Dataset.from_generator(rows)
    options = InputOptions(experimental_per_replica_buffer_size=2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset, options))
    assert drawn == []
    next(iterator)
    assert three_are_drawn.wait(5)
    # One is taken, two wait, and one is being made.
    assert len(drawn) <= 4


def test_the_thread_that_fetches_ends_when_the_iterator_is_dropped(strategy):
    before = threading.enumerate()
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(10**6).batch(4)))
    next(iterator)
    (thread,) = [thread for thread in threading.enumerate() if thread not in before]
    del iterator
    thread.join(5)
    assert not thread.is_alive()


def test_an_error_in_the_pipeline_reaches_the_loop(strategy):
    def fail(x):
        raise KeyError("mine")

    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(4).map(fail).batch(4)))
    with pytest.raises(KeyError, match="mine"):
        next(iterator)


def test_a_dataset_of_single_examples_is_an_error_that_shows_them(strategy):
    with pytest.raises(ValueError, match=r"number of examples.*Received shapes: \[\(\)\]"):
        next(iter(strategy.experimental_distribute_dataset(Dataset.range(4))))


def test_a_function_makes_the_batches_that_the_replicas_take_in_turn(strategy):
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return Dataset.range(10).batch(context.get_per_replica_batch_size(8))

    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    assert values(distributed) == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [], [], []]]
    assert len(distributed) == 2
    (context,) = contexts
    assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 4)
    old_name = strategy.experimental_distribute_datasets_from_function
    assert values(old_name(dataset_fn)) == values(distributed)


def test_every_replica_may_have_an_input_pipeline_of_its_own(strategy):
    pipelines = []

    def dataset_fn(context):
        pipelines.append((context.input_pipeline_id, context.num_input_pipelines))
        return (
            Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)
        )

    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    distributed = strategy.distribute_datasets_from_function(dataset_fn, options)
    assert pipelines == [(0, 4), (1, 4), (2, 4), (3, 4)]  # as TensorFlow numbers them
    assert values(distributed) == [[[0, 4], [1, 5], [2, 6], [3, 7]]]


@pytest.mark.parametrize("steps", [0, 1, 20, 40])
@pytest.mark.parametrize(
    "transform",
    [
        lambda d: d.shuffle(100, seed=1).batch(2),
        lambda d: d.filter(lambda x: x % 9 > 0).shuffle(9, seed=1).batch(2).prefetch(2),
        lambda d: d.map(lambda x: x, num_parallel_calls=2).batch(3).repeat(2),
    ],
)
@pytest.mark.parametrize("policy", ["DATA", "OFF"])
def test_an_iterator_goes_on_where_another_one_was(strategy, steps, transform, policy):
    options = Options(auto_shard_policy=AutoShardPolicy[policy])
    dataset = transform(Dataset.range(100)).with_options(options)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(steps):
        next(iterator)
    state = iterator.get_state()
    other = iter(strategy.experimental_distribute_dataset(dataset))
    next(other)
    other.set_state(state)
    assert values(other) == values(iterator)


def test_a_function_that_makes_no_dataset_is_refused(strategy):
    with pytest.raises(TypeError, match=r"must return a Dataset\. Received"):
        strategy.distribute_datasets_from_function(lambda context: [np.zeros(4)])


def test_the_default_strategy_returns_a_dataset_as_it_is():
    dataset = Dataset.range(4)
    default = unison.get_strategy()
    assert default.experimental_distribute_dataset(dataset) is dataset
    assert default.distribute_datasets_from_function(lambda context: dataset) is dataset


def test_an_iterable_does_not_tell_what_its_batches_are(strategy):
    with pytest.raises(TypeError, match="A list has no element_spec"):
        strategy.experimental_distribute_dataset([np.zeros(4)]).element_spec  # noqa: B018
