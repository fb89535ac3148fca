"""`tf.data.Dataset`."""

from __future__ import annotations

import numpy as np

from parity.facts import attempt, fact


def elements(dataset):
    return list(dataset)


def described(tf, spec):
    """A spec as plain data."""
    return tf.nest.map_structure(lambda leaf: f"{leaf.dtype.name} {leaf.shape}", spec)


@fact
def ranges(tf):
    return [elements(tf.data.Dataset.range(*limits)) for limits in ((3,), (1, 4), (5, 0, -2))]


@fact
def slices_of_arrays_lists_and_dictionaries(tf):
    return [
        elements(tf.data.Dataset.from_tensor_slices([1, 2])),
        elements(tf.data.Dataset.from_tensor_slices([1.5, 2.5])),
        elements(tf.data.Dataset.from_tensor_slices(([1, 2], [3.0, 4.0]))),
        elements(tf.data.Dataset.from_tensor_slices({"a": [1, 2], "b": np.ones((2, 2))})),
        elements(tf.data.Dataset.from_tensor_slices(["x", "yz"])),
    ]


@fact
def from_tensors_gives_one_element(tf):
    return elements(tf.data.Dataset.from_tensors(([1.0], [2.0])))


@fact
def a_list_is_a_tensor_and_a_tuple_a_structure(tf):
    return [
        described(tf, tf.data.Dataset.from_tensors([1.0, 2.0]).element_spec),
        described(tf, tf.data.Dataset.from_tensors((1.0, 2.0)).element_spec),
    ]


@fact
def slices_of_different_lengths_are_refused(tf):
    return attempt(lambda: elements(tf.data.Dataset.from_tensor_slices(([1, 2], [3]))))


@fact
def batches_and_their_rest(tf):
    dataset = tf.data.Dataset.range(5)
    return [elements(dataset.batch(2)), elements(dataset.batch(2, drop_remainder=True))]


@fact
def padded_batches(tf):
    dataset = tf.data.Dataset.range(1, 4).map(lambda n: tf.fill([n], n))
    return [
        elements(dataset.padded_batch(2)),
        elements(dataset.padded_batch(3, padded_shapes=[4], padding_values=np.int64(-1))),
    ]


@fact
def mapping_one_and_several_components(tf):
    pairs = tf.data.Dataset.from_tensor_slices(([1, 2], [10, 20]))
    return [
        elements(tf.data.Dataset.range(3).map(lambda x: x * 2)),
        elements(pairs.map(lambda a, b: a + b)),
        elements(pairs.map(lambda a, b: (b, a))),
        elements(pairs.map(lambda a, b: {"sum": a + b})),
    ]


@fact
def mapping_in_parallel_keeps_the_order(tf):
    return elements(tf.data.Dataset.range(6).map(lambda x: -x, num_parallel_calls=tf.data.AUTOTUNE))


@fact
def casting_and_scaling_images(tf):
    images = np.array([[0, 51], [102, 255]], np.uint8)

    def scale(image, label):
        image = tf.cast(image, tf.float32)
        image /= 255
        return image, label

    dataset = tf.data.Dataset.from_tensor_slices((images, np.array([1, 0])))
    return elements(dataset.map(scale).batch(2))


@fact
def filtering(tf):
    return elements(tf.data.Dataset.range(6).filter(lambda x: x % 2 == 0))


@fact
def repeating_taking_and_skipping(tf):
    dataset = tf.data.Dataset.range(3)
    return [
        elements(dataset.repeat(2)),
        elements(dataset.repeat().take(5)),
        elements(dataset.skip(2)),
        elements(dataset.take(0)),
        elements(dataset.take(-1)),
    ]


@fact
def shards(tf):
    return [elements(tf.data.Dataset.range(7).shard(3, index)) for index in range(3)]


@fact
def zipping_concatenating_and_enumerating(tf):
    a, b = tf.data.Dataset.range(3), tf.data.Dataset.range(10, 12)
    return [
        elements(tf.data.Dataset.zip((a, b))),
        elements(tf.data.Dataset.zip({"a": a, "b": b})),
        elements(a.concatenate(b)),
        elements(b.enumerate(start=5)),
    ]


@fact
def flat_map_and_interleave(tf):
    dataset = tf.data.Dataset.range(1, 4)
    return [
        elements(dataset.flat_map(lambda n: tf.data.Dataset.range(n))),
        elements(
            dataset.interleave(
                lambda n: tf.data.Dataset.from_tensors(n).repeat(3), cycle_length=2, block_length=2
            )
        ),
    ]


@fact
def unbatching(tf):
    return elements(tf.data.Dataset.range(4).batch(3).unbatch())


@fact
def windows_are_datasets(tf):
    windows = tf.data.Dataset.range(5).window(2, shift=2, drop_remainder=True)
    return [elements(window) for window in windows]


