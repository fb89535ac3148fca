"""PyTorch on one device: the training loop of its tutorials, without what makes it slow.

It does the work of `fit`: shuffled epochs, dropout, Adam, loss and accuracy over the epoch. Rows
are gathered with one index, as `hand_written_fit` does, and not by a `DataLoader`; copies to a GPU
are from pinned memory; Adam is one kernel; nothing is fetched before the epoch's end.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from benchmarks import images
from benchmarks.protocol import Contestant
from benchmarks.workloads import GPT_SIZES, FitWork, GPTSize


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10))


def _wide_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(5 * 5 * 64, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class Block(nn.Module):
    """Attention to earlier tokens, then two dense layers; each is added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.dense_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of_heads = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.into(self.attention_norm(x)).chunk(3, dim=-1)
        ]
        attended = nn.functional.scaled_dot_product_attention(*of_heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.dense(self.dense_norm(x))


class GPT(nn.Module):
    """The GPT of `benchmarks.networks.gpt`."""

    def __init__(self, size: GPTSize):
        super().__init__()
        self.tokens = nn.Embedding(size.words, size.width)
        self.positions = nn.Parameter(torch.zeros(size.length, size.width))
        blocks = [Block(size.width, size.heads) for _ in range(size.layers)]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(size.width))
        self.logits = nn.Linear(size.width, size.words, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits(self.blocks(self.tokens(tokens) + self.positions))
        return logits.flatten(0, 1)


MODELS = {"mlp": _mlp, "wide_mlp": _wide_mlp, "cnn": _cnn}


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
        pixels, labels = images.load(work)
        if work.model == "cnn":
            pixels = pixels.transpose(0, 3, 1, 2).copy()
        self._images, self._labels = torch.from_numpy(pixels), torch.from_numpy(labels).long()
        is_gpt = work.model == "gpt"
        model = GPT(GPT_SIZES[work.device]) if is_gpt else MODELS[work.model]()
        self._model = model.to(self._device)
        self._precision = torch.autocast("cuda", torch.bfloat16, is_gpt and work.device == "gpu")
        self._adam = torch.optim.Adam(self._model.parameters(), 1e-3, eps=1e-7, fused=True)
        self._latest = (0.0, 0.0)

    @property
    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def round(self) -> float:
        begin = time.perf_counter()
        self._latest = self._epoch()
        return self._work.examples / (time.perf_counter() - begin)

    def facts(self) -> dict[str, Any]:
        loss, accuracy = self._latest
        facts = {"loss": loss, "accuracy": accuracy}
        facts["state_bytes"] = state_bytes(self._model, self._adam)
        if self._device.type == "cuda":
            facts["device_peak_bytes"] = torch.cuda.max_memory_allocated()
        return facts

    def _epoch(self) -> tuple[float, float]:
        self._model.train()
        totals = torch.zeros(2, device=self._device)
        for rows in torch.randperm(self._work.examples).split(self._work.batch):
            images, labels = (
                self._on_device(self._images[rows]),
                self._on_device(self._labels[rows]),
            )
            self._adam.zero_grad(set_to_none=True)
            labels = labels.flatten()
            with self._precision:
                logits = self._model(images)
                loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()
            self._adam.step()
            with torch.no_grad():
                right = (logits.argmax(-1) == labels).sum()
                totals += torch.stack([loss.detach() * len(labels), right])
        loss, right = (totals / self._labels.numel()).tolist()  # waits for the device
        return loss, right

    def _on_device(self, part: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return part
        return part.pin_memory().to(self._device, non_blocking=True)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the parameters and slots; of a `DTensor` those of this process."""
    slots = (value for state in optimizer.state.values() for value in state.values())
    parts = [*model.parameters(), *filter(torch.is_tensor, slots)]
    own = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
    return sum(part.numel() * part.element_size() for part in own)
