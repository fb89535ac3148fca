"""TensorFlow's `tf.data`, as its guides show it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf  # noqa: TID251 -- a peer, in a process of its own

from benchmarks import examples
from benchmarks.contestants import jpeg_files
from benchmarks.contestants.epochs import Epochs
from benchmarks.protocol import Contestant
from benchmarks.workloads import DataWork

_AUTOTUNE = tf.data.AUTOTUNE
_FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}
_PADDING = 4


def arrays(work: DataWork) -> Contestant:
    dataset = _shuffled(work).batch(work.batch).prefetch(_AUTOTUNE)
    return _read(work, dataset, _total_of_images(work))


def arrays_gathered(work: DataWork) -> Contestant:
    """Not as in the guides: the indices are shuffled, and batches of rows gathered."""
    images, labels = map(tf.constant, examples.images(work.examples))

    def rows(indices: Any) -> Any:
        return tf.gather(images, indices), tf.gather(labels, indices)

    dataset = tf.data.Dataset.range(work.examples).shuffle(work.examples).batch(work.batch)
    dataset = dataset.map(rows, _AUTOTUNE).prefetch(_AUTOTUNE)
    return _read(work, dataset, _total_of_images(work))


def mapped(work: DataWork) -> Contestant:
    dataset = _shuffled(work).map(_normalised).batch(work.batch).prefetch(_AUTOTUNE)
    return _read(work, dataset, _total_of_images(work))


def mapped_in_threads(work: DataWork) -> Contestant:
    dataset = _shuffled(work).map(_normalised, _AUTOTUNE).batch(work.batch).prefetch(_AUTOTUNE)
    return _read(work, dataset, _total_of_images(work))


def mapped_behind_batch(work: DataWork) -> Contestant:
    dataset = _shuffled(work).batch(work.batch).map(_normalised, _AUTOTUNE).prefetch(_AUTOTUNE)
    return _read(work, dataset, _total_of_images(work))


def records(work: DataWork) -> Contestant:
    def parsed(record: Any) -> Any:
        example = tf.io.parse_single_example(record, _FEATURES)
        return tf.reshape(tf.io.decode_raw(example["image"], tf.uint8), (28, 28)), example["label"]

    dataset = _interleaved(work).map(parsed, _AUTOTUNE).batch(work.batch).prefetch(_AUTOTUNE)
    return _read(work, dataset, _total_of_images(work))


def records_batched(work: DataWork) -> Contestant:
    def parsed(serialized: Any) -> Any:
        example = tf.io.parse_example(serialized, _FEATURES)
        pixels = tf.io.decode_raw(example["image"], tf.uint8)
        return tf.reshape(pixels, (-1, 28, 28)), example["label"]

    dataset = _interleaved(work).batch(work.batch).map(parsed, _AUTOTUNE).prefetch(_AUTOTUNE)
    return _read(work, dataset, _total_of_images(work))


def jpeg(work: DataWork) -> Contestant:
    return _read(work, *jpeg_files.decoded(tf, work))


def jpeg_resized(work: DataWork) -> Contestant:
    return _read(work, *jpeg_files.resized(tf, work))


def augmented(work: DataWork) -> Contestant:
    images, labels = examples.colours(work.examples)

    def drawn(image: Any, label: Any) -> Any:
        image = tf.cast(image, tf.float32) / 255
        image = tf.pad(image, ((_PADDING, _PADDING), (_PADDING, _PADDING), (0, 0)))
        image = tf.image.random_crop(image, (32, 32, 3))
        image = tf.image.random_flip_left_right(image)
        return tf.image.random_brightness(image, 0.1), label

    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).map(drawn, _AUTOTUNE)
    dataset = dataset.batch(work.batch).prefetch(_AUTOTUNE)
    return _read(work, dataset, int(labels.sum(dtype=np.int64)))


def generator(work: DataWork) -> Contestant:
    images, labels = examples.images(work.examples)

    def yielded() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from zip(images, labels, strict=True)

    signature = (tf.TensorSpec((28, 28), tf.uint8), tf.TensorSpec((), tf.uint8))
    dataset = tf.data.Dataset.from_generator(yielded, output_signature=signature)
    return _read(work, dataset.batch(work.batch).prefetch(_AUTOTUNE), _total_of_images(work))


def lines(work: DataWork) -> Contestant:
    path = pathlib.Path(work.folder, "lines.txt")
    return _read(work, tf.data.TextLineDataset(str(path)).batch(work.batch), None)


def padded(work: DataWork) -> Contestant:
    dataset = _sequences(work).padded_batch(work.batch).prefetch(_AUTOTUNE)
    return _read(work, dataset, examples.total_of_sequences(work.examples))


def bucketed(work: DataWork) -> Contestant:
    dataset = _sequences(work).bucket_by_sequence_length(
        tf.size, examples.BUCKETS, [work.batch] * (len(examples.BUCKETS) + 1)
    )
    return _read(work, dataset.prefetch(_AUTOTUNE), examples.total_of_sequences(work.examples))


def _shuffled(work: DataWork) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(examples.images(work.examples))
    return dataset.shuffle(work.examples)


def _normalised(image: Any, label: Any) -> Any:
    pixels = tf.cast(image, tf.float32) / 255
    return (pixels - examples.MEAN) / examples.DEVIATION, tf.cast(label, tf.int32)


def _interleaved(work: DataWork) -> tf.data.Dataset:
    files = tf.data.Dataset.list_files(f"{work.folder}/images-*.tfrecord")
    return files.interleave(tf.data.TFRecordDataset, 4, num_parallel_calls=_AUTOTUNE)


def _sequences(work: DataWork) -> tf.data.Dataset:
    lengths = tf.data.Dataset.from_tensor_slices(examples.lengths(work.examples))
    return lengths.map(tf.range)


def _read(work: DataWork, dataset: tf.data.Dataset, total: int | None) -> Contestant:
    return Epochs(work, lambda: dataset, {"tensorflow": tf.__version__}, total)


def _total_of_images(work: DataWork) -> int:
    return int(examples.images(work.examples)[1].sum(dtype=np.int64))
