"""`tf.data.experimental`: older names, mostly of methods of `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unison.data import AUTOTUNE, SHARD_HINT, AutoShardPolicy
from unison.data import INFINITE as INFINITE_CARDINALITY
from unison.data import UNKNOWN as UNKNOWN_CARDINALITY
from unison.tf import dtypes
from unison.tf.data import service
from unison.tf.data.csv_files import CsvDataset, make_csv_dataset
from unison.tf.data.dataset import Dataset, Optional, TFRecordDataset
from unison.tf.data.functions import enable_debug_mode
from unison.tf.data.options import (
    AutotuneOptions,
    DistributeOptions,
    OptimizationOptions,
    ThreadingOptions,
)
from unison.tf.io.parsing import parse_example
from unison.tf.missing import names_missing_from

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "AutotuneOptions",
    "Counter",
    "CsvDataset",
    "DistributeOptions",
    "OptimizationOptions",
    "Optional",
    "RandomDataset",
    "ThreadingOptions",
    "assert_cardinality",
    "bucket_by_sequence_length",
    "cardinality",
    "choose_from_datasets",
    "copy_to_device",
    "dense_to_ragged_batch",
    "enable_debug_mode",
    "enumerate_dataset",
    "from_list",
    "get_next_as_optional",
    "get_single_element",
    "get_structure",
    "group_by_window",
    "ignore_errors",
    "load",
    "make_batched_features_dataset",
    "make_csv_dataset",
    "map_and_batch",
    "parallel_interleave",
    "parse_example_dataset",
    "prefetch_to_device",
    "rejection_resample",
    "sample_from_datasets",
    "save",
    "scan",
    "service",
    "shuffle_and_repeat",
    "snapshot",
    "take_while",
    "unbatch",
    "unique",
]

__getattr__ = names_missing_from(__name__)

#: The argument of `dataset.apply`.
Transformation = Callable[[Any], Any]


def cardinality(dataset: Dataset) -> Any:
    """TF: `tf.data.experimental.cardinality`."""
    return dataset.cardinality()


def assert_cardinality(expected_cardinality: int) -> Transformation:
    """TF: `tf.data.experimental.assert_cardinality`."""
    return lambda dataset: dataset.assert_cardinality(expected_cardinality)


def Counter(start: int = 0, step: int = 1, dtype: Any = dtypes.int64) -> Any:  # noqa: N802
    """TF: `tf.data.experimental.Counter`."""
    return Dataset.counter(start, step, dtype)


def bucket_by_sequence_length(*args: Any, **kwargs: Any) -> Transformation:
    """TF: `tf.data.experimental.bucket_by_sequence_length`."""
    return lambda dataset: dataset.bucket_by_sequence_length(*args, **kwargs)


def group_by_window(*args: Any, **kwargs: Any) -> Transformation:
    """TF: `tf.data.experimental.group_by_window`."""
    return lambda dataset: dataset.group_by_window(*args, **kwargs)


def choose_from_datasets(
    datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = False
) -> Any:
    """TF: `tf.data.experimental.choose_from_datasets`."""
    return Dataset.choose_from_datasets(datasets, choice_dataset, stop_on_empty_dataset)


def sample_from_datasets(
    datasets: Sequence[Dataset],
    weights: Any = None,
    seed: int | None = None,
    stop_on_empty_dataset: bool = False,
) -> Any:
    """TF: `tf.data.experimental.sample_from_datasets`."""
    return Dataset.sample_from_datasets(datasets, weights, seed, stop_on_empty_dataset)


def dense_to_ragged_batch(
    batch_size: int, drop_remainder: bool = False, row_splits_dtype: Any = dtypes.int64
) -> Transformation:
    """TF: `tf.data.experimental.dense_to_ragged_batch`."""
    splits_dtype = dtypes.named(row_splits_dtype)
    return lambda dataset: dataset.ragged_batch(batch_size, drop_remainder, splits_dtype)


def enumerate_dataset(start: int = 0) -> Transformation:
    """TF: `tf.data.experimental.enumerate_dataset`."""
    return lambda dataset: dataset.enumerate(start)


def from_list(elements: Sequence[Any], name: str | None = None) -> Any:
    """Returns the dataset of the elements of a list, which must have one signature.

    TF: `tf.data.experimental.from_list`.
    """
    if not isinstance(elements, list) or not elements:
        raise ValueError(f"Expected a list that is not empty. Received: {elements!r}")
    signature = Dataset.from_tensors(elements[0]).element_spec
    return Dataset.from_generator(lambda: elements, output_signature=signature)


def get_next_as_optional(iterator: Any) -> Any:
    """TF: `tf.data.experimental.get_next_as_optional`."""
    return iterator.get_next_as_optional()


def get_single_element(dataset: Dataset) -> Any:
    """TF: `tf.data.experimental.get_single_element`."""
    return dataset.get_single_element()


def get_structure(dataset_or_iterator: Any) -> Any:
    """TF: `tf.data.experimental.get_structure`."""
    return dataset_or_iterator.element_spec


def ignore_errors(log_warning: bool = False) -> Transformation:
    """TF: `tf.data.experimental.ignore_errors`."""
    return lambda dataset: dataset.ignore_errors(log_warning)


def load(
    path: Any,
    element_spec: Any = None,
    compression: str | None = None,
    reader_func: Callable[..., Any] | None = None,
) -> Any:
    """TF: `tf.data.experimental.load`."""
    return Dataset.load(path, element_spec, compression, reader_func)


def map_and_batch(
    map_func: Callable[..., Any],
    batch_size: int,
    num_parallel_batches: int | None = None,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
) -> Transformation:
    """TF: `tf.data.experimental.map_and_batch`."""
    calls = num_parallel_calls or (num_parallel_batches and num_parallel_batches * batch_size)
    return lambda dataset: dataset.map(map_func, calls).batch(batch_size, drop_remainder)


def make_batched_features_dataset(
    file_pattern: Any,
    batch_size: int,
    features: Any,
    reader: Callable[..., Any] | None = None,
    label_key: str | None = None,
    reader_args: Sequence[Any] | None = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    reader_num_threads: int | None = None,
    parser_num_threads: int | None = None,
    sloppy_ordering: bool = False,
    drop_final_batch: bool = False,
) -> Any:
    """Returns batches of parsed `Example`s: dictionaries, or pairs of them and the labels.

    Args:
        file_pattern: A pattern of names of files, or several.
        batch_size: The number of examples in a batch.
        features: As `tf.io.parse_example` takes them.
        reader: Makes a dataset of serialized examples of a file's name; `TFRecordDataset`.
        label_key: The feature that is the label.
        reader_args: Further arguments of `reader`.
        num_epochs: The number of passes over the examples; None: without end.
        shuffle: Whether files and examples are shuffled.
        shuffle_buffer_size: The size of the buffer for examples.
        shuffle_seed: Determines the order.
        prefetch_buffer_size: The number of buffered batches; default: a few.
        reader_num_threads: The number of files that are read at a time.
        parser_num_threads: The number of threads in which batches are parsed.
        sloppy_ordering: Without effect: the order is always the same.
        drop_final_batch: Whether a last, smaller batch is dropped.

    TF: `tf.data.experimental.make_batched_features_dataset`.
    """
    files = Dataset.list_files(file_pattern, shuffle, shuffle_seed)
    read = reader or TFRecordDataset
    dataset: Any = files.interleave(
        lambda name: read(name, *(reader_args or ())), cycle_length=reader_num_threads or 1
    )
    if isinstance(dataset.element_spec, tuple):
        dataset = dataset.map(lambda key, example: example)
    dataset = dataset.repeat(num_epochs)
    if shuffle:
        dataset = dataset.shuffle(shuffle_buffer_size, shuffle_seed)
    dataset = dataset.batch(batch_size, drop_remainder=drop_final_batch or num_epochs is None)
    dataset = dataset.apply(parse_example_dataset(features, parser_num_threads or 1))
    if label_key is not None:
        dataset = dataset.map(lambda parsed: (parsed, parsed.pop(label_key)))
    return dataset.prefetch(AUTOTUNE if prefetch_buffer_size is None else prefetch_buffer_size)


def parse_example_dataset(
    features: Any, num_parallel_calls: int | None = 1, deterministic: bool | None = None
) -> Transformation:
    """Returns a transformation that parses batches of serialized `Example`s.

    TF: `tf.data.experimental.parse_example_dataset`.
    """
    return lambda dataset: dataset.map(
        lambda serialized: parse_example(serialized, features), num_parallel_calls, deterministic
    )


def parallel_interleave(
    map_func: Callable[..., Any],
    cycle_length: int,
    block_length: int = 1,
    sloppy: bool | None = False,
    buffer_output_elements: int | None = None,
    prefetch_input_elements: int | None = None,
) -> Transformation:
    """Returns a transformation that interleaves datasets, all of which are read ahead.

    TF: `tf.data.experimental.parallel_interleave`.
    """
    del sloppy, buffer_output_elements, prefetch_input_elements
    return lambda dataset: dataset.interleave(map_func, cycle_length, block_length, cycle_length)


def prefetch_to_device(device: str, buffer_size: int | None = None) -> Transformation:
    """Returns a transformation that copies elements to a device before they are requested.

    TF: `tf.data.experimental.prefetch_to_device`.
    """
    size = AUTOTUNE if buffer_size is None else buffer_size
    return lambda dataset: dataset.prefetch_to_device(size, device)


def copy_to_device(target_device: str, source_device: str = "/cpu:0") -> Transformation:
    """Returns a transformation that puts elements on a device.

    Args:
        target_device: The device's name.
        source_device: Ignored: the elements come from the host's memory.

    TF: `tf.data.experimental.copy_to_device`.
    """
    del source_device
    return lambda dataset: dataset.prefetch_to_device(AUTOTUNE, target_device)


def RandomDataset(  # noqa: N802
    seed: int | None = None, rerandomize_each_iteration: bool | None = None
) -> Any:
    """TF: `tf.data.experimental.RandomDataset`."""
    return Dataset.random(seed, rerandomize_each_iteration)


def rejection_resample(
    class_func: Callable[..., Any],
    target_dist: Any,
    initial_dist: Any = None,
    seed: int | None = None,
) -> Transformation:
    """TF: `tf.data.experimental.rejection_resample`."""
    return lambda dataset: dataset.rejection_resample(class_func, target_dist, initial_dist, seed)


def save(
    dataset: Dataset,
    path: Any,
    compression: str | None = None,
    shard_func: Callable[..., Any] | None = None,
) -> None:
    """TF: `tf.data.experimental.save`."""
    dataset.save(path, compression, shard_func)


def scan(initial_state: Any, scan_func: Callable[..., Any]) -> Transformation:
    """TF: `tf.data.experimental.scan`."""
    return lambda dataset: dataset.scan(initial_state, scan_func)


def shuffle_and_repeat(
    buffer_size: int, count: int | None = None, seed: int | None = None
) -> Transformation:
    """TF: `tf.data.experimental.shuffle_and_repeat`."""
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


def snapshot(
    path: Any,
    compression: str | None = "AUTO",
    reader_func: Callable[..., Any] | None = None,
    shard_func: Callable[..., Any] | None = None,
) -> Transformation:
    """TF: `tf.data.experimental.snapshot`."""
    return lambda dataset: dataset.snapshot(path, compression, reader_func, shard_func)


def take_while(predicate: Callable[..., Any]) -> Transformation:
    """TF: `tf.data.experimental.take_while`."""
    return lambda dataset: dataset.take_while(predicate)


def unbatch() -> Transformation:
    """TF: `tf.data.experimental.unbatch`."""
    return lambda dataset: dataset.unbatch()


def unique() -> Transformation:
    """TF: `tf.data.experimental.unique`."""
    return lambda dataset: dataset.unique()
