"""Backups of `fit` that somebody else has made: right checksums, and anything behind them."""

import numpy as np
import pytest

from unison.errors import DataLossError
from unison.train.random_state import numpy_and_python, set_numpy_and_python

# -- random numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [-1, 625, 10**6, 2**40, 1.0])
def test_random_numbers_are_not_drawn_from_memory_behind_the_state(place):
    state = numpy_and_python()
    state["numpy"][2] = place
    before = np.random.get_state()[1].tolist()
    with pytest.raises(DataLossError, match="expected a whole number from 0 to 624"):
        set_numpy_and_python(state)
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.parametrize("name", ["numpy", "python"])
def test_a_generator_of_zeros_alone_is_corrupt(name):
    """NumPy would never find a normal number in it."""
    state = numpy_and_python()
    state[name][1] = np.zeros_like(state[name][1])
    with pytest.raises(DataLossError, match="words of a Mersenne Twister"):
        set_numpy_and_python(state)
