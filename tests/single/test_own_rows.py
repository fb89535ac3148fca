"""Each worker's own rows of the batches of Keras' loops. The workers are threads here."""

import types

import jax
import numpy as np
import pytest
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from unison.data import Shares, TextLineDataset, distribute_dataset
from unison.data.distribution.own_rows import OwnRows, rows_of
from unison.data.plan import memories_of
from unison.data.state import encode
from unison.keras.datasets import DatasetAdapter
from unison.keras.own_rows import example_of, own_batches
from unison.runtime.devices import default_devices
from unison.runtime.placement import Placement
from unison.train.fit_position import Batches


def strategy_of(worker, workers, replicas, proportions=None):
    """What `own_batches` needs to know of a worker's strategy."""
    local = tuple(range(worker * replicas, (worker + 1) * replicas))
    placement = types.SimpleNamespace(local_replicas=local, num_replicas=workers * replicas)
    shares = types.SimpleNamespace(proportions=proportions)
    return types.SimpleNamespace(placement=placement, replica_shares=shares, group=None)


@pytest.mark.parametrize("shuffle", [True, False, "batch"])
@pytest.mark.parametrize("proportions", [None, (3, 1, 0, 2)])
def test_rows_of_arrays_are_those_of_keras_batches(shuffle, proportions):
    x, y = np.arange(46).reshape(23, 2), {"label": np.arange(23) * 10.0}
    weights = jax.numpy.arange(23.0)

    def adapter():
        np.random.seed(4)
        return ArrayDataAdapter(x, y, weights, batch_size=10, shuffle=shuffle)

    whole = [jax.tree.leaves(batch) for batch in adapter().get_jax_iterator()]
    for worker in (0, 1):
        epochs = types.SimpleNamespace(data_adapter=adapter())
        own = own_batches(epochs, strategy_of(worker, 2, 2, proportions))
        for batch, of_all in zip(own, whole, strict=True):
            shares = Shares(len(of_all[0]), 4, proportions)
            for leaf, expected in zip(jax.tree.leaves(batch), of_all, strict=True):
                assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
                assert leaf.shares == shares
                for place, part in enumerate(leaf.parts):
                    replica = 2 * worker + place
                    np.testing.assert_array_equal(
                        part, expected[shares.of(range(replica, replica + 1))]
                    )


def test_an_array_of_own_rows_is_like_the_whole():
    own = OwnRows([np.ones((3, 2), np.float32), np.full((1, 2), 2, np.float32)], Shares(10, 4), 2)
    assert (own.shape, own.ndim, len(own)) == ((10, 2), 2, 10)
    assert own.astype(np.int8).dtype == np.int8
    assert [part[:, 0].tolist() for part in own.padded()] == [[1, 1, 1], [2, 0, 0]]
    assert rows_of(own, 6)[:, 0].tolist() == [1, 1, 1, 2, 1, 1]
    assert example_of({"x": own})["x"].shape == (10, 2)
    without = OwnRows([np.ones((0, 2)), np.ones((0, 2))], Shares(2, 4), 2)
    assert rows_of(without, 2).tolist() == [[0, 0], [0, 0]]
    with pytest.raises(TypeError, match="its own rows"):
        np.asarray(own)


def batches_of(dataset):
    """The batches of a `fit` on a dataset, whose position is saved."""
    distributed = distribute_dataset(dataset, Placement(default_devices()[:1]))
    assert distributed.num_parts == 1
    epochs = types.SimpleNamespace(
        data_adapter=DatasetAdapter(distributed), _get_iterator=None, _enumerate_iterator=None
    )
    return distributed, Batches(epochs)


def state_of_workers(dataset, num_parts):
    """The state of a dataset of which each of several workers reads a part, between two passes."""
    _, batches = batches_of(dataset)
    state = batches.state()
    text, data = encode(memories_of(dataset.plan, of_all_workers=True))
    memories = [[text, data.tobytes().hex()] for _ in range(num_parts)]
    begun = {**state["begun"], "num_parts": num_parts, "memories": memories}
    return {**state, "begun": begun, "now": begun}


def at(data, batch=0):
    """The position in `fit` of a state of its batches."""
    return types.SimpleNamespace(data=data, epoch=0, batch=batch, source="A backup")


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_text("1\n2\n3\n")
    return [str(path) for path in paths]


@pytest.mark.parametrize("num_parts", [2, 3])
def test_a_pass_over_parts_goes_on_with_as_many_workers(paths, num_parts):
    data = state_of_workers(TextLineDataset(paths).batch(2), num_parts)
    _, batches = batches_of(TextLineDataset(paths).batch(2))
    with pytest.raises(ValueError, match=f"{num_parts} worker.*AutoShardPolicy.DATA"):
        batches.resume(at({**data, "taken": 2}, 2))


def test_the_next_epoch_goes_on_with_any_number_of_workers(paths):
    def dataset():
        return TextLineDataset(paths).cache().shuffle(9, seed=2).batch(2)

    before, after = dataset(), dataset()
    passes = [[batch.tolist() for batch in before] for _ in range(2)]
    data = state_of_workers(before, 2)
    passes.append([batch.tolist() for batch in before])
    distributed, batches = batches_of(after)
    batches.resume(at(data))
    assert [batch.tolist() for batch in distributed.global_batches()] == passes[2]
    assert passes[2] not in passes[:2]


def test_passes_begin_anew_over_a_dataset_of_another_form(paths, caplog):
    data = state_of_workers(TextLineDataset(paths).shuffle(9, seed=2).batch(2), 2)
    _, batches = batches_of(TextLineDataset(paths).batch(2))
    batches.resume(at(data))
    assert "begin anew" in caplog.text
