"""`map`: block functions, keys, and the same results whoever computes them."""

import time

import jax
import numpy as np
import pytest

import unison.tf as tf
from unison.data import AUTOTUNE, Dataset
from unison.data.transformations.keys import element_keys
from unison.errors import InvalidArgumentError


def plain(element):
    leaves = element if isinstance(element, tuple) else (element,)
    return [np.asarray(leaf).tolist() for leaf in leaves]


def generated(count):
    """A dataset of numbers without access by index."""
    return Dataset.from_generator(lambda: iter(range(count)), output_signature=np.int64(0))


# -- one element after the other -----------------------------------------------------------


def test_a_batch_of_results_of_different_shapes_is_an_error_that_names_them():
    dataset = Dataset.range(4).map(lambda n: np.zeros(2 if n < 3 else 5)).batch(4)
    with pytest.raises(InvalidArgumentError, match=r"has shape \[2\].*element 3.*shape \[5\]"):
        next(iter(dataset))


def test_results_of_different_dtypes_are_not_cast_in_a_batch():
    dataset = Dataset.range(2).map(lambda n: 1 if n else 1.5).batch(2)
    with pytest.raises(InvalidArgumentError, match=r"dtype float64.*dtype int64"):
        next(iter(dataset))


def test_an_error_costs_its_batch_and_no_more():
    def failing(n):
        if n == 4:
            raise KeyError("mine")
        return n

    iterator = iter(Dataset.range(9).map(failing).batch(3))
    assert next(iterator).tolist() == [0, 1, 2]
    with pytest.raises(KeyError, match="mine") as raised:
        next(iterator)
    assert "called for element 4" in "".join(raised.value.__notes__)
    assert [batch.tolist() for batch in iterator] == [[5, 6, 7], [8]]


def test_what_a_function_returns_may_be_its_buffer():
    buffer = np.zeros(3)

    def fill(n):
        buffer[:] = n
        return buffer

    batch = next(iter(Dataset.range(3).map(fill).batch(3)))
    assert batch.tolist() == [[0] * 3, [1] * 3, [2] * 3]


def test_only_what_is_asked_for_is_computed():
    calls = []
    iterator = iter(Dataset.range(100).map(lambda n: calls.append(n) or n).batch(4))
    next(iterator)
    assert len(calls) == 4


# -- blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Dataset.range, generated])
@pytest.mark.parametrize("threads", [None, 2])
def test_a_vectorized_function_gets_what_is_batched_at_once(make, threads):
    sizes = []

    def doubled(block):
        sizes.append(len(block))
        return block * 2

    dataset = make(10).map(doubled, threads, vectorized=True).batch(4)
    assert np.concatenate(list(dataset)).tolist() == list(range(0, 20, 2))
    assert sizes == [4, 4, 2]


@pytest.mark.parametrize("threads", [None, 2])
def test_a_vectorized_function_gets_blocks_where_single_elements_are_taken(threads):
    sizes = []
    dataset = generated(300).map(
        lambda block: (sizes.append(len(block)), block + 1)[1], threads, vectorized=True
    )
    assert [int(n) for n in dataset] == list(range(1, 301))
    assert sizes == [256, 44]


def test_a_vectorized_function_of_an_array_takes_shuffled_rows_at_once():
    sizes = []
    rows = Dataset.range(12).map(
        lambda block: (sizes.append(len(block)), block)[1], vectorized=True
    )
    shuffled = list(rows.shuffle(12, seed=1).batch(6))
    assert sorted(np.concatenate(shuffled).tolist()) == list(range(12))
    assert sizes == [6, 6]


def test_rows_that_are_taken_in_order_are_computed_at_once():
    sizes = []
    rows = Dataset.range(300).map(
        lambda block: (sizes.append(len(block)), block + 1)[1], vectorized=True
    )
    assert [int(n) for n in rows] == list(range(1, 301))
    assert sizes == [1, 16, 256, 27]
    sizes.clear()
    list(rows.shuffle(300, seed=1).take(5))
    assert sizes == [1] * 5


def test_a_row_that_was_computed_too_early_fails_in_its_turn():
    def failing(block):
        if 9 in block:
            raise KeyError("mine")
        return block

    iterator = iter(Dataset.range(12).map(failing, vectorized=True))
    assert [int(next(iterator)) for _ in range(9)] == list(range(9))
    with pytest.raises(KeyError, match="mine"):
        next(iterator)
    assert [int(n) for n in iterator] == [10, 11]


