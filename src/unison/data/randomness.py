"""Random numbers that are determined by a seed and counters, wherever they are drawn."""

from __future__ import annotations

import numpy as np


def random_generator(seed: int, *counters: int) -> np.random.Generator:
    """Returns the generator of a seed and counters (an epoch, a purpose).

    Examples:
        >>> random_generator(7, 0).integers(100) == random_generator(7, 0).integers(100)
        np.True_
    """
    entropy = [seed % 2**64, *counters]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def fresh_seed() -> int:
    """Returns a seed, if the user has given none.

    It is drawn from NumPy's global generator, so that `np.random.seed` (and with it
    `keras.utils.set_random_seed`) makes a program repeatable.
    """
    return int(np.random.randint(2**31))
