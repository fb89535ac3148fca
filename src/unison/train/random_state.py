"""The state of a process's global random generators.

NumPy's and Python's, Keras' global one, and those that other packages register. A joining worker
continues with the others' state, a restarted program with the saved one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from unison.storage.decoding import decoding, plain_list, real_number, whole_number

if TYPE_CHECKING:
    from unison.runtime.placement import Placement


class GlobalGenerator(Protocol):
    """A library's global generator."""

    def get_state(self, placement: Placement | None) -> Any:
        """Returns its state: numbers, text, arrays, and lists and dictionaries of them.

        Args:
            placement: The replicas whose streams are included. None: only state on the host,
                which is read in every step.
        """

    def set_state(self, state: Any, placement: Placement | None) -> None:
        """Restores the state of another process's generator."""


class _OfKeras:
    """Keras' global seed generator, which is used outside of compiled programs."""

    def get_state(self, placement: Placement | None) -> Any:
        generator = self._generator()
        return None if generator is None else np.asarray(generator.state.value)

    def set_state(self, state: Any, placement: Placement | None) -> None:
        generator = self._generator()
        if generator is None and state is not None:
            # With a seed: otherwise Keras would draw one from Python's generator.
            generator = sys.modules["keras"].random.SeedGenerator(0)
            self._attributes().set_global_attribute(_SEED_GENERATOR, generator)
        if state is not None:
            generator.state.assign(state)
        elif generator is not None:  # Keras creates one again when it needs it
            self._attributes().set_global_attribute(_SEED_GENERATOR, None)

    def _generator(self) -> Any:
        if "keras" not in sys.modules:
            return None
        return self._attributes().get_global_attribute(_SEED_GENERATOR)

    @staticmethod
    def _attributes() -> Any:
        return sys.modules["keras"].src.backend.common.global_state


_SEED_GENERATOR = "global_seed_generator"

#: The numbers of 32 bits in the state of a Mersenne Twister.
_WORDS = 624

#: The libraries' generators, by name.
global_generators: dict[str, GlobalGenerator] = {"keras": _OfKeras()}


def snapshot() -> Callable[[], None]:
    """Returns a function that resets these generators, without replicas' streams, to now.

    It takes some tens of microseconds, most of them NumPy's.
    """
    of_numpy, of_python, others = np.random.get_state(), random.getstate(), of_libraries()

    def go_back() -> None:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        set_of_libraries(others)

    return go_back


def numpy_and_python() -> dict[str, Any]:
    """Returns the state of the global generators of NumPy and of Python, for a checkpoint."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "numpy": [kind, np.asarray(keys), *rest],
        "python": [version, np.array(numbers, np.uint32), gauss],
    }


def set_numpy_and_python(then: dict[str, Any]) -> None:
    """Restores the state of these generators; see `numpy_and_python`."""
    with decoding("The state of the generators of NumPy and Python"):
        of_numpy, of_python = checked_numpy_and_python(then)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def checked_numpy_and_python(then: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns a decoded state as the arguments of `np.random.set_state` and `random.setstate`.

    NumPy itself takes any position: it would draw numbers from the memory behind its own.

    Args:
        then: The decoded state; see `numpy_and_python`.

    Raises:
        ValueError, KeyError: It is not the state of such generators.
    """
    kind, keys, place, has_gauss, gauss = plain_list(then["numpy"], 5)
    whole_number(place, most=_WORDS)
    whole_number(has_gauss, most=1)
    real_number(gauss)
    version, numbers, next_gauss = plain_list(then["python"], 3)
    if next_gauss is not None:
        real_number(next_gauss)
    for words, size in ((keys, _WORDS), (numbers, _WORDS + 1)):
        is_valid = isinstance(words, np.ndarray) and words.dtype == np.uint32
        # Of zeros alone, the Mersenne Twister makes nothing but zeros.
        if not is_valid or words.shape != (size,) or not words[1:_WORDS].any():
            raise ValueError(f"expected {size} words of a Mersenne Twister")
    if (kind, version) != ("MT19937", random.Random.VERSION):
        raise ValueError(f"expected a Mersenne Twister, received {kind!r:.80}, {version!r:.80}")
    whole_number(int(numbers[-1]), most=_WORDS)
    own = (version, tuple(numbers.tolist()), next_gauss)
    return (kind, keys, place, has_gauss, gauss), own


def of_libraries(placement: Placement | None = None) -> dict[str, Any]:
    """Returns the states of the libraries' generators; see `GlobalGenerator.get_state`."""
    return {name: each.get_state(placement) for name, each in global_generators.items()}


def set_of_libraries(then: dict[str, Any], placement: Placement | None = None) -> None:
    """Restores the states of the libraries' generators; see `of_libraries`."""
    for name, state in then.items():
        if name in global_generators:
            global_generators[name].set_state(state, placement)


class LibraryGenerators:
    """The libraries' generators, as an object for checkpoints.

    Args:
        placement: The replicas whose streams are included.
    """

    def __init__(self, placement: Placement | None):
        self._placement = placement

    def get_state(self) -> dict[str, Any]:
        return of_libraries(self._placement)

    def set_state(self, state: dict[str, Any]) -> None:
        with decoding("The state of the libraries' random generators"):
            set_of_libraries(state, self._placement)
