"""The points that a worker of an elastic job passes through, for listeners.

Only tests install listeners: `faults`, which injects faults at such points, and `history`, which
records what takes effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Called with a point's name, the number of steps that have taken effect (None: unchanged), and
#: further details.
Listener = Callable[[str, int | None, Mapping[str, Any]], None]

listeners: list[Listener] = []


def happened(point: str, step: int | None = None, **about: Any) -> None:
    """Notifies the listeners, if any, that the worker has reached a point."""
    if listeners:
        for listener in listeners:
            listener(point, step, about)
