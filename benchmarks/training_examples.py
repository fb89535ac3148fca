"""What the contestants of `TrainingWork` train on, and from: the same for all, made from seeds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from benchmarks.workloads import WIDTHS, TrainingWork

#: Of Adam.
RATE, EPSILON = 1e-3, 1e-7

_SEED = 5


def examples(work: TrainingWork) -> tuple[np.ndarray, np.ndarray]:
    """Returns images, float32[steps * batch, 784], and labels, int32[steps * batch]."""
    generator = np.random.default_rng(_SEED)
    count = work.steps * work.batch
    images = generator.random((count, WIDTHS[work.model][0]), np.float32)
    return images, generator.integers(0, WIDTHS[work.model][-1], count, dtype=np.int32)


def batches_of(work: TrainingWork, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the part of every batch that the process of that rank has."""
    images, labels = examples(work)
    own = work.batch // work.processes
    starts = [step * work.batch + rank * own for step in range(work.steps)]
    return [(images[start : start + own].copy(), labels[start : start + own]) for start in starts]


def initial_parameters(work: TrainingWork) -> list[np.ndarray]:
    """Returns a kernel and a bias for every layer."""
    generator = np.random.default_rng(_SEED + 1)
    parameters: list[np.ndarray] = []
    for inputs, outputs in pairwise(WIDTHS[work.model]):
        scale = np.float32(np.sqrt(2 / inputs))
        parameters.append(generator.standard_normal((inputs, outputs), np.float32) * scale)
        parameters.append(np.zeros(outputs, np.float32))
    return parameters
