"""The training images, or tokens, ready for a model; the same for all contestants."""

from __future__ import annotations

import numpy as np

from benchmarks.workloads import GPT_SIZES, FitWork

_SIZE = 28
_MNIST_EXAMPLES = 60_000
_SEED = 20


def load(work: FitWork) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images (float32 in 0 to 1; a row each for an MLP) and labels (int32).

    A file with fewer examples than the workload needs is repeated. For a GPT, they are tokens
    and their successors.
    """
    if work.model == "gpt":
        return _tokens(work)
    images, labels = _read(work.data) if work.data else _synthetic(work.examples)
    rows = np.arange(work.examples) % len(images)
    images = images[rows].astype(np.float32) / np.float32(255)
    shape = (_SIZE, _SIZE, 1) if work.model == "cnn" else (_SIZE * _SIZE,)
    return images.reshape(len(rows), *shape), labels[rows].astype(np.int32)


def _tokens(work: FitWork) -> tuple[np.ndarray, np.ndarray]:
    size = GPT_SIZES[work.device]
    shape = (work.examples, size.length + 1)
    tokens = np.random.default_rng(_SEED).integers(0, size.words, shape, np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _read(path: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as archive:
        return archive["x_train"], archive["y_train"]


def _synthetic(examples: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(_SEED)
    count = min(examples, _MNIST_EXAMPLES)
    images = generator.integers(0, 256, (count, _SIZE, _SIZE), dtype=np.uint8)
    return images, generator.integers(0, 10, count, dtype=np.uint8)
