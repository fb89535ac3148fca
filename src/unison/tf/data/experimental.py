"""`tf.data.experimental`: older names, most of them of what `tf.data.Dataset` has as a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unison.data import AUTOTUNE, AutoShardPolicy
from unison.data import INFINITE as INFINITE_CARDINALITY
from unison.data import UNKNOWN as UNKNOWN_CARDINALITY
from unison.tf import dtypes
from unison.tf.data.dataset import Dataset, Optional
from unison.tf.data.functions import enable_debug_mode
from unison.tf.data.options import (
    AutotuneOptions,
    DistributeOptions,
    OptimizationOptions,
    ThreadingOptions,
)
from unison.tf.missing import names_missing_from

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "AutotuneOptions",
    "Counter",
    "DistributeOptions",
    "OptimizationOptions",
    "Optional",
    "ThreadingOptions",
    "assert_cardinality",
    "bucket_by_sequence_length",
    "cardinality",
    "choose_from_datasets",
    "enable_debug_mode",
    "enumerate_dataset",
    "from_list",
    "get_next_as_optional",
    "get_single_element",
    "get_structure",
    "group_by_window",
    "ignore_errors",
    "map_and_batch",
    "prefetch_to_device",
    "sample_from_datasets",
    "scan",
    "shuffle_and_repeat",
    "take_while",
    "unbatch",
    "unique",
]

__getattr__ = names_missing_from(__name__)

#: What `dataset.apply` takes.
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


def prefetch_to_device(device: str, buffer_size: int | None = None) -> Transformation:
    """Returns a transformation that prefetches; elements are put on the default device.

    TF: `tf.data.experimental.prefetch_to_device`.
    """
    del device
    return lambda dataset: dataset.prefetch(AUTOTUNE if buffer_size is None else buffer_size)


def scan(initial_state: Any, scan_func: Callable[..., Any]) -> Transformation:
    """TF: `tf.data.experimental.scan`."""
    return lambda dataset: dataset.scan(initial_state, scan_func)


def shuffle_and_repeat(
    buffer_size: int, count: int | None = None, seed: int | None = None
) -> Transformation:
    """TF: `tf.data.experimental.shuffle_and_repeat`."""
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


def take_while(predicate: Callable[..., Any]) -> Transformation:
    """TF: `tf.data.experimental.take_while`."""
    return lambda dataset: dataset.take_while(predicate)


def unbatch() -> Transformation:
    """TF: `tf.data.experimental.unbatch`."""
    return lambda dataset: dataset.unbatch()


def unique() -> Transformation:
    """TF: `tf.data.experimental.unique`."""
    return lambda dataset: dataset.unique()
