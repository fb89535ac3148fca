"""Unison's datasets."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import unison
from benchmarks import augmentation, examples
from benchmarks.contestants.epochs import Epochs
from benchmarks.protocol import Contestant
from benchmarks.workloads import DataWork
from unison.data import AUTOTUNE, ArraySpec, Dataset, TextLineDataset, TFRecordDataset
from unison.data.examples import ExampleParser, FixedLenFeature

_WORKERS = 2

_parse = ExampleParser(
    {"image": FixedLenFeature([], np.bytes_), "label": FixedLenFeature([], np.int64)}
)


def arrays(work: DataWork) -> Contestant:
    return _read(work, _shuffled(work).batch(work.batch), _total_of_images(work))


def arrays_ahead(work: DataWork) -> Contestant:
    dataset = _shuffled(work).batch(work.batch).prefetch(AUTOTUNE)
    return _read(work, dataset, _total_of_images(work))


def mapped(work: DataWork) -> Contestant:
    dataset = _shuffled(work).map(examples.normalised)
    return _read(work, dataset.batch(work.batch), _total_of_images(work))


def mapped_in_threads(work: DataWork) -> Contestant:
    dataset = _shuffled(work).map(examples.normalised, _WORKERS)
    return _read(work, dataset.batch(work.batch), _total_of_images(work))


def mapped_in_processes(work: DataWork) -> Contestant:
    dataset = _shuffled(work).map(examples.normalised, _WORKERS, executor="process")
    return _read(work, dataset.batch(work.batch), _total_of_images(work))


def mapped_as_blocks(work: DataWork) -> Contestant:
    dataset = _shuffled(work).map(examples.normalised, vectorized=True)
    return _read(work, dataset.batch(work.batch), _total_of_images(work))


def mapped_behind_batch(work: DataWork) -> Contestant:
    dataset = _shuffled(work).batch(work.batch).map(examples.normalised)
    return _read(work, dataset, _total_of_images(work))


def records(work: DataWork) -> Contestant:
    def parsed(record: bytes) -> tuple[np.ndarray, Any]:
        example = _parse(record)
        return np.frombuffer(example["image"], np.uint8).reshape(28, 28), example["label"]

    return _read(work, _interleaved(work).map(parsed).batch(work.batch), _total_of_images(work))


def records_vectorized(work: DataWork) -> Contestant:
    dataset = _interleaved(work).map(_parsed_batch, vectorized=True)
    return _read(work, dataset.batch(work.batch), _total_of_images(work))


def records_batched(work: DataWork) -> Contestant:
    dataset = _interleaved(work).batch(work.batch).map(_parsed_batch)
    return _read(work, dataset, _total_of_images(work))


def augmented(work: DataWork) -> Contestant:
    dataset = _colours(work).map(augmentation.of_element, seed=0)
    return _read(work, dataset.batch(work.batch), _total_of_colours(work))


def augmented_in_processes(work: DataWork) -> Contestant:
    dataset = _colours(work).map(augmentation.of_element, _WORKERS, executor="process", seed=0)
    return _read(work, dataset.batch(work.batch), _total_of_colours(work))


def augmented_as_blocks(work: DataWork) -> Contestant:
    dataset = _colours(work).map(augmentation.of_block, vectorized=True, seed=0)
    return _read(work, dataset.batch(work.batch), _total_of_colours(work))


def augmented_behind_batch(work: DataWork) -> Contestant:
    dataset = _colours(work).batch(work.batch).map(augmentation.of_batch, seed=0)
    return _read(work, dataset, _total_of_colours(work))


def augmented_jitted(work: DataWork) -> Contestant:
    function = augmentation.jitted()
    dataset = _colours(work).batch(work.batch).map(function, seed=0)
    return _read(work, dataset, _total_of_colours(work))


def generator(work: DataWork) -> Contestant:
    images, labels = examples.images(work.examples)

    def yielded() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from zip(images, labels, strict=True)

    signature = (ArraySpec((28, 28), np.dtype(np.uint8)), ArraySpec((), np.dtype(np.uint8)))
    dataset = Dataset.from_generator(yielded, output_signature=signature)
    return _read(work, dataset.batch(work.batch), _total_of_images(work))


def lines(work: DataWork) -> Contestant:
    path = pathlib.Path(work.folder, "lines.txt")
    return _read(work, TextLineDataset(str(path)).batch(work.batch), None)


def padded(work: DataWork) -> Contestant:
    dataset = _sequences(work).padded_batch(work.batch)
    return _read(work, dataset, examples.total_of_sequences(work.examples))


def bucketed(work: DataWork) -> Contestant:
    dataset = _sequences(work).bucket_by_sequence_length(
        len, examples.BUCKETS, [work.batch] * (len(examples.BUCKETS) + 1)
    )
    return _read(work, dataset, examples.total_of_sequences(work.examples))


def _shuffled(work: DataWork) -> Dataset:
    dataset = Dataset.from_tensor_slices(examples.images(work.examples))
    return dataset.shuffle(work.examples)


def _colours(work: DataWork) -> Dataset:
    return Dataset.from_tensor_slices(examples.colours(work.examples))


def _interleaved(work: DataWork) -> Dataset:
    files = Dataset.list_files(f"{work.folder}/images-*.tfrecord")
    return files.interleave(TFRecordDataset, 4)


def _parsed_batch(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batch = _parse(records)
    pixels = np.frombuffer(b"".join(batch["image"]), np.uint8)
    return pixels.reshape(-1, 28, 28), batch["label"]


def _sequences(work: DataWork) -> Dataset:
    return Dataset.from_tensor_slices(examples.lengths(work.examples)).map(np.arange)


def _read(work: DataWork, dataset: Dataset, total: int | None) -> Contestant:
    return Epochs(work, lambda: dataset, {"unison": unison.__version__}, total)


def _total_of_images(work: DataWork) -> int:
    return int(examples.images(work.examples)[1].sum(dtype=np.int64))


def _total_of_colours(work: DataWork) -> int:
    return int(examples.colours(work.examples)[1].sum(dtype=np.int64))
