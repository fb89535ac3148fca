"""PyTorch: `DistributedDataParallel` over gloo, and a `DataLoader` with a `DistributedSampler`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import cluster, jpegs
from benchmarks.contestants.training_torch import join
from benchmarks.protocol import Contestant
from benchmarks.workloads import ImageInputWork


class _Images(Dataset[Any]):
    def __init__(self, work: ImageInputWork):
        self._files, self._labels = jpegs.files_of(work)
        self._generator = np.random.default_rng()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        image = jpegs.decoded(self._files[index], self._generator)
        return image.transpose(2, 0, 1), int(self._labels[index])


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(jpegs.PIXELS * 3, jpegs.CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inside = slice(jpegs.BORDER, -jpegs.BORDER)
        scores: torch.Tensor = self.dense(images[:, :, inside, inside].flatten(1))
        return scores


def build(work: ImageInputWork) -> Contestant:
    torch.set_num_threads(1)
    own = cluster.from_environment()
    model: nn.Module = _Model()
    if own.size > 1:
        join(own)
        model = nn.parallel.DistributedDataParallel(model)
    descent = torch.optim.SGD(model.parameters(), jpegs.RATE)
    images = _Images(work)
    sampler = DistributedSampler(images, own.size, own.rank)
    loader = DataLoader(images, work.batch // own.size, sampler=sampler)

    def train() -> None:
        for examples, labels in loader:
            descent.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(examples), labels).backward()
            descent.step()

    return jpegs.ImageTraining(work, train, {"torch": torch.__version__})
