"""Batches by size and by class, resampling: what a batch holds, and that it can be gone on with."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest

import unison
import unison.tf as tf
from unison.data import Dataset
from unison.data.plan import INFINITE, UNKNOWN, position_of, stream_at
from unison.data.transformations.size_batching import Budget
from unison.data.transformations.stratified import Quotas
from unison.errors import DataLossError, InvalidArgumentError

LENGTHS = np.random.default_rng(0).integers(1, 60, 500).tolist()


class Sentence(NamedTuple):
    tokens: np.ndarray
    number: int


def sentences(lengths=LENGTHS):
    """Sentences of these lengths, numbered; the tokens of each are its number."""

    def generate():
        for number, length in enumerate(lengths, 1):
            yield Sentence(np.full(length, number), number)

    specs = Sentence(tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64))
    return Dataset.from_generator(generate, output_signature=specs)


def length_of(sentence):
    return len(sentence.tokens)


def numbers_in(batches):
    return [batch.number.tolist() for batch in batches]


def by_size(max_size, **options):
    return sentences().batch_by_size(max_size, length_of, **options)


def count_padding(batches):
    return sum((batch.tokens == 0).sum() for batch in batches)


def labelled(labels):
    """Pairs of a number and a label, by index."""
    return Dataset.from_tensor_slices((np.arange(len(labels)), np.array(labels)))


def streamed(dataset):
    """The same elements, without access by index."""
    return Dataset.from_generator(lambda: iter(dataset), output_signature=dataset.element_spec)


def label(number, label):
    return label


def class_counts(batches, num_classes):
    return [np.bincount(labels, minlength=num_classes).tolist() for _, labels in batches]


def equal(one, two):
    leaves = zip(one, two, strict=True)
    return len(one) == len(two) and all(
        len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in leaves
    )


def rest_of(stream):
    return list(iter(stream.next, None))


# -- batch_by_size -------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 100])
def test_no_batch_is_larger_than_the_budget_with_its_padding(window):
    batches = list(by_size(256, sort_window=window))
    assert max(batch.tokens.size for batch in batches) <= 256
    assert sorted(itertools.chain(*numbers_in(batches))) == list(range(1, 501))


def test_a_batch_takes_all_that_has_room_in_it():
    batches = list(by_size(256))
    for batch, after in itertools.pairwise(batches):
        longest = max(batch.tokens.shape[1], LENGTHS[after.number[0] - 1])
        assert (len(batch.number) + 1) * longest > 256


def test_without_padding_the_sum_of_the_sizes_is_counted():
    batches = list(sentences([5, 1, 1, 1, 4, 4]).batch_by_size(8, length_of, counts_padding=False))
    assert numbers_in(batches) == [[1, 2, 3, 4], [5, 6]]
    assert batches[0].tokens.shape == (4, 5)


def test_a_batch_holds_no_more_than_max_count():
    assert numbers_in(sentences([1] * 5).batch_by_size(100, length_of, max_count=2)) == [
        [1, 2],
        [3, 4],
        [5],
    ]


def test_without_a_window_the_order_stays():
    assert list(itertools.chain(*numbers_in(by_size(256)))) == list(range(1, 501))


def test_a_window_leaves_little_to_pad():
    unsorted, in_windows = (count_padding(by_size(512, sort_window=n)) for n in (1, 100))
    assert in_windows < unsorted / 5


def test_the_sizes_rise_in_one_window_and_fall_in_the_next():
    batches = sentences([3, 1, 2, 3, 1, 2, 5]).batch_by_size(5, length_of, sort_window=3)
    assert [batch.tokens.shape for batch in batches] == [(2, 2), (1, 3), (1, 3), (2, 2), (1, 5)]


def test_a_size_function_of_tensors_is_the_same():
    dataset = tf.data.Dataset.range(1, 6).map(lambda n: tf.fill([n], n))
    batches = dataset.batch_by_size(6, lambda row: tf.shape(row)[0])
    assert [batch.shape for batch in batches] == [(2, 2), (1, 3), (1, 4), (1, 5)]
    assert str(batches.element_spec) == str(dataset.padded_batch(2).element_spec)


def test_padding_is_that_of_padded_batch():
    dataset = Dataset.from_generator(lambda: [([1], b"a"), ([2, 3], b"b")])
    (batch,) = dataset.batch_by_size(
        4, lambda row, text: len(row), padded_shapes=([3], []), padding_values=(-1, b"")
    )
    assert batch[0].tolist() == [[1, -1, -1], [2, 3, -1]]
    assert batch[1].tolist() == [b"a", b"b"]


def test_an_element_that_no_padded_shape_holds_is_refused():
    with pytest.raises(DataLossError, match="would be cut"):
        list(sentences([2]).batch_by_size(4, length_of, padded_shapes=Sentence([1], [])))


def test_an_element_above_the_budget_is_named():
    with pytest.raises(InvalidArgumentError, match=r"Element 1 has size 9, .*max_size=8"):
        list(sentences([2, 9]).batch_by_size(8, length_of))


def test_an_element_above_the_budget_is_dropped_where_asked():
    batches = sentences([2, 9, 3]).batch_by_size(8, length_of, drop_oversize=True)
    assert numbers_in(batches) == [[1, 3]]


def test_a_size_must_be_a_number():
    with pytest.raises(ValueError, match="one number") as caught:
        list(sentences([2]).batch_by_size(8, lambda sentence: "two"))
    assert "batch_by_size, called for element 0" in caught.value.__notes__[0]


@pytest.mark.parametrize("option", ["max_size", "max_count", "sort_window"])
def test_limits_are_positive(option):
    with pytest.raises(InvalidArgumentError, match=f"{option}=0"):
        by_size(**{"max_size": 8, option: 0})


def test_a_budget_is_met_exactly():
    assert Budget(8).allows(2, 5, 4)
    assert not Budget(8).allows(2, 5, 4.5)
    assert Budget(5, counts_padding=False).allows(2, 5, 4)


def test_how_many_batches_there_are_is_known_of_endless_and_empty_ones_only():
    batches = by_size(256)
    assert batches.cardinality() == UNKNOWN
    assert Dataset.counter().batch_by_size(2, lambda x: 1).cardinality() == INFINITE
    assert Dataset.range(0).batch_by_size(2, lambda x: 1).cardinality() == 0


# -- stratified_batch ----------------------------------------------------------------------

LABELS = [0] * 70 + [1] * 20 + [2] * 10


@pytest.fixture(params=["by index", "as a stream"])
def dataset(request):
    made = labelled(LABELS).shuffle(100, seed=3)
    return labelled(LABELS) if request.param == "by index" else streamed(made)


def test_every_batch_holds_as_many_of_each_class(dataset):
    batches = list(dataset.stratified_batch(6, label, 3, seed=1))
    assert {tuple(counts) for counts in class_counts(batches, 3)} == {(2, 2, 2)}


def test_what_does_not_divide_rotates(dataset):
    counts = class_counts(dataset.stratified_batch(4, label, 3, seed=1).take(6), 3)
    assert np.sum(counts, axis=0).tolist() == [8, 8, 8]
    assert all(sorted(of_batch) == [1, 1, 2] for of_batch in counts)


def test_weights_are_shares_of_every_batch(dataset):
    batches = dataset.stratified_batch(8, label, 3, [5, 2, 1], seed=1)
    assert {tuple(counts) for counts in class_counts(batches, 3)} == {(5, 2, 1)}


def test_repeating_gives_every_element_and_the_largest_class_once(dataset):
    batches = list(dataset.stratified_batch(6, label, 3, seed=1))
    numbers = np.concatenate([numbers for numbers, _ in batches])
    assert sorted({*numbers.tolist()}) == list(range(100))
    assert np.bincount(numbers)[:70].tolist() == [1] * 70
    assert len(batches) == 35


def test_repeated_elements_come_equally_often_by_index():
    batches = labelled(LABELS).stratified_batch(6, label, 3, seed=1)
    times = np.bincount(np.concatenate([numbers for numbers, _ in batches]))
    assert {*times[70:90]} == {3, 4}
    assert {*times[90:]} == {7}


def test_stopping_gives_no_element_twice_and_ends_with_the_smallest_class(dataset):
    batches = list(dataset.stratified_batch(6, label, 3, exhausted="stop", seed=1))
    numbers = np.concatenate([numbers for numbers, _ in batches]).tolist()
    assert len({*numbers}) == len(numbers)
    assert len(batches) == 5


def test_the_shares_of_the_data_use_every_element_once(dataset):
    batches = dataset.stratified_batch(10, label, 3, np.bincount(LABELS), seed=1)
    numbers = np.concatenate([numbers for numbers, _ in batches])
    assert sorted(numbers.tolist()) == list(range(100))


def test_the_classes_are_mixed_within_a_batch(dataset):
    orders = [labels.tolist() for _, labels in dataset.stratified_batch(9, label, 3, seed=1)]
    assert all(order != sorted(order) for order in orders[:5])


def test_the_order_is_the_seeds_and_another_one_in_each_pass(dataset):
    one = dataset.stratified_batch(6, label, 3, seed=1)
    two = dataset.stratified_batch(6, label, 3, seed=1)
    first, second = list(one), list(one)
    if dataset.plan.rows() is not None:  # the order of a shuffled stream changes, too
        assert equal(first, list(two))
        assert not equal(first, list(dataset.stratified_batch(6, label, 3, seed=2)))
    assert not equal(first, second)


def test_a_class_of_weight_zero_is_left_out(dataset):
    counts = class_counts(dataset.stratified_batch(4, label, 3, [1, 0, 1], seed=1), 3)
    assert {tuple(of_batch) for of_batch in counts} == {(2, 0, 2)}


def test_a_class_without_elements_is_named(dataset):
    with pytest.raises(InvalidArgumentError, match="element of class 3"):
        list(dataset.stratified_batch(4, label, 4, seed=1))


def test_a_stream_sorted_by_class_is_refused_and_not_held():
    batches = streamed(labelled(LABELS)).stratified_batch(4, label, 3, buffer_size=8)
    with pytest.raises(InvalidArgumentError, match=r"class 1 among the first 8.*buffer_size"):
        list(batches)


def test_an_endless_stream_gives_endless_batches():
    endless = streamed(labelled([0, 0, 0, 1])).repeat()
    counts = class_counts(endless.stratified_batch(4, label, 2, seed=1).take(50), 2)
    assert counts == [[2, 2]] * 50


def test_the_number_of_batches_is_known_by_index():
    dataset = labelled(LABELS)
    for options in ({}, {"exhausted": "stop"}, {"weights": [5, 2, 1]}):
        batches = dataset.stratified_batch(4, label, 3, seed=1, **options)
        assert len(batches) == len(list(batches))
    assert streamed(dataset).stratified_batch(4, label, 3).cardinality() == UNKNOWN
    assert streamed(dataset).repeat().stratified_batch(4, label, 3).cardinality() == INFINITE
    assert dataset.repeat().stratified_batch(4, label, 3).cardinality() == INFINITE


def test_to_look_at_the_classes_is_no_pass_over_random_elements():
    def numbers(is_asked):
        keyed = labelled(LABELS).map(
            lambda number, label, key: (key[:, 0], label), vectorized=True, seed=1
        )
        batches = keyed.stratified_batch(4, label, 3, seed=1)
        assert keyed.plan.rows() is not None
        if is_asked:
            assert len(batches) > 0
        return [numbers.tolist() for numbers, _ in batches]

    assert numbers(is_asked=True) == numbers(is_asked=False)


def test_batches_have_a_static_size():
    spec = labelled(LABELS).stratified_batch(4, label, 3).element_spec
    assert [leaf.shape for leaf in spec] == [(4,), (4,)]


def test_an_empty_dataset_gives_no_batch():
    empty = labelled([])
    assert list(streamed(empty).stratified_batch(4, label, 2)) == []


def test_a_class_function_of_tensors_is_asked_about_whole_blocks():
    images = np.arange(100.0).reshape(50, 2)
    dataset = tf.data.Dataset.from_tensor_slices((images, np.arange(50) % 5))
    calls = []

    def class_of(image, label):
        calls.append(1)
        return label // 3

    batches = dataset.stratified_batch(8, class_of, 2, seed=1)
    counts = [np.bincount(np.asarray(labels) // 3).tolist() for _, labels in batches]
    assert {tuple(of_batch) for of_batch in counts} == {(4, 4)}
    assert len(calls) == 1


@pytest.mark.parametrize("answer", [-1, 3, 1.0, (1, 2)])
def test_what_is_no_class_is_named_with_its_element(dataset, answer):
    with pytest.raises(ValueError, match=r"at least 0 and less than 3.*for element 0"):
        list(dataset.stratified_batch(4, lambda number, label: answer, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [1, 2]}, "as many weights as num_classes=3"),
        ({"weights": [1, -2, 1]}, "none negative"),
        ({"weights": [0, 0, 0]}, "not all 0"),
        ({"exhausted": "go on"}, "exhausted='go on'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"buffer_size": 0}, "buffer_size=0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    given = {"batch_size": 4, "class_func": label, "num_classes": 3, **arguments}
    with pytest.raises((ValueError, InvalidArgumentError), match=message):
        labelled(LABELS).stratified_batch(**given)


def test_over_many_batches_every_class_has_its_share():
    shares = np.array([0.61, 0.3, 0.05, 0.04])
    quotas = Quotas(shares, 7)
    counts = np.cumsum([quotas.next() for _ in range(400)], axis=0)
    exact = np.arange(1, 401)[:, None] * 7 * shares
    assert np.abs(counts - exact).max() < 1.5
    assert {*counts[99::100].sum(1).tolist()} == {700, 1400, 2100, 2800}


def test_other_inputs_have_classes_of_their_own():
    batches = labelled(LABELS).stratified_batch(4, label, 3, exhausted="stop", seed=1)
    assert len(batches) == 8
    others = batches.plan.with_inputs([labelled([0, 0, 1, 1, 2, 2]).plan])
    assert others.cardinality() == 1


# -- distributed ---------------------------------------------------------------------------


def test_replicas_get_every_element_of_a_batch_of_any_size():
    strategy = unison.MirroredStrategy(["cpu:0", "cpu:1"])
    distributed = strategy.experimental_distribute_dataset(by_size(256, sort_window=50))
    numbers = [
        number
        for batch in distributed
        for part in batch.number.values
        for number in np.asarray(part).tolist()
    ]
    assert sorted(numbers) == list(range(1, 501))


def test_replicas_share_the_classes_of_a_batch():
    strategy = unison.MirroredStrategy(["cpu:0", "cpu:1"])
    batches = labelled(LABELS).stratified_batch(12, label, 3, seed=1)
    for _, labels in strategy.experimental_distribute_dataset(batches):
        parts = [np.asarray(part) for part in labels.values]
        assert [len(part) for part in parts] == [6, 6]
        assert np.bincount(np.concatenate(parts)).tolist() == [4, 4, 4]


# -- rejection_resample --------------------------------------------------------------------


def drawn(probabilities, count=6000):
    return np.random.default_rng(5).choice(len(probabilities), count, p=probabilities)


@pytest.mark.parametrize("target", [[0.5, 0.5], [0.2, 0.8], [0.0, 1.0], [0.9, 0.1]])
@pytest.mark.parametrize("is_known", [True, False])
def test_the_classes_get_their_shares(target, is_known):
    initial = [0.75, 0.25]
    dataset = Dataset.from_tensor_slices(drawn(initial))
    resampled = dataset.rejection_resample(lambda x: x, target, initial if is_known else None, 7)
    classes = np.array([int(number) for number, _ in resampled])
    assert len(classes) > 1000
    # Three standard deviations, and what was accepted before the estimate was good.
    tolerance = 3 * np.sqrt(0.25 / len(classes)) + (0 if is_known else 0.01)
    assert np.bincount(classes, minlength=2) / len(classes) == pytest.approx(target, abs=tolerance)


def test_a_pair_is_the_class_and_the_element():
    dataset = labelled([0, 1, 1, 0, 1])
    pairs = list(dataset.rejection_resample(label, [0.5, 0.5], seed=1))
    assert pairs
    assert all(number == element[1] for number, element in pairs)


def test_equal_shares_leave_the_elements_as_they_are():
    dataset = Dataset.from_tensor_slices([0, 1, 1, 0])
    pairs = dataset.rejection_resample(lambda x: x, [0.5, 0.5], [0.5, 0.5])
    assert [int(element) for _, element in pairs] == [0, 1, 1, 0]


def test_elements_can_come_twice_and_be_left_out():
    dataset = Dataset.from_tensor_slices(drawn([0.9, 0.1], 500)).enumerate()
    pairs = dataset.rejection_resample(lambda number, x: x, [0.6, 0.4], [0.9, 0.1], 1)
    times = np.bincount([int(number) for _, (number, _) in pairs], minlength=500)
    assert {*times.tolist()} == {0, 1, 2}


def test_much_rejection_is_said(caplog):
    dataset = Dataset.from_tensor_slices(drawn([0.95, 0.05], 200))
    list(dataset.rejection_resample(lambda x: x, [0.05, 0.95], [0.95, 0.05], 1))
    assert len([record for record in caplog.records if "leaves out" in record.message]) == 1


def test_resampling_is_the_seeds_and_another_one_in_each_pass():
    dataset = Dataset.from_tensor_slices(drawn([0.8, 0.2], 300)).enumerate()

    def numbers(resampled):
        return [int(number) for _, (number, _) in resampled]

    one, two = (dataset.rejection_resample(lambda n, x: x, [0.5, 0.5], seed=3) for _ in range(2))
    first = numbers(one)
    assert first == numbers(two)
    assert first != numbers(one)


def test_resampling_of_tensors_and_its_older_name():
    data = drawn([0.75, 0.25], 400)
    resample = tf.data.experimental.rejection_resample(lambda x: x, [0.5, 0.5], [0.75, 0.25], 1)
    dataset = tf.data.Dataset.from_tensor_slices(data)
    old = dataset.apply(resample)
    new = dataset.rejection_resample(lambda x: x, [0.5, 0.5], [0.75, 0.25], seed=1)
    assert [int(x) for x, _ in old] == [int(x) for x, _ in new]
    assert [leaf.dtype for leaf in new.element_spec] == [tf.int64, tf.int64]


def test_a_class_beyond_the_distribution_is_named():
    dataset = Dataset.from_tensor_slices([0, 1, 2])
    with pytest.raises(ValueError, match="less than 2"):
        list(dataset.rejection_resample(lambda x: x, [0.5, 0.5]))


def test_distributions_have_the_same_length():
    with pytest.raises(ValueError, match="as many shares in initial_dist"):
        Dataset.range(2).rejection_resample(lambda x: x, [0.5, 0.5], [1.0])


# -- saved and restored --------------------------------------------------------------------

PIPELINES = {
    "batch_by_size": lambda: by_size(256, sort_window=20),
    "batch_by_size, in order": lambda: by_size(256),
    "stratified by index": lambda: labelled(LABELS).stratified_batch(7, label, 3, seed=1),
    "stratified by index, repeated": lambda: (
        labelled(LABELS).stratified_batch(7, label, 3, seed=1, exhausted="stop").repeat(3)
    ),
    "stratified stream": lambda: streamed(labelled(LABELS[::-1])).stratified_batch(
        7, label, 3, seed=1, buffer_size=100
    ),
    "stratified stream that stops": lambda: streamed(labelled(LABELS)).stratified_batch(
        7, label, 3, exhausted="stop", seed=1
    ),
    "resampled": lambda: labelled(LABELS).rejection_resample(label, [0.4, 0.3, 0.3], seed=1),
    "resampled of known shares": lambda: labelled(LABELS).rejection_resample(
        label, [0.4, 0.3, 0.3], [0.7, 0.2, 0.1], seed=1
    ),
}


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_a_restored_stream_goes_on_exactly(make):
    whole = rest_of(make().plan.stream())
    assert len(whole) > 3
    for taken in (0, 1, 4, len(whole) - 1, len(whole)):
        plan = make().plan
        stream = plan.stream()
        for _ in range(taken):
            stream.next()
        position = position_of(plan, stream)
        stream.next()
        assert equal(rest_of(stream_at(make().plan, position)), whole[taken:])


def of_sizes(*sizes):
    """A generator's arrays, which can be read once."""
    arrays = iter([np.ones(size) for size in sizes])
    return Dataset.from_generator(lambda: arrays)


def test_making_padded_batches_reads_no_element():
    assert [batch.shape for batch in of_sizes(1, 2, 3, 4).padded_batch(2)] == [(2, 2), (2, 4)]
    batches = of_sizes(1, 2, 3, 4).map(lambda x: x).batch_by_size(100, len)
    assert [batch.shape for batch in batches] == [(4, 4)]


def nothing():
    return Dataset.range(4).filter(lambda x: x > 100).map(lambda x: x + 1)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: nothing().concatenate(Dataset.range(3)),
        lambda: Dataset.sample_from_datasets([nothing(), Dataset.range(3)]),
        lambda: Dataset.range(3).concatenate(nothing()),
    ],
    ids=["before", "sampled", "behind"],
)
def test_a_dataset_without_elements_can_be_joined_to_others(mixed):
    assert list(mixed()) == [0, 1, 2]


def test_nothing_can_be_padded():
    assert list(nothing().padded_batch(2)) == []