@fact
def scanning_and_reducing(tf):
    dataset = tf.data.Dataset.range(5)
    return [
        dataset.reduce(np.int64(0), lambda total, x: total + x),
        elements(dataset.scan(np.int64(0), lambda total, x: (total + x, total + x))),
    ]


@fact
def taking_while(tf):
    return elements(tf.data.Dataset.range(10).take_while(lambda x: x < 3))


@fact
def caching_prefetching_and_options_change_nothing(tf):
    dataset = tf.data.Dataset.range(3).cache().prefetch(2).with_options(tf.data.Options())
    return [elements(dataset), elements(dataset)]


@fact
def shuffling_gives_every_element_once(tf):
    shuffled = elements(tf.data.Dataset.range(20).shuffle(5, seed=1))
    return sorted(int(x) for x in shuffled)


@fact
def shuffling_anew_in_every_iteration_unless_told_otherwise(tf):
    def orders_agree(**options):
        dataset = tf.data.Dataset.range(50).shuffle(50, seed=3, **options)
        return [int(x) for x in dataset] == [int(x) for x in dataset]

    return [orders_agree(), orders_agree(reshuffle_each_iteration=False)]


@fact
def cardinalities(tf):
    dataset = tf.data.Dataset.range(5)
    found = [
        dataset,
        dataset.batch(2),
        dataset.batch(2, drop_remainder=True),
        dataset.repeat(3),
        dataset.repeat(),
        dataset.filter(lambda x: x > 1),
        dataset.take(2),
        dataset.map(lambda x: x).shuffle(3).prefetch(1),
    ]
    return [int(each.cardinality()) for each in found]


@fact
def the_names_of_infinite_and_unknown_cardinality(tf):
    return [
        int(tf.data.INFINITE_CARDINALITY),
        int(tf.data.UNKNOWN_CARDINALITY),
        int(tf.data.experimental.cardinality(tf.data.Dataset.range(3))),
    ]


@fact
def length_and_its_absence(tf):
    return [
        len(tf.data.Dataset.range(5).batch(2)),
        attempt(lambda: len(tf.data.Dataset.range(5).repeat())),
        attempt(lambda: len(tf.data.Dataset.range(5).filter(lambda x: x > 1))),
    ]


@fact
def element_specs(tf):
    x, y = np.ones((6, 2), np.float32), np.ones(6, np.int64)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return [
        described(tf, dataset.element_spec),
        described(tf, dataset.batch(2).element_spec),
        described(tf, dataset.batch(2, drop_remainder=True).element_spec),
        described(tf, dataset.map(lambda a, b: {"a": a, "b": b}).element_spec),
    ]


@fact
def a_generator_with_a_signature(tf):
    def examples():
        yield 1, [1.0, 2.0]
        yield 2, [3.0, 4.0]

    dataset = tf.data.Dataset.from_generator(
        examples,
        output_signature=(
            tf.TensorSpec(shape=(), dtype=tf.int64),
            tf.TensorSpec(shape=(2,), dtype=tf.float32),
        ),
    )
    return [elements(dataset), described(tf, dataset.element_spec)]


@fact
def numpy_iterators_give_arrays(tf):
    iterator = tf.data.Dataset.from_tensor_slices(([1, 2], ["a", "b"])).as_numpy_iterator()
    return [[int(number), text] for number, text in iterator]


@fact
def iterators_end(tf):
    iterator = iter(tf.data.Dataset.range(1))
    return [
        next(iterator),
        attempt(lambda: next(iterator)),
        bool(iterator.get_next_as_optional().has_value()),
    ]


@fact
def a_single_element(tf):
    return tf.data.Dataset.from_tensors([1, 2]).get_single_element()


@fact
def optionals(tf):
    full = tf.experimental.Optional.from_value(tf.constant(3))
    empty = tf.experimental.Optional.empty(tf.TensorSpec([], tf.int32))
    return [bool(full.has_value()), full.get_value(), bool(empty.has_value())]


@fact
def text_is_mapped(tf):
    dataset = tf.data.Dataset.from_tensor_slices(["a b", "c"])
    return elements(dataset.map(lambda text: tf.strings.length(text)))


@fact
def python_functions_are_mapped_with_py_function(tf):
    def add_one(x):
        return np.asarray(x) + 1

    dataset = tf.data.Dataset.range(3).map(lambda x: tf.numpy_function(add_one, [x], tf.int64))
    return elements(dataset)


@fact
def a_dataset_in_a_tf_function(tf):
    @tf.function
    def total(dataset):
        result = tf.constant(0, tf.int64)
        for x in dataset:
            result += x
        return result

    return total(tf.data.Dataset.range(5))