@pytest.mark.parametrize("threads", [None, 2])
def test_a_block_that_fails_costs_only_the_elements_that_are_the_reason(threads):
    def failing(block):
        if 9 in block:
            raise KeyError("mine")
        return block

    iterator = iter(generated(300).map(failing, threads, vectorized=True))
    assert [int(next(iterator)) for _ in range(9)] == list(range(9))
    with pytest.raises(KeyError, match="mine") as raised:
        next(iterator)
    assert "called for element 9 of the dataset" in "".join(raised.value.__notes__)
    assert [int(n) for n in iterator] == list(range(10, 300))


def test_a_vectorized_function_must_keep_the_number_of_rows():
    dataset = Dataset.range(4).map(lambda block: block[1:], vectorized=True).batch(4)
    with pytest.raises(InvalidArgumentError, match=r"as many rows.*4 rows.*\(3,\)") as raised:
        next(iter(dataset))
    assert "block of elements 0 to 3" in "".join(raised.value.__notes__)


def test_a_vectorized_function_gets_tensors_under_the_face():
    shapes = []

    def added(block, key):
        shapes.append((list(block.shape), list(key.shape)))
        return tf.cast(block, tf.float32) + tf.random.stateless_uniform([1], key[0])

    dataset = tf.data.Dataset.range(6).map(added, vectorized=True, seed=1).batch(3)
    for number, values in enumerate(dataset):
        assert np.floor(values).tolist() == [3 * number, 3 * number + 1, 3 * number + 2]
    # Traced once.
    assert shapes == [([3], [3, 2])]
    assert dataset.element_spec.dtype == tf.float32


# -- keys ----------------------------------------------------------------------------------


def test_keys_never_change():
    # SplitMix64 computed with Python's integers.
    assert element_keys(1, 0, np.arange(2)).tolist() == [
        [1858625311, 2236070924],
        [1828076284, 3256502026],
    ]
    assert element_keys(-5, 3, np.array([10**12])).tolist() == [[1689855756, 891422730]]


def test_all_keys_of_a_pass_are_different():
    keys = element_keys(7, 2, np.arange(100_000))
    assert len(np.unique(keys, axis=0)) == 100_000


def with_key(n, key):
    return n, key


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.map(with_key, seed=3).batch(1),
        lambda d: d.map(with_key, seed=3).batch(7),
        lambda d: d.map(with_key, 3, seed=3).batch(4),
        lambda d: d.map(with_key, AUTOTUNE, seed=3).batch(4),
        lambda d: d.map(with_key, 2, False, seed=3).batch(4),
        lambda d: d.map(with_key, vectorized=True, seed=3).batch(4),
        lambda d: d.map(with_key, 2, vectorized=True, seed=3).batch(4),
        lambda d: d.map(with_key, seed=3).prefetch(3).batch(5),
        lambda d: d.map(with_key, vectorized=True, seed=3).shuffle(9).batch(4),
    ],
)
@pytest.mark.parametrize("source", [Dataset.range, generated])
def test_an_elements_key_depends_on_seed_pass_and_number_only(source, make):
    dataset = make(source(20))
    for number in range(2):
        batches = list(dataset)
        numbers = np.concatenate([batch[0] for batch in batches])
        keys = np.concatenate([batch[1] for batch in batches])
        in_order = keys[np.argsort(numbers)]
        assert in_order.tolist() == element_keys(3, number, np.arange(20)).tolist()


def test_looking_at_what_the_elements_are_is_no_pass():
    dataset = Dataset.range(2).map(with_key, seed=3)
    assert dataset.element_spec[1].shape == (None,)
    keys = [key.tolist() for _, key in dataset]
    assert keys == element_keys(3, 0, np.arange(2)).tolist()


def test_a_key_is_the_last_argument_whatever_the_element_is():
    pair = Dataset.zip((Dataset.range(1), Dataset.range(1)))
    assert plain(next(iter(pair.map(lambda a, b, key: key.shape, seed=0)))) == [2]
    named = Dataset.zip({"a": Dataset.range(1)})
    assert plain(next(iter(named.map(lambda x, key: (x["a"], key.dtype.str), seed=0))))[0] == 0


def test_keys_seed_numpy_jax_and_tensorflows_random_functions():
    def drawn(n, key):
        uniform = jax.random.uniform(jax.numpy.asarray(key))
        return np.random.default_rng(key).random(), uniform

    values = np.array(list(Dataset.range(50).map(drawn, seed=1)))
    assert len(np.unique(values)) == 100
    assert 0.3 < values.mean() < 0.7
    image = tf.ones([4, 4, 3])
    flipped = tf.data.Dataset.range(8).map(
        lambda n, key: tf.image.stateless_random_brightness(image, 0.5, key), seed=2
    )
    assert len({float(x[0, 0, 0]) for x in flipped}) == 8


# -- where a pass was ----------------------------------------------------------------------


def slow(n):
    time.sleep(0.001)
    return n


