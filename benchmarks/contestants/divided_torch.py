"""PyTorch: `fully_shard` (FSDP 2) of each block and of the whole, over gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks import cluster
from benchmarks.contestants.divided import EPSILON, RATE, DividedTraining, tokens
from benchmarks.contestants.torch_fit import state_bytes
from benchmarks.contestants.torch_models import GPT, Block
from benchmarks.contestants.training_torch import join
from benchmarks.protocol import Contestant
from benchmarks.workloads import DividedWork


def zero3(work: DividedWork) -> Contestant:
    """Parameters are gathered for a block, and again for its gradient."""
    return _contestant(work, reshards=True)


def zero2(work: DividedWork) -> Contestant:
    """Gathered parameters are kept from forward to backward."""
    return _contestant(work, reshards=False)


def _contestant(work: DividedWork, reshards: bool) -> Contestant:
    build = functools.partial(_build, reshards=reshards)
    return DividedTraining(work, build, {"torch": torch.__version__})


def _build(work: DividedWork, reshards: bool) -> tuple[Callable[[], float], Callable[[], int]]:
    torch.set_num_threads(1)
    own = cluster.from_environment()
    join(own)
    model = GPT(work.size)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, reshard_after_forward=reshards)
    fully_shard(model, reshard_after_forward=reshards)
    adam = torch.optim.Adam(model.parameters(), RATE, eps=EPSILON)
    share = work.batch // own.size
    inputs, labels = (torch.from_numpy(part).long() for part in tokens(work))
    first = [step * work.batch + own.rank * share for step in range(work.steps)]

    def train() -> float:
        for begin in first:
            rows = slice(begin, begin + share)
            adam.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows].flatten())
            loss.backward()
            adam.step()
        return float(loss.detach())

    return train, lambda: state_bytes(model, adam)
