"""NumPy by hand: what a pass costs at least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import examples
from benchmarks.contestants.epochs import Epochs
from benchmarks.protocol import Contestant
from benchmarks.workloads import DataWork

_Rows = Callable[[np.ndarray, np.ndarray], np.ndarray]


def arrays(work: DataWork) -> Contestant:
    """Fancy indexing, as one writes it."""
    return _shuffled(work, lambda array, indices: array[indices])


def arrays_taken(work: DataWork) -> Contestant:
    return _shuffled(work, lambda array, indices: array.take(indices, axis=0))


def mapped(work: DataWork) -> Contestant:
    """The function of whole batches."""
    return _shuffled(work, lambda array, indices: array[indices], examples.normalised)


def _shuffled(
    work: DataWork, rows: _Rows, function: Callable[..., Any] = lambda *batch: batch
) -> Contestant:
    images, labels = examples.images(work.examples)
    generator = np.random.default_rng(0)

    def batches() -> Iterator[Any]:
        order = generator.permutation(work.examples)
        for start in range(0, work.examples, work.batch):
            indices = order[start : start + work.batch]
            yield function(rows(images, indices), rows(labels, indices))

    return Epochs(work, batches, {"numpy": np.__version__}, int(labels.sum(dtype=np.int64)))
