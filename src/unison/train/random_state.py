"""The random generators of a process that belong to no object: where they are.

NumPy's and Python's, Keras' global one, and those that rooms above register. A worker that joins,
and a program that is started again, continue with the state that the others have, or that was
saved.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from unison.runtime.placement import Placement


class GlobalGenerator(Protocol):
    """A generator of a library, one for the process."""

    def get_state(self, placement: Placement | None) -> Any:
        """Returns where it is: numbers, text, arrays, and lists and dictionaries of them.

        Args:
            placement: The replicas whose streams are part of it. None: only what the host counts,
                which is read in every step.
        """

    def set_state(self, state: Any, placement: Placement | None) -> None:
        """Goes to where another process's generator was."""


class _OfKeras:
    """Keras' global seed generator, which draws outside of compiled programs."""

    def get_state(self, placement: Placement | None) -> Any:
        generator = self._generator()
        return None if generator is None else np.asarray(generator.state.value)

    def set_state(self, state: Any, placement: Placement | None) -> None:
        generator = self._generator()
        if generator is None and state is not None:
            # With a seed: else Keras would draw one from Python's generator.
            generator = sys.modules["keras"].random.SeedGenerator(0)
            self._attributes().set_global_attribute(_SEED_GENERATOR, generator)
        if state is not None:
            generator.state.assign(state)
        elif generator is not None:  # Keras makes one again where one is wanted
            self._attributes().set_global_attribute(_SEED_GENERATOR, None)

    def _generator(self) -> Any:
        if "keras" not in sys.modules:
            return None
        return self._attributes().get_global_attribute(_SEED_GENERATOR)

    @staticmethod
    def _attributes() -> Any:
        return sys.modules["keras"].src.backend.common.global_state


_SEED_GENERATOR = "global_seed_generator"

#: The generators of libraries, by name.
global_generators: dict[str, GlobalGenerator] = {"keras": _OfKeras()}


def snapshot() -> Callable[[], None]:
    """Returns what brings all these generators, but for replicas' streams, back to where they are.

    It takes some tens of microseconds, most of them NumPy's.
    """
    of_numpy, of_python, others = np.random.get_state(), random.getstate(), of_libraries()

    def go_back() -> None:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        set_of_libraries(others)

    return go_back


def numpy_and_python() -> dict[str, Any]:
    """Returns where the global generators of NumPy and of Python are, as a checkpoint keeps it."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "numpy": [kind, np.asarray(keys), *rest],
        "python": [version, np.array(numbers, np.uint32), gauss],
    }


def set_numpy_and_python(then: dict[str, Any]) -> None:
    """Goes to where these generators were; see `numpy_and_python`."""
    kind, keys, *rest = then["numpy"]
    np.random.set_state((kind, keys, *rest))
    version, numbers, gauss = then["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))


def of_libraries(placement: Placement | None = None) -> dict[str, Any]:
    """Returns where the generators of libraries are; see `GlobalGenerator.get_state`."""
    return {name: each.get_state(placement) for name, each in global_generators.items()}


def set_of_libraries(then: dict[str, Any], placement: Placement | None = None) -> None:
    """Goes to where the generators of libraries were; see `of_libraries`."""
    for name, state in then.items():
        if name in global_generators:
            global_generators[name].set_state(state, placement)


class LibraryGenerators:
    """The generators of libraries, as a checkpoint follows them.

    Args:
        placement: The replicas whose streams are part of them.
    """

    def __init__(self, placement: Placement | None):
        self._placement = placement

    def get_state(self) -> dict[str, Any]:
        return of_libraries(self._placement)

    def set_state(self, state: dict[str, Any]) -> None:
        set_of_libraries(state, self._placement)
