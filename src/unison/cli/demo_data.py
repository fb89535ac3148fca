"""The images that `unison demo` trains on: 28x28 pixels in 10 classes, as vectors of 784."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np

from unison.cli.errors import CommandError
from unison.storage.decoding import decoding
from unison.storage.npy import opened_zip, read_member

_PIXELS = 28 * 28
_CLASSES = 10
_KEYS = ("x_train", "y_train", "x_test", "y_test")


@dataclasses.dataclass(frozen=True)
class Images:
    """Training and test images.

    Attributes:
        x_train: float32 in [0, 1], of shape `[examples, 784]`.
        y_train: int32 in 0..9, of shape `[examples]`.
        x_test: Like `x_train`.
        y_test: Like `y_train`.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load_images(source: str) -> Images:
    """Returns the images that `--data` names: `digits`, `mnist`, or the path of an `.npz` file.

    Raises:
        CommandError: They are not available.
    """
    if source == "digits":
        return _digits()
    if source == "mnist":
        return _downloaded_mnist()
    return _from_file(pathlib.Path(source))


def _digits() -> Images:
    """Returns scikit-learn's 1797 scans of 8x8 pixels, enlarged; every fifth is for testing."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise CommandError(
            "--data digits needs scikit-learn: pip install 'unison[demo]', or pass --data mnist or "
            "the path of an .npz file"
        ) from error
    scans, labels = datasets.load_digits(return_X_y=True)
    # Three pixels for one, and a margin of two: 28 = 3 * 8 + 2 * 2, as in MNIST.
    enlarged = np.kron(scans.reshape(-1, 8, 8) / 16, np.ones((3, 3)))
    images = np.pad(enlarged, [(0, 0), (2, 2), (2, 2)])
    is_test = np.arange(len(labels)) % 5 == 4
    return Images(
        *_as_inputs(images[~is_test], labels[~is_test]),
        *_as_inputs(images[is_test], labels[is_test]),
    )


def _downloaded_mnist() -> Images:
    import keras

    try:
        (x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises a bare Exception if the download fails
        raise CommandError(
            f"--data mnist: Keras could not download MNIST ({error}). Pass --data digits, or the "
            "path of an .npz file with MNIST"
        ) from error
    return Images(*_as_inputs(x_train / 255, y_train), *_as_inputs(x_test / 255, y_test))


def _from_file(path: pathlib.Path) -> Images:
    if not path.is_file():
        raise CommandError(
            f"--data must be digits, mnist, or the path of an .npz file; there is no file {path}"
        )
    try:
        with path.open("rb") as file, decoding(str(path)):
            archive = opened_zip(file, compresses=True)
            missing = [key for key in _KEYS if f"{key}.npy" not in archive.namelist()]
            if missing:
                raise CommandError(f"{path} must hold the arrays {', '.join(_KEYS)}: {missing}")
            arrays = {key: read_member(archive, f"{key}.npy") for key in _KEYS}
    except OSError as error:  # or it is corrupt
        raise CommandError(f"{path} is not an .npz file of NumPy arrays: {error}") from error
    parts: list[Any] = []
    for part in ("train", "test"):
        images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
        _check(path, part, images, labels)
        # Pixels are bytes in Keras' file; floats are assumed to be in [0, 1] already.
        scale = 255 if np.issubdtype(images.dtype, np.integer) else 1
        parts += _as_inputs(images / scale, labels)
    return Images(*parts)


def _check(path: pathlib.Path, part: str, images: np.ndarray, labels: np.ndarray) -> None:
    is_empty = not images.ndim or not len(images)
    if is_empty or images[0].size != _PIXELS or images.dtype.kind not in "uif":
        raise CommandError(
            f"{path}: x_{part} must hold images of 28x28 pixels; it has shape {images.shape} and "
            f"dtype {images.dtype}"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "ui":
        raise CommandError(
            f"{path}: y_{part} must hold one integer for each of the {len(images)} images; it has "
            f"shape {labels.shape} and dtype {labels.dtype}"
        )
    if labels.min() < 0 or labels.max() >= _CLASSES:
        raise CommandError(
            f"{path}: y_{part} must hold classes from 0 to {_CLASSES - 1}; it has some from "
            f"{labels.min()} to {labels.max()}"
        )


def _as_inputs(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return images.reshape(len(images), -1).astype("float32"), labels.astype("int32")
