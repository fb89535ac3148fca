"""JPEG images that are trained on, and what is done with each: the same for all contestants."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.protocol import Contestant
from benchmarks.workloads import ImageInputWork

#: The sides of an image, and of the random part of it that is trained on.
SIDE = 160
CROP = 128
#: The border of that part at which the model, one dense layer, does not look.
BORDER = 48
PIXELS = (CROP - 2 * BORDER) ** 2
CLASSES = 10
RATE = 0.01

#: How many different images there are; a pass repeats them.
_DIFFERENT = 64


@functools.cache
def encoded() -> list[bytes]:
    """Returns the files: smooth random images."""
    generator = np.random.default_rng(5)
    return [_smooth(generator, SIDE, SIDE) for _ in range(_DIFFERENT)]


@functools.cache
def of_several_sizes() -> list[bytes]:
    """Returns files of smooth random images, whose sides have 300 to 500 pixels."""
    generator = np.random.default_rng(6)
    return [_smooth(generator, *generator.integers(300, 501, 2)) for _ in range(_DIFFERENT)]


def _smooth(generator: np.random.Generator, width: int, height: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    coarse = Image.fromarray(generator.integers(0, 256, (20, 20, 3), np.uint8))
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def files_of(work: ImageInputWork) -> tuple[list[bytes], np.ndarray]:
    """Returns the files of a pass, and their labels (int32)."""
    files = encoded()
    numbers = np.arange(work.images, dtype=np.int32)
    return [files[number % len(files)] for number in numbers], numbers % CLASSES


def decoded(file: bytes, generator: np.random.Generator) -> np.ndarray:
    """Returns a random part of an image, flipped or not, float32[CROP, CROP, 3] in 0 to 1."""
    from PIL import Image

    image = np.asarray(Image.open(io.BytesIO(file)))
    top, left = generator.integers(0, SIDE - CROP, 2)
    part = image[top : top + CROP, left : left + CROP]
    if generator.random() < 0.5:
        part = part[:, ::-1]
    return part.astype(np.float32) * np.float32(1 / 255)


class ImageTraining(Contestant):
    """Trains for a pass.

    Args:
        work: The workload.
        train: Trains for a pass, and waits until it is done.
        versions: The versions of the libraries that matter.
    """

    def __init__(self, work: ImageInputWork, train: Callable[[], Any], versions: dict[str, str]):
        self._work = work
        self._train = train
        self._versions = versions

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        begin = time.perf_counter()
        self._train()
        return self._work.images / (time.perf_counter() - begin)
