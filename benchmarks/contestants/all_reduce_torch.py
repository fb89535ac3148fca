"""PyTorch: `all_reduce` over gloo, in place."""

from __future__ import annotations

import torch
import torch.distributed

from benchmarks import cluster
from benchmarks.contestants.all_reduce import AllReduce, array_of, check
from benchmarks.contestants.training_torch import join
from benchmarks.protocol import Contestant
from benchmarks.workloads import AllReduceWork


def build(work: AllReduceWork) -> Contestant:
    torch.set_num_threads(1)
    own = cluster.from_environment()
    join(own)
    tensor = torch.from_numpy(array_of(work, own.rank))

    def call() -> None:
        torch.distributed.all_reduce(tensor)

    call()
    check(work, tensor)
    tensor.zero_()  # sums of sums would grow beyond all bounds
    return AllReduce(work, call, {"torch": torch.__version__})
