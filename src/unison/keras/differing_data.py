"""A warning where the workers of a loop were given different data, of which each takes a part.

Each worker takes its own rows of every batch, as those of the others are there, too. Data of each
worker's own (as for Horovod, or with `DistributedDataParallel`) would lose the other rows.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from unison.errors import InvalidArgumentError
from unison.runtime.process_group import all_gather_json

#: The attribute of a Keras adapter whose data have been compared.
_IS_COMPARED = "_unison_data_are_compared"

_REMEDY = (
    "For data of each worker's own, pass strategy.distribute_datasets_from_function(lambda "
    "context: dataset)"
)


def compare_arrays(adapter: Any, arrays: Iterable[Any]) -> None:
    """Warns, once for an adapter, if the first examples of the workers' arrays differ.

    Raises:
        InvalidArgumentError: Their shapes or dtypes differ.
    """
    if getattr(adapter, _IS_COMPARED, False):
        return
    setattr(adapter, _IS_COMPARED, True)
    arrays = list(arrays)
    shapes = [[list(array.shape), str(array.dtype)] for array in arrays]
    of_all = _compared(shapes, (array[:1] for array in arrays))
    for worker, (said, _) in enumerate(of_all):
        if said != of_all[0][0]:
            raise InvalidArgumentError(
                message="All workers must be given arrays of the same examples, of which each "
                f"takes its part. Worker 0 has {of_all[0][0]}, worker {worker} has {said}. "
                f"{_REMEDY}."
            )


def compare_batches(adapter: Any, batch: Any) -> None:
    """Warns, once for an adapter, if the whole batches of the workers differ."""
    if not getattr(adapter, _IS_COMPARED, False):
        setattr(adapter, _IS_COMPARED, True)
        _compared(None, keras.tree.flatten(batch))


def comparing(adapter: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Yields whole batches; the first ones are compared."""
    for batch in batches:
        compare_batches(adapter, batch)
        yield batch


def _compared(described: Any, arrays: Iterable[Any]) -> list[Any]:
    """Returns what all workers say of their data; warns where the contents of arrays differ."""
    checksum = 0
    for array in arrays:
        if isinstance(array, np.ndarray | jax.Array) and array.dtype.kind != "O":
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            checksum = zlib.crc32(content.data, checksum)
    of_all = all_gather_json([described, checksum], "The data of Keras' loops")
    differing = [worker for worker, said in enumerate(of_all) if said[1] != of_all[0][1]]
    if differing and jax.process_index() == 0:
        warnings.warn(
            f"Workers 0 and {differing[0]} were given different data, of which each takes a part, "
            "as if all had the same: examples are left out, or seen twice. Give all workers the "
            f"same data, and seed what is random in them. {_REMEDY}.",
            stacklevel=2,
        )
    return of_all
