"""Grain, as its documentation shows it."""

from __future__ import annotations

import itertools

import grain
import numpy as np

from benchmarks import examples
from benchmarks.contestants.epochs import Epochs
from benchmarks.protocol import Contestant
from benchmarks.workloads import DataWork

#: One thread that reads ahead: more, as Grain starts by default, are slower on two cores.
_READING = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


class _Source:
    """Random access to images and labels."""

    def __init__(self, count: int):
        self._images, self._labels = examples.images(count)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._images[index], self._labels[index]


def arrays(work: DataWork) -> Contestant:
    return _here(work, _shuffled(work).batch(work.batch))


def arrays_in_workers(work: DataWork) -> Contestant:
    return _in_workers(work, _shuffled(work).batch(work.batch))


def mapped(work: DataWork) -> Contestant:
    return _here(work, _shuffled(work).map(_normalised).batch(work.batch))


def mapped_in_workers(work: DataWork) -> Contestant:
    return _in_workers(work, _shuffled(work).map(_normalised).batch(work.batch))


def mapped_behind_batch(work: DataWork) -> Contestant:
    return _here(work, _shuffled(work).batch(work.batch).map(_normalised))


def _shuffled(work: DataWork) -> grain.MapDataset:
    return grain.MapDataset.source(_Source(work.examples)).shuffle(seed=0)


def _normalised(example: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return examples.normalised(*example)


def _here(work: DataWork, batches: grain.MapDataset) -> Contestant:
    dataset = batches.to_iter_dataset(_READING)
    return Epochs(work, lambda: dataset, _versions(), _total(work))


def _in_workers(work: DataWork, batches: grain.MapDataset) -> Contestant:
    """Two processes that go on from one pass to the next."""
    workers = grain.MultiprocessingOptions(num_workers=2)
    endless = iter(batches.repeat().to_iter_dataset(_READING).mp_prefetch(workers))
    return Epochs(work, lambda: itertools.islice(endless, len(batches)), _versions(), _total(work))


def _versions() -> dict[str, str]:
    return {"grain": grain.__version__}


def _total(work: DataWork) -> int:
    return int(examples.images(work.examples)[1].sum(dtype=np.int64))
