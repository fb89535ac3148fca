"""Images for the programs beside this file: a part of MNIST, or drawn ones of the same form."""

from __future__ import annotations

import os

import numpy as np

TRAINING, TESTING = 768, 256


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns `(x_train, y_train), (x_test, y_test)` as `tf.keras.datasets.mnist.load_data` does.

    The file that `UNISON_MNIST` names holds them; without it they are ten patterns and noise.
    """
    if path := os.environ.get("UNISON_MNIST"):
        with np.load(path) as data:
            return (
                (data["x_train"][:TRAINING], data["y_train"][:TRAINING]),
                (data["x_test"][:TESTING], data["y_test"][:TESTING]),
            )
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 2, (10, 7, 7)).repeat(4, axis=1).repeat(4, axis=2)

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % 10
        noise = draw.integers(0, 80, (count, 28, 28))
        return (patterns[labels] * 170 + noise).astype(np.uint8), labels.astype(np.uint8)

    return some(TRAINING), some(TESTING)