@fact
def lines_of_text_files(tf, folder):
    path = f"{folder}/lines.txt"
    with tf.io.gfile.GFile(path, "w") as file:
        file.write("one\ntwo\n")
    return elements(tf.data.TextLineDataset(path))


@fact
def records_are_written_and_read(tf, folder):
    path = f"{folder}/data.tfrecord"

    def write():
        with tf.io.TFRecordWriter(path) as writer:
            writer.write(b"first")
            writer.write(b"second")
        return elements(tf.data.TFRecordDataset(path))

    return attempt(write)


@fact
def files_are_listed(tf, folder):
    for name in ("b.txt", "a.txt"):
        with tf.io.gfile.GFile(f"{folder}/{name}", "w") as file:
            file.write(name)
    listed = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    return [path.numpy().decode().rpartition("/")[2] for path in listed]


@fact
def windows_of_a_time_series_as_in_the_guide(tf):
    series = tf.data.Dataset.range(12)

    def dense_1_step(batch):
        return batch[:-1], batch[1:]

    def make_window_dataset(dataset, window_size, shift, stride):
        windows = dataset.window(window_size, shift=shift, stride=stride)
        return windows.flat_map(lambda sub: sub.batch(window_size, drop_remainder=True))

    return [
        elements(series.batch(5, drop_remainder=True).map(dense_1_step)),
        elements(make_window_dataset(series, window_size=4, shift=3, stride=2).map(dense_1_step)),
    ]


@fact
def pairs_of_windows(tf):
    pairs = tf.data.Dataset.zip((tf.data.Dataset.range(5), tf.data.Dataset.range(10, 15)))
    windows = pairs.window(2, shift=2)
    return elements(windows.flat_map(lambda a, b: tf.data.Dataset.zip((a.batch(2), b.batch(2)))))


@fact
def two_classes_sampled_in_equal_numbers(tf):
    labels = (np.arange(400) % 10 == 0).astype("int32")
    creditcard = tf.data.Dataset.from_tensor_slices((np.arange(400), labels))
    negative = creditcard.filter(lambda features, label: label == 0).repeat()
    positive = creditcard.filter(lambda features, label: label == 1).repeat()
    balanced = tf.data.Dataset.sample_from_datasets([negative, positive], [0.5, 0.5], seed=3)
    drawn = [int(label) for _, label in balanced.take(400)]
    return [abs(sum(drawn) / 400 - 0.5) < 0.1, described(tf, balanced.element_spec)]


@fact
def classes_resampled_as_in_the_guide(tf):
    labels = (np.arange(3000) % 10 == 0).astype("int32")
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(3000.0), labels)).shuffle(3000, seed=1)
    resampled = dataset.rejection_resample(
        lambda features, label: label, target_dist=[0.5, 0.5], initial_dist=[0.9, 0.1], seed=2
    )
    balanced = resampled.map(lambda extra_label, features_and_label: features_and_label)
    drawn = [int(label) for _, label in balanced]
    return [abs(sum(drawn) / len(drawn) - 0.5) < 0.06, described(tf, balanced.element_spec)]


@fact
def columns_of_csv_files(tf, folder):
    path = f"{folder}/titanic.csv"
    with tf.io.gfile.GFile(path, "w") as file:
        file.write("survived,sex,age,fare\n0,male,22,7.25\n1,female,38,71.2833\n1,female,,7.925\n")
    batches = tf.data.experimental.make_csv_dataset(
        path, batch_size=2, label_name="survived", num_epochs=1, shuffle=False
    )
    some = tf.data.experimental.make_csv_dataset(
        path, batch_size=4, label_name="survived", select_columns=["fare", "survived"], num_epochs=1
    )
    titanic_types = [tf.int32, tf.string, tf.constant([0.0]), tf.float32]
    records = tf.data.experimental.CsvDataset(path, titanic_types, header=True)
    chosen = tf.data.experimental.CsvDataset(path, [999.0], header=True, select_cols=[2])
    return [
        elements(batches),
        [list(features) for features, _ in some],
        elements(records),
        elements(chosen),
    ]


@fact
def random_numbers_are_the_seeds(tf):
    numbers = tf.data.Dataset.random(seed=4).take(5)
    return [
        [int(x) for x in numbers] == [int(x) for x in numbers],
        all(0 <= int(x) < 2**32 for x in numbers),
        described(tf, numbers.element_spec),
    ]


@fact
def an_error_ends_neither_the_iterator_nor_the_elements_behind_it(tf):
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 0.0, 4.0])
    checked = dataset.map(lambda x: tf.debugging.check_numerics(1.0 / x, "no number"))
    iterator = iter(checked)
    return [
        next(iterator),
        attempt(lambda: next(iterator)),
        next(iterator),
        attempt(lambda: next(iterator)),
        elements(checked.ignore_errors()),
    ]
