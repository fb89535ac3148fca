"""`strategy.experimental_distribute_dataset`: how global batches reach the replicas."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unison


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
    devices = [component.devices() for component in batch.values]
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
