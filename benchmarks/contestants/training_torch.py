"""PyTorch: `DistributedDataParallel` over gloo, or over NCCL between GPUs."""

from __future__ import annotations

import os
from itertools import pairwise

import torch
import torch.distributed
from torch import nn

from benchmarks import cluster, training_examples
from benchmarks.contestants.training import Training
from benchmarks.protocol import Contestant
from benchmarks.workloads import WIDTHS, TrainingWork


def build(work: TrainingWork) -> Contestant:
    """As its tutorials show it."""
    return _training(work, gradient_as_bucket_view=False, fused=False)


def fused(work: TrainingWork) -> Contestant:
    """With all that makes it faster: gradients in the buckets, one kernel for Adam."""
    return _training(work, gradient_as_bucket_view=True, fused=True)


def _training(work: TrainingWork, gradient_as_bucket_view: bool, fused: bool) -> Contestant:
    torch.set_num_threads(1)
    own = cluster.from_environment()
    device = torch.device("cuda" if work.device == "gpu" else "cpu")  # its only one
    torch.backends.cuda.matmul.allow_tf32 = True  # as JAX does by default
    model: nn.Module = model_of(work).to(device)
    if own.size > 1:
        join(own, "nccl" if work.device == "gpu" else "gloo")
        model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=gradient_as_bucket_view
        )
    rate, epsilon = training_examples.RATE, training_examples.EPSILON
    adam = torch.optim.Adam(model.parameters(), rate, eps=epsilon, fused=fused)
    batches = [
        (torch.from_numpy(images).to(device), torch.from_numpy(labels).long().to(device))
        for images, labels in training_examples.batches_of(work, own.rank)
    ]

    def train() -> None:
        for images, labels in batches:
            adam.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(images), labels).backward()
            adam.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    def parameters() -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in model.parameters()]

    return Training(work, train, parameters, {"torch": torch.__version__})


def join(own: cluster.Cluster, backend: str = "gloo") -> None:
    """Makes this process one of PyTorch's."""
    host, port = own.host_and_port(0)
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    torch.distributed.init_process_group(backend, rank=own.rank, world_size=own.size)


def model_of(work: TrainingWork) -> nn.Sequential:
    """Returns the model, with the parameters that all begin with."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS[work.model]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    initial = training_examples.initial_parameters(work)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), initial, strict=True):
            parameter.copy_(torch.from_numpy(value.T))
    return model
