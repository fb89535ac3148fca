"""Notes that a function which is being traced captures the value of state.

JAX makes a constant of a variable that a function reads and does not take as an argument: the
compiled program would have the value of the moment of its trace for ever. Keras' own steps take
the state of the model only. Who traces one asks what else it has used, and traces it again with
that among its inputs; or asks for nothing but its shapes, so that assignments must not happen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from unison.thread_local import ThreadLocal

_noted: ThreadLocal[list[str] | None] = ThreadLocal(None)


class StateCapturedError(Exception):
    """A step uses state that it does not take.

    Args:
        names: The names of the state.
    """

    def __init__(self, names: Sequence[str]):
        super().__init__(
            f"The step uses {', '.join(dict.fromkeys(names))}, which it does not take."
        )


@contextlib.contextmanager
def noting_captured() -> Iterator[list[str]]:
    """Context manager in which state that is used outside of every lift is noted.

    Assignments to it have no effect.

    Yields:
        The names of the state used so far.
    """
    names: list[str] = []
    with _noted.bound_to(names):
        yield names


def note_captured(name: str) -> bool:
    """Notes the use of state; returns whether somebody notes it, so that it is not assigned."""
    names = _noted.value
    if names is None:
        return False
    names.append(name)
    return True
