"""What `fit` trains on, ready for a model; the same for all contestants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.workloads import (
    CLASSES,
    GPT_SIZES,
    GRAPH,
    IMAGE_SHAPE,
    ROWS_OF_EMBEDDING,
    SEQUENCE_SHAPE,
    FitWork,
)

_SIZE = 28
_MNIST_EXAMPLES = 60_000
_SEED = 20


def load(work: FitWork) -> tuple[Any, np.ndarray]:
    """Returns the inputs of a model, an array or a tuple of arrays, and the targets.

    Images are float32 in 0 to 1, a row each for an MLP; classes and tokens are int32. A file with
    fewer examples than the workload needs is repeated.
    """
    if drawn := _DRAWN.get(work.model):
        return drawn(np.random.default_rng(_SEED), work)
    images, labels = _read(work.data) if work.data else _synthetic(work.examples)
    rows = np.arange(work.examples) % len(images)
    images = images[rows].astype(np.float32) / np.float32(255)
    shape = (_SIZE, _SIZE, 1) if work.model == "cnn" else (_SIZE * _SIZE,)
    return images.reshape(len(rows), *shape), labels[rows].astype(np.int32)


def _read(path: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as archive:
        return archive["x_train"], archive["y_train"]


def _synthetic(examples: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(_SEED)
    count = min(examples, _MNIST_EXAMPLES)
    images = generator.integers(0, 256, (count, _SIZE, _SIZE), dtype=np.uint8)
    return images, generator.integers(0, 10, count, dtype=np.uint8)


def _tokens(generator: np.random.Generator, work: FitWork) -> tuple[np.ndarray, np.ndarray]:
    """Draws tokens and their successors."""
    size = GPT_SIZES[work.device]
    shape = (work.examples, size.length + 1)
    tokens = generator.integers(0, size.words, shape, np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _images(generator: np.random.Generator, work: FitWork) -> tuple[np.ndarray, np.ndarray]:
    images = generator.random((work.examples, *IMAGE_SHAPE), np.float32)
    return images, generator.integers(0, CLASSES, work.examples, np.int32)


def _sequences(generator: np.random.Generator, work: FitWork) -> tuple[np.ndarray, np.ndarray]:
    sequences = generator.random((work.examples, *SEQUENCE_SHAPE), np.float32)
    return sequences, generator.integers(0, CLASSES, work.examples, np.int32)


def _pairs(generator: np.random.Generator, work: FitWork) -> tuple[np.ndarray, np.ndarray]:
    """Draws pairs of users and items, and whether one likes the other."""
    pairs = generator.integers(0, ROWS_OF_EMBEDDING, (work.examples, 2), np.int32)
    return pairs, generator.integers(0, 2, work.examples).astype(np.float32)


def _noisy_images(generator: np.random.Generator, work: FitWork) -> tuple[Any, np.ndarray]:
    """Draws images with noise, the share of noise in each, and the noise."""
    images = generator.random((work.examples, *IMAGE_SHAPE), np.float32)
    noise = generator.standard_normal(images.shape, np.float32)
    share = generator.random((work.examples, 1), np.float32)
    of_image = share[:, :, None, None]
    return (images * (1 - of_image) + noise * of_image, share), noise


def _graphs(generator: np.random.Generator, work: FitWork) -> tuple[Any, np.ndarray]:
    """Draws graphs: the features of their nodes, and where each edge begins and ends."""
    nodes = generator.random((work.examples, GRAPH.nodes, GRAPH.features), np.float32)
    edges = generator.integers(0, GRAPH.nodes, (work.examples, GRAPH.edges, 2), np.int32)
    return (nodes, edges), generator.integers(0, CLASSES, work.examples, np.int32)


_DRAWN: dict[str, Callable[[np.random.Generator, FitWork], tuple[Any, np.ndarray]]] = {
    "gpt": _tokens,
    "resnet": _images,
    "lstm": _sequences,
    "gru": _sequences,
    "recommender": _pairs,
    "unet": _noisy_images,
    "graph": _graphs,
}
