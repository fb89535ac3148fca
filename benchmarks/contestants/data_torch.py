"""PyTorch's `DataLoader`, as its documentation shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks import examples
from benchmarks.contestants.epochs import Epochs
from benchmarks.protocol import Contestant
from benchmarks.workloads import DataWork


class _Examples(Dataset):
    """One example for an index; for a list of them, their rows."""

    def __init__(self, count: int):
        images, labels = examples.images(count)
        self._images, self._labels = torch.from_numpy(images), torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._images[index], self._labels[index]


class _Normalised(Dataset):
    """Examples that went through the function, in NumPy; for a list of indices, their rows."""

    def __init__(self, count: int):
        self._images, self._labels = examples.images(count)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: Any) -> tuple[np.ndarray, np.ndarray]:
        return examples.normalised(self._images[index], self._labels[index])


def arrays(work: DataWork) -> Contestant:
    return _loaded(work, _Examples(work.examples))


def arrays_in_workers(work: DataWork) -> Contestant:
    return _loaded(work, _Examples(work.examples), workers=2)


def arrays_by_rows(work: DataWork) -> Contestant:
    """Not as in the tutorials: a sampler of whole batches, a dataset that takes lists."""
    return _loaded_by_rows(work, _Examples(work.examples))


def mapped(work: DataWork) -> Contestant:
    return _loaded(work, _Normalised(work.examples))


def mapped_in_workers(work: DataWork) -> Contestant:
    return _loaded(work, _Normalised(work.examples), workers=2)


def mapped_by_rows(work: DataWork) -> Contestant:
    return _loaded_by_rows(work, _Normalised(work.examples))


def _loaded_by_rows(work: DataWork, dataset: Dataset) -> Contestant:
    sampler = BatchSampler(RandomSampler(dataset), work.batch, drop_last=False)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None)
    return Epochs(work, lambda: loader, _versions(), _total(work))


def _loaded(work: DataWork, dataset: Dataset, workers: int = 0) -> Contestant:
    loader = DataLoader(
        dataset, work.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    return Epochs(work, lambda: loader, _versions(), _total(work))


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__}


def _total(work: DataWork) -> int:
    return int(examples.images(work.examples)[1].sum(dtype=np.int64))
