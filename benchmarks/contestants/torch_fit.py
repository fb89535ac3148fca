"""PyTorch on one device: the training loop of its tutorials, without what makes it slow.

It does the work of `fit`: shuffled epochs, dropout, Adam, loss and accuracy over the epoch. Rows
are gathered with one index, as `hand_written_fit` does, and not by a `DataLoader`; copies to a GPU
are from pinned memory; Adam is one kernel; nothing is fetched before the epoch's end.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import training_data
from benchmarks.contestants.torch_models import model_of
from benchmarks.protocol import Contestant
from benchmarks.workloads import FitWork


def build(work: FitWork) -> Contestant:
    return TorchFit(work)


class TorchFit(Contestant):
    """A round is one epoch."""

    def __init__(self, work: FitWork):
        self._work = work
        self._device = torch.device("cuda" if work.device == "gpu" else "cpu")
        if work.device == "gpu" and torch.cuda.device_count() != 1:
            raise RuntimeError(
                "Expected one GPU: several need a process each, which `workers` measures. "
                f"Received: {torch.cuda.device_count()}. Name one in CUDA_VISIBLE_DEVICES."
            )
        # As JAX does by default.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        inputs, targets = training_data.load(work)
        arrays = inputs if isinstance(inputs, tuple) else (inputs,)
        self._inputs, self._targets = tuple(map(_tensor, arrays)), _tensor(targets)
        self._kind = model_of(work)
        self._model = self._kind.build().to(self._device)
        is_half = work.model == "gpt" and work.device == "gpu"
        self._precision = torch.autocast("cuda", torch.bfloat16, is_half)
        self._adam = torch.optim.Adam(self._model.parameters(), 1e-3, eps=1e-7, fused=True)
        self._latest: dict[str, float] = {}

    @property
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def round(self) -> float:
        begin = time.perf_counter()
        self._latest = self._epoch()
        return self._work.examples / (time.perf_counter() - begin)

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = dict(self._latest)
        facts["state_bytes"] = state_bytes(self._model, self._adam)
        if self._device.type == "cuda":
            facts["device_peak_bytes"] = torch.cuda.max_memory_allocated()
        return facts

    def _epoch(self) -> dict[str, float]:
        self._model.train()
        totals = torch.zeros(2, device=self._device)
        for rows in torch.randperm(self._work.examples).split(self._work.batch):
            inputs = [self._on_device(array[rows]) for array in self._inputs]
            targets = self._on_device(self._targets[rows])
            self._adam.zero_grad(set_to_none=True)
            if self._kind.classifies:
                targets = targets.flatten()
            with self._precision:
                outputs = self._model(*inputs)
                loss = self._kind.loss(outputs, targets)
            loss.backward()
            self._adam.step()
            with torch.no_grad():
                counted = len(targets)
                if self._kind.classifies:
                    totals[1] += (outputs.argmax(-1) == targets).sum()
                totals[0] += loss.detach() * counted
        loss, right = totals.tolist()  # waits for the device
        if not self._kind.classifies:
            return {"loss": loss / len(self._targets)}
        classified = self._targets.numel()
        return {"loss": loss / classified, "accuracy": right / classified}

    def _on_device(self, part: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return part
        return part.pin_memory().to(self._device, non_blocking=True)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Returns an array as PyTorch's users have it: channels of images first, classes as int64."""
    if array.ndim == 4:
        array = array.transpose(0, 3, 1, 2).copy()
    tensor = torch.from_numpy(array)
    return tensor.long() if tensor.dtype == torch.int32 else tensor


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the parameters and slots; of a `DTensor` those of this process."""
    slots = (value for state in optimizer.state.values() for value in state.values())
    parts = [*model.parameters(), *filter(torch.is_tensor, slots)]
    own = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
    return sum(part.numel() * part.element_size() for part in own)
