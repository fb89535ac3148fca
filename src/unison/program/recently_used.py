"""A bounded cache of compiled programs, which evicts the least recently used one first."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: The maximum number of compiled programs. Each one of a small Keras model takes about 3 MB.
MOST_PROGRAMS = 256


class RecentlyUsed(Generic[K, V]):
    """A mapping of at most `capacity` entries.

    Args:
        capacity: The number of entries.

    Examples:
        >>> programs = RecentlyUsed(capacity=2)
        >>> programs.keep("a", 1), programs.keep("b", 2), programs.get("a"), programs.keep("c", 3)
        (None, None, 1, None)
        >>> list(programs)
        ['a', 'c']
    """

    def __init__(self, capacity: int = MOST_PROGRAMS):
        self._capacity = capacity
        self._entries: collections.OrderedDict[K, V] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Iterates over the keys, the least recently used one first."""
        return iter(list(self._entries))

    def values(self) -> list[V]:
        """Returns the values."""
        return list(self._entries.values())

    def get(self, key: K) -> V | None:
        """Returns the value of `key` and marks it as used; None if there is none."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def keep(self, key: K, value: V) -> None:
        """Adds or replaces an entry; evicts the least recently used ones beyond the capacity."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def remove(self, key: K) -> None:
        """Removes an entry."""
        del self._entries[key]

    def clear(self) -> None:
        """Removes all entries."""
        self._entries.clear()
