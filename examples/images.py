"""The images that the examples train on: 28x28 pixels in 10 classes, as vectors of 784."""

import numpy as np

PIXELS = 784
CLASSES = 10


def load(path):
    """Returns `(x_train, y_train), (x_test, y_test)`, with pixels from 0 to 1.

    Args:
        path: An .npz file with the keys of Keras' MNIST, such as `~/.keras/datasets/mnist.npz`.
            None makes images: noise around one pattern for each class.
    """
    if path is None:
        return synthetic(2000, seed=1), synthetic(500, seed=2)
    with np.load(path) as file:
        return tuple(
            (
                file[f"x_{part}"].reshape(-1, PIXELS).astype("float32") / 255,
                file[f"y_{part}"].astype("int32"),
            )
            for part in ("train", "test")
        )


def synthetic(count, seed):
    patterns = np.random.default_rng(0).random((CLASSES, PIXELS), dtype="float32")
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count).astype("int32")
    noise = rng.random((count, PIXELS), dtype="float32")
    return 0.3 * patterns[labels] + 0.7 * noise, labels


def batches(images, labels, size, seed):
    """Yields the examples once, in an order that `seed` chooses; the last batch may be smaller."""
    order = np.random.default_rng(seed).permutation(len(images))
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield images[chosen], labels[chosen]
