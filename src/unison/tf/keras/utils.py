"""`tf.keras.utils`: Keras' functions, with Unison's datasets, and errors for failed downloads."""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from unison.data.options import InputContext
from unison.strategies import Strategy
from unison.tf.data import Dataset
from unison.tf.keras.names import make_module, stand_over
from unison.tf.random_keys import set_seed
from unison.tf.tensor_spec import TensorSpec
from unison.tf.tensors import start_devices
from unison.tf.text import StringTensor

#: The timeout in seconds for a stalled download.
_DOWNLOAD_TIMEOUT = 60


def set_random_seed(seed: int) -> None:
    """Seeds Python's, NumPy's, Keras' and `tf.random`'s numbers.

    TF: `tf.keras.utils.set_random_seed`.
    """
    keras.utils.set_random_seed(seed)
    set_seed(seed)


def get_file(fname: str | None = None, origin: str | None = None, **kwargs: Any) -> str:
    """Returns the path of a file, downloaded to Keras' folder if it is not there.

    Args:
        fname: The file's name. Default: the last part of `origin`.
        origin: Its address.
        kwargs: Others of Keras' `get_file`.

    Raises:
        ConnectionError: It is not there and cannot be downloaded. The message says where to put
            it: into a folder below `KERAS_HOME`, by default `~/.keras`.

    TF: `tf.keras.utils.get_file`.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(before or _DOWNLOAD_TIMEOUT)
    try:
        return _get_file(fname, origin, **kwargs)
    except Exception as error:
        if not isinstance(error, OSError) and not str(error).startswith("URL fetch failure"):
            raise
        raise ConnectionError(
            f"{origin} cannot be downloaded ({error}). Put that file at "
            f"{_path_in_cache(fname, origin, **kwargs)}, or set the environment variable "
            "KERAS_HOME to a folder that has it at the same place."
        ) from error
    finally:
        socket.setdefaulttimeout(before)


_get_file = keras.utils.get_file


def _path_in_cache(
    fname: str | None,
    origin: str | None,
    untar: bool = False,
    extract: bool = False,
    cache_subdir: str = "datasets",
    cache_dir: str | None = None,
    **others: Any,
) -> str:
    """Returns where Keras' `get_file` looks for the file before it downloads it."""
    del others
    home = cache_dir or os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    name = fname or os.path.basename(origin or "")
    if (untar or extract) and (not fname or "." not in name):
        name += "_archive"
    return os.path.join(os.path.expanduser(home), cache_subdir, name)


# -- datasets ---------------------------------------------------------------------------------


def split_dataset(
    dataset: Any,
    left_size: float | None = None,
    right_size: float | None = None,
    shuffle: bool = False,
    seed: int | None = None,
) -> tuple[Dataset, Dataset]:
    """Divides a dataset in two.

    Args:
        dataset: A `tf.data.Dataset`, an array, or a tuple or list of arrays of equal length.
        left_size: The number of elements of the first one, or its fraction of all.
        right_size: Likewise of the second one; one of the two may be left out.
        shuffle: Whether to shuffle before.
        seed: The seed for that.

    Raises:
        ValueError: No size is given, or the sizes exceed the dataset.

    TF: `tf.keras.utils.split_dataset`.
    """
    whole = dataset
    if not isinstance(whole, Dataset):
        whole = Dataset.from_tensor_slices(_tuples(dataset))
    elements = list(whole)
    if shuffle:
        np.random.default_rng(seed).shuffle(elements)
    left, right = _sizes(left_size, right_size, len(elements))
    return (
        _of_elements(elements[:left], whole),
        _of_elements(elements[len(elements) - right :], whole),
    )


def _tuples(data: Any) -> Any:
    return tuple(data) if isinstance(data, list) and isinstance(data[0], np.ndarray) else data


def _sizes(left: float | None, right: float | None, count: int) -> tuple[int, int]:
    if left is None and right is None:
        raise ValueError("split_dataset needs left_size or right_size. Received: neither")
    first = None if left is None else _number(left, count)
    second = None if right is None else _number(right, count)
    if first is None:
        assert second is not None
        first = count - second
    elif second is None:
        second = count - first
    if min(first, second) < 0 or first + second > count:
        raise ValueError(
            f"The two parts must fit into the dataset of {count} elements. Received: "
            f"left_size={left}, right_size={right}"
        )
    return first, second


def _number(size: float, count: int) -> int:
    return round(size * count) if isinstance(size, float) else size


def _of_elements(elements: list[Any], whole: Any) -> Any:
    return Dataset.from_generator(lambda: iter(elements), output_signature=whole.element_spec)


def _dataset_function(name: str) -> Callable[..., Any]:
    """Returns a function of `keras.utils` that makes `tf.data.Dataset`s (it needs Grain)."""
    function = getattr(keras.utils, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start_devices()
        made = function(*args, **kwargs, format="grain")
        return tuple(map(_of_grain, made)) if isinstance(made, tuple) else _of_grain(made)

    return wrapper


def _of_grain(batches: Any) -> Dataset:
    first = _with_tensors(next(iter(batches)))
    signature = jax.tree.map(lambda leaf: TensorSpec((None, *leaf.shape[1:]), leaf.dtype), first)
    dataset = Dataset.from_generator(
        lambda: map(_with_tensors, batches), output_signature=signature
    )
    for attribute in ("class_names", "file_paths"):
        if hasattr(batches, attribute):
            setattr(dataset, attribute, getattr(batches, attribute))
    return dataset


def _with_tensors(batch: Any) -> Any:
    def tensor(part: Any) -> Any:
        return StringTensor(list(part)) if isinstance(part, tuple | list) else part

    return tuple(map(tensor, batch)) if _is_pair(batch) else tensor(batch)


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple) and not isinstance(batch[0], str | bytes)


image_dataset_from_directory = _dataset_function("image_dataset_from_directory")
text_dataset_from_directory = _dataset_function("text_dataset_from_directory")
timeseries_dataset_from_array = _dataset_function("timeseries_dataset_from_array")


class DatasetCreator:
    """A function that makes the dataset of an input pipeline, for `model.fit`.

    Each replica gets batches of its own from the dataset, one after the other.

    Args:
        dataset_fn: Maps a `tf.distribute.InputContext` to a dataset of batches for a replica.
        input_options: Without effect.

    TF: `tf.keras.utils.experimental.DatasetCreator`.
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], input_options: Any = None):
        if not callable(dataset_fn):
            raise TypeError(f"`dataset_fn` must be a function. Received: {dataset_fn!r}")
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dataset_fn(*args, **kwargs)

    def batches_for(self, strategy: Strategy, needs_whole: bool = False) -> Any:
        """Returns what `fit` under a strategy takes.

        These are the batches of each worker's own dataset, or those of all replicas, joined, where
        there is one worker, or any number of them.

        Args:
            strategy: The strategy.
            needs_whole: Whether each worker needs the batches of all replicas.
        """
        has_several = strategy.input_workers.are_several and strategy.group is None
        if has_several and not needs_whole:
            return strategy.distribute_datasets_from_function(self.dataset_fn)
        return self._joined(strategy.num_replicas_now)

    def _joined(self, count: int) -> Iterator[Any]:
        batches = iter(self(InputContext(num_replicas_in_sync=count)))
        while parts := list(itertools.islice(batches, count)):
            yield jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


__getattr__ = stand_over(__name__)
make_module(f"{__name__}.experimental", {"DatasetCreator": DatasetCreator})
