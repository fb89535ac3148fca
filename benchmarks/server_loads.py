"""What the contestants of `ServerWork` train: the same for all, made from seeds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from benchmarks.workloads import ServerWork

#: Of gradient descent.
RATE = 0.01

_SEED = 7

#: How many different batches there are.
_BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Dense:
    """Dense layers with ReLU between, which tell classes apart.

    Attributes:
        widths: Those of the layers, the input's first.
    """

    widths: tuple[int, ...]

    def parameters(self) -> list[np.ndarray]:
        """Returns a kernel and a bias for every layer."""
        generator = np.random.default_rng(_SEED)
        found: list[np.ndarray] = []
        for inputs, outputs in itertools.pairwise(self.widths):
            scale = np.float32(np.sqrt(2 / inputs))
            found.append(generator.standard_normal((inputs, outputs), np.float32) * scale)
            found.append(np.zeros(outputs, np.float32))
        return found

    def batch(self, generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        images = generator.random((size, self.widths[0]), np.float32)
        return images, generator.integers(0, self.widths[-1], size, dtype=np.int32)

    def operations(self, batch: int) -> int:
        """Returns the floating-point operations of a step: the first layer has no gradient of its
        input.
        """
        layers = [inputs * outputs for inputs, outputs in itertools.pairwise(self.widths)]
        return 2 * batch * (3 * sum(layers) - layers[0])

    @property
    def moved_bytes(self) -> int:
        """How many bytes of parameters, and of gradients, a step moves."""
        layers = itertools.pairwise(self.widths)
        return 2 * 4 * sum((inputs + 1) * outputs for inputs, outputs in layers)


@dataclasses.dataclass(frozen=True)
class Embedding:
    """The mean of rows of a table, and a linear layer of it.

    Attributes:
        rows: How many the table has.
        width: How long they are.
        lookups: How many of them an example has.
    """

    rows: int
    width: int
    lookups: int

    def parameters(self) -> list[np.ndarray]:
        """Returns the table, and the kernel of the layer."""
        generator = np.random.default_rng(_SEED)
        table = generator.standard_normal((self.rows, self.width), np.float32)
        return [table, generator.standard_normal((self.width, 1), np.float32) * np.float32(0.1)]

    def batch(self, generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        ids = generator.integers(0, self.rows, (size, self.lookups), dtype=np.int32)
        return ids, generator.standard_normal((size, 1), np.float32)


LOADS: dict[str, Dense | Embedding] = {
    "mlp": Dense((784, 512, 10)),
    "narrow_mlp": Dense((784, 64, 10)),
    "wide_mlp": Dense((784, 2048, 10)),
    "embedding": Embedding(rows=1_000_000, width=32, lookups=100),
}


def batches_of(work: ServerWork) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the batches that a worker goes through, again and again."""
    generator = np.random.default_rng(_SEED + 1)
    return [LOADS[work.load].batch(generator, work.batch) for _ in range(_BATCHES)]


def endless_batches(work: ServerWork) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return itertools.cycle(batches_of(work))
