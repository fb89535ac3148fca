"""Programs of `tf.data`, as `data_tf` has them, with `unison.tf` in the place of TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np

import unison
import unison.tf as tf
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


def _interleaved(work: DataWork) -> tf.data.Dataset:
    files = tf.data.Dataset.list_files(f"{work.folder}/images-*.tfrecord")
    return files.interleave(tf.data.TFRecordDataset, 4, num_parallel_calls=_AUTOTUNE)


def _read(work: DataWork, dataset: tf.data.Dataset, total: int | None) -> Contestant:
    return Epochs(work, lambda: dataset, {"unison": unison.__version__}, total)


def _total_of_images(work: DataWork) -> int:
    return int(examples.images(work.examples)[1].sum(dtype=np.int64))
