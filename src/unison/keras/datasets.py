"""Keras' loops over `unison.data` datasets: `fit`, `evaluate` and `predict` accept them.

Keras calls `get_data_adapter` for its data. `teach_keras` extends that function to datasets,
also outside of scopes; for anything else, it is unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
from keras.utils import unpack_x_y_sample_weight

from unison.data import INFINITE, Dataset, DistributedDataset
from unison.data.distribution.own_rows import OwnRows
from unison.data.ragged import RaggedArray
from unison.data.specs import RaggedSpec
from unison.data.statistics import metered
from unison.data.structure import flatten


class DatasetAdapter(DataAdapter):
    """Keras' adapter of a dataset: its batches, on the host.

    For a distributed dataset, these are the batches of all replicas together; the step divides them
    again.

    Args:
        dataset: Batches: `x`, `(x, y)` or `(x, y, sample_weight)`.
        class_weight: The weight of the examples of each class; 1 for a missing class.
        steps: The number of batches in an epoch; None for all.

    Raises:
        ValueError: The elements are single examples, are not `x`, `y` and
            `sample_weight`, or the dataset is endless and `steps` is None.
    """

    def __init__(
        self,
        dataset: Dataset | DistributedDataset,
        class_weight: dict[int, float] | None = None,
        steps: int | None = None,
    ):
        self._dataset = dataset
        self._class_weight = class_weight
        if steps is None and self._cardinality() == INFINITE:
            raise ValueError(
                "The dataset is infinite: set the number of batches per epoch with "
                "steps_per_epoch, validation_steps or steps."
            )
        if isinstance(dataset, Dataset):
            _check_batched(dataset)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Yields the batches of a new pass.

        Raises:
            ValueError: There are none.
        """
        if isinstance(self._dataset, DistributedDataset):
            yield from self.checked(metered(self._dataset.global_batches()))
        else:
            yield from self.checked(self._dataset.as_numpy_iterator())

    def checked(self, batches: Iterator[Any], is_empty: bool = True) -> Iterator[Any]:
        """Yields the batches, with weights if classes have any.

        Args:
            batches: Those of a pass.
            is_empty: Whether the pass has had none before these.

        Raises:
            ValueError: There are none.
        """
        for batch in batches:
            if is_empty and any(map(_is_ragged, flatten(batch, lists_are_tuples=True)[0])):
                raise _ragged_error()
            is_empty = False
            yield batch if self._class_weight is None else self._weighted(batch)
        if is_empty:
            raise ValueError("The dataset is empty: it yielded no batch.")

    get_jax_iterator = get_numpy_iterator

    @property
    def distributed(self) -> DistributedDataset | None:
        """The dataset, if it is a distributed one."""
        return self._dataset if isinstance(self._dataset, DistributedDataset) else None

    @property
    def num_batches(self) -> int | None:
        """The number of batches in a pass; None if it is infinite or unknown."""
        length = self._cardinality()
        return None if length < 0 else length

    def _cardinality(self) -> int:
        if isinstance(self._dataset, Dataset):
            return self._dataset.plan.cardinality()
        return int(self._dataset.cardinality)

    @property
    def batch_size(self) -> int | None:
        """The number of examples in a batch, if it is known."""
        return self._dataset.plan.batch_size if isinstance(self._dataset, Dataset) else None

    has_partial_batch = None
    partial_batch_size = None

    def _weighted(self, batch: Any) -> tuple[Any, Any, Any]:
        x, y, sample_weight = unpack_x_y_sample_weight(batch)
        if sample_weight is not None:
            raise ValueError("Pass either class_weight, or a dataset with sample weights.")
        if y is None or len(flatten(y)[0]) != 1:
            raise ValueError(
                "class_weight needs a dataset of (x, y), with one array y of classes. Received a "
                f"batch of type {type(batch).__name__}"
            )
        weights_of = functools.partial(
            class_weight_to_sample_weights, class_weight=self._class_weight
        )
        if not isinstance(y, OwnRows):
            return x, y, weights_of(y)
        weighted = x, y, y.map(weights_of)
        again = y.again
        if again is None:
            return weighted
        return jax.tree.map(lambda leaf: leaf.with_again(lambda: self._weighted(again())), weighted)


def _check_batched(dataset: Dataset) -> None:
    signature = dataset.plan.known_signature
    if signature is not None and any(isinstance(spec, RaggedSpec) for spec in signature.specs):
        raise _ragged_error()
    if signature is not None and any(spec.shape == () for spec in signature.specs):
        raise ValueError(
            "Keras takes datasets of batches, and the elements of this one have no batch "
            f"axis: {signature.element_spec}. Use dataset.batch(batch_size)."
        )
    if signature is not None and type(spec := signature.element_spec) is tuple and len(spec) > 3:
        raise ValueError(
            "Keras takes datasets of x, (x, y) or (x, y, sample_weight). Received elements of "
            f"{len(spec)} components: {spec}. Put several inputs, or several targets, into one "
            "tuple or dictionary."
        )


def _is_ragged(leaf: Any) -> bool:
    if isinstance(leaf, OwnRows):
        leaf = leaf.parts[0]
    is_of_rows = isinstance(leaf, np.ndarray) and leaf.dtype == object and leaf.ndim == 1
    return isinstance(leaf, RaggedArray) or (
        is_of_rows and leaf.size > 0 and isinstance(leaf[0], np.ndarray)
    )


def _ragged_error() -> TypeError:
    return TypeError(
        "Keras' loops take dense batches, and this dataset has ragged ones. Pad them in map, for "
        "instance dataset.map(lambda x, y: (x.to_tensor(shape=[None, 64]), y)), and let the model "
        "mask the padding: keras.layers.Embedding(..., mask_zero=True)."
    )


@functools.cache
def teach_keras() -> None:
    """Lets Keras' `fit`, `evaluate` and `predict`, and `Normalization.adapt`, take datasets.

    Idempotent.
    """
    data_adapters.get_data_adapter = _knowing_datasets(data_adapters.get_data_adapter)
    keras.layers.Normalization.adapt = _adapting_to_datasets(keras.layers.Normalization.adapt)


def _knowing_datasets(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not isinstance(given["x"], Dataset | DistributedDataset):
            adapter = original(*args, **kwargs)
            if adapter.num_batches == 0:  # which Keras would convert to a StopIteration
                raise ValueError(
                    "The data is empty: it yields no batch. Received: x of type "
                    f"{type(given['x']).__name__}"
                )
            return adapter
        for name, meaning in (("y", "targets"), ("sample_weight", "sample weights")):
            if given.get(name) is not None:
                raise ValueError(
                    f"When `x` is a dataset, its batches hold the {meaning}: `{name}` must not be "
                    "passed."
                )
        return DatasetAdapter(given["x"], given.get("class_weight"), given.get("steps_per_epoch"))

    return get_data_adapter


def _adapting_to_datasets(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def adapt(self: Any, data: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(data, Dataset):
            # For (x, y), the layer gets x; vectors are single examples, as in TensorFlow.
            elements = [flatten(element)[0][0] for element in data.as_numpy_iterator()]
            together = np.stack if np.ndim(elements[0]) < 2 else np.concatenate
            data = together(elements)
        original(self, data, *args, **kwargs)

    return adapt