@pytest.mark.parametrize(
    "make",
    [
        lambda: generated(23).map(lambda n: n * 2),
        lambda: Dataset.range(23).map(lambda n: np.arange(n % 4)),
        lambda: Dataset.range(23).map(lambda n: n * 2, 3).batch(4),
        lambda: generated(23).map(lambda n: n * 2, 3),
        lambda: Dataset.range(23).map(slow, AUTOTUNE).batch(4),
        lambda: generated(23).map(lambda n: n * 2, vectorized=True),
        lambda: Dataset.range(23).map(lambda n: n * 2, 2, vectorized=True).batch(5),
        lambda: Dataset.range(23).map(with_key, seed=4).repeat(2).batch(5),
        lambda: generated(23).map(with_key, seed=4).repeat(2),
        lambda: Dataset.range(23).map(with_key, seed=4).shuffle(30, seed=1).repeat(2),
        lambda: Dataset.range(23).map(with_key, vectorized=True, seed=4).shuffle(9, 1).repeat(2),
        lambda: generated(23).map(lambda n: n).prefetch(3).batch(4).prefetch(2).repeat(2),
        lambda: generated(8).flat_map(Dataset.range).batch(3),
        lambda: generated(8).interleave(Dataset.range, 3, 2),
        lambda: generated(8).interleave(Dataset.range, 3).batch(5),
        lambda: generated(8).interleave(generated, 3, 2, num_parallel_calls=AUTOTUNE).batch(5),
        lambda: generated(8).interleave(generated, 3, num_parallel_calls=2),
        lambda: generated(23).batch(4).prefetch_to_device(2),
    ],
)
def test_a_restored_iterator_goes_on_exactly(make):
    whole = [plain(element) for element in make()]
    for taken in range(len(whole) + 1):
        iterator = iter(make())
        assert [plain(next(iterator)) for _ in range(taken)] == whole[:taken]
        other = iter(make())
        other.set_state(iterator.get_state())
        assert [plain(element) for element in other] == whole[taken:]
        assert [plain(element) for element in iterator] == whole[taken:]


def test_an_iterator_goes_back_to_where_it_was():
    iterator = iter(generated(20).map(lambda n: n, 3).prefetch(2))
    next(iterator)
    state = iterator.get_state()
    assert [int(n) for n in iterator] == list(range(1, 20))
    iterator.set_state(state)
    assert [int(n) for n in iterator] == list(range(1, 20))


def test_random_functions_of_tensors_go_on_where_they_were():
    def make():
        noise = tf.data.Dataset.from_tensor_slices(np.zeros(8, "float32"))
        return noise.map(lambda x: x + tf.random.uniform([])).repeat(3).batch(5)

    tf.random.set_seed(1)
    iterator = iter(make())
    next(iterator), next(iterator)
    state = iterator.get_state()
    rest = [plain(batch) for batch in iterator]
    tf.random.set_seed(2)
    other = iter(make())
    other.set_state(state)
    assert [plain(batch) for batch in other] == rest


# -- on devices ----------------------------------------------------------------------------


def test_elements_are_put_on_a_device():
    device = jax.devices()[-1]
    dataset = Dataset.from_tensor_slices((np.arange(6.0), ["a"] * 6)).batch(4)
    for numbers, text in dataset.prefetch_to_device(2, device):
        assert numbers.devices() == {device}
        assert text.tolist() == [b"a"] * len(numbers)


def test_elements_are_divided_between_devices():
    mesh = jax.make_mesh((4,), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    dataset = Dataset.from_tensor_slices(np.arange(16)).batch(8).enumerate()
    for number, (index, batch) in enumerate(dataset.prefetch_to_device(2, rows)):
        assert batch.sharding == rows
        assert batch.tolist() == list(range(8 * number, 8 * number + 8))
        assert int(index) == number


def test_a_batch_that_cannot_be_divided_is_an_error_with_the_mend():
    mesh = jax.make_mesh((4,), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    iterator = iter(Dataset.range(6).batch(4).prefetch_to_device(2, rows))
    next(iterator)
    with pytest.raises(InvalidArgumentError, match=r"shape \[2\].*drop_remainder=True"):
        next(iterator)


def test_tensors_are_put_on_the_device_that_is_named():
    dataset = tf.data.Dataset.range(8).batch(4)
    placed = dataset.apply(tf.data.experimental.prefetch_to_device("CPU:1"))
    assert [batch.devices() for batch in placed] == [{jax.devices()[1]}] * 2
    copied = dataset.apply(tf.data.experimental.copy_to_device("/cpu:2"))
    assert next(iter(copied)).devices() == {jax.devices()[2]}
    assert placed.element_spec == dataset.element_spec
    assert [x.tolist() for x in placed.as_numpy_iterator()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
