"""The passes over a plan: every iteration from the first element is one, with a number."""

from __future__ import annotations

import threading
from typing import Any

from unison.storage.decoding import whole_number


class Passes:
    """Counts the passes over a plan, from all threads.

    The seed, an element's index and the number of the pass determine random numbers.

    Args:
        begun: The number of passes that have begun.

    Examples:
        >>> passes = Passes()
        >>> passes.begin(), passes.begin()
        (0, 1)
        >>> passes.resume(5)
        >>> passes.begin()
        6
    """

    def __init__(self, begun: int = 0):
        self._begun = begun
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Returns the number of a new pass."""
        with self._lock:
            self._begun += 1
            return self._begun - 1

    def resume(self, number: int) -> None:
        """Records that pass `number`, begun elsewhere, continues here: later ones follow it."""
        with self._lock:
            self._begun = max(self._begun, number + 1)

    def state(self) -> int:
        """Returns the number of passes that have begun."""
        with self._lock:
            return self._begun

    def restore(self, state: int) -> None:
        """Sets the number of passes that have begun to `state`. Raises: ValueError."""
        with self._lock:
            self._begun = whole_number(state)

    def __reduce__(self) -> Any:
        return Passes, (self.state(),)  # a lock cannot be copied
