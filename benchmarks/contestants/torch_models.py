"""The models of PyTorch's contestants, as its users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.workloads import (
    CLASSES,
    GPT_SIZES,
    GRAPH,
    ROWS_OF_EMBEDDING,
    SEQUENCE_SHAPE,
    FitWork,
    GPTSize,
)

#: The numbers that Keras' layers add to a variance, and the share of an old statistic they keep.
_EPSILON, _KEPT = 1e-3, 0.99


class Model(NamedTuple):
    """A model.

    Attributes:
        build: Makes the module.
        loss: Maps outputs and targets to the mean loss.
        classifies: Whether the outputs are logits of classes.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy
    classifies: bool = True


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


class _Residual(nn.Module):
    def __init__(self, into: int, filters: int, strides: int):
        super().__init__()
        self.first = _normalized(into, filters, 3, strides)
        self.second = _normalized(filters, filters, 3)
        is_same = into == filters and strides == 1
        self.shortcut = nn.Identity() if is_same else _normalized(into, filters, 1, strides)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.first(x)))
        return torch.relu(y + self.shortcut(x))


def _normalized(into: int, filters: int, size: int, strides: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(into, filters, size, strides, size // 2, bias=False),
        nn.BatchNorm2d(filters, _EPSILON, 1 - _KEPT),
    )


def _resnet() -> nn.Module:
    return nn.Sequential(
        _normalized(3, 16, 3),
        nn.ReLU(),
        _Residual(16, 16, 1),
        _Residual(16, 32, 2),
        _Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]):
        super().__init__()
        self.recurrent = kind(SEQUENCE_SHAPE[1], 128, batch_first=True)
        self.out = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.recurrent(x)[0][:, -1])
        return logits


class _Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS_OF_EMBEDDING, 32)
        self.items = nn.Embedding(ROWS_OF_EMBEDDING, 32)
        self.dense = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.users(pairs[:, 0]), self.items(pairs[:, 1])], 1)
        logits: torch.Tensor = self.dense(both)
        return logits[:, 0]


class _Noised(nn.Module):
    """A block of the UNet."""

    def __init__(self, into: int, filters: int):
        super().__init__()
        self.first = nn.Conv2d(into, filters, 3, padding=1)
        self.second = nn.Conv2d(filters, filters, 3, padding=1)
        self.first_norm = nn.GroupNorm(8, filters, _EPSILON)
        self.second_norm = nn.GroupNorm(8, filters, _EPSILON)
        self.time = nn.Linear(64, filters)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.first_norm(self.first(x)))
        y = y + self.time(time)[:, :, None, None]
        return nn.functional.silu(self.second_norm(self.second(y)))


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 64), nn.SiLU())
        self.fine, self.middle, self.coarse = _Noised(3, 32), _Noised(32, 64), _Noised(64, 64)
        self.to_middle = nn.Conv2d(32, 32, 3, 2, 1)
        self.to_coarse = nn.Conv2d(64, 64, 3, 2, 1)
        self.middle_again, self.fine_again = _Noised(128, 64), _Noised(96, 32)
        self.out = nn.Conv2d(32, 3, 1)

    def forward(self, images: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        time = self.time(share)
        fine = self.fine(images, time)
        middle = self.middle(self.to_middle(fine), time)
        x = self.coarse(self.to_coarse(middle), time)
        for skipped, block in ((middle, self.middle_again), (fine, self.fine_again)):
            larger = nn.functional.interpolate(x, scale_factor=2)
            x = block(torch.cat([larger, skipped], 1), time)
        noise: torch.Tensor = self.out(x)
        return noise


class _Messages(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.said = nn.Linear(2 * features, 64)
        self.heard = nn.Linear(features + 64, 64)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        said = torch.relu(self.said(x[ends].flatten(1)))
        heard = torch.zeros(len(x), 64).index_add_(0, ends[:, 1], said)
        return torch.relu(self.heard(torch.cat([x, heard], 1)))


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Messages(width) for width in (GRAPH.features, 64, 64))
        self.out = nn.Linear(64, CLASSES)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        graphs, count = nodes.shape[:2]
        ends = (edges + count * torch.arange(graphs)[:, None, None]).flatten(0, 1)
        x = nodes.flatten(0, 1)
        for layer in self.layers:
            x = layer(x, ends)
        logits: torch.Tensor = self.out(x.unflatten(0, (graphs, count)).mean(1))
        return logits


MODELS = {
    "mlp": Model(_mlp),
    "wide_mlp": Model(_wide_mlp),
    "cnn": Model(_cnn),
    "resnet": Model(_resnet),
    "lstm": Model(lambda: _Recurrent(nn.LSTM)),
    "gru": Model(lambda: _Recurrent(nn.GRU)),
    "recommender": Model(
        _Recommender, nn.functional.binary_cross_entropy_with_logits, classifies=False
    ),
    "unet": Model(_UNet, nn.functional.mse_loss, classifies=False),
    "graph": Model(_Graph),
}


def model_of(work: FitWork) -> Model:
    if work.model == "gpt":
        return Model(lambda: GPT(GPT_SIZES[work.device]))
    return MODELS[work.model]
