"""What a worker of an elastic job passes through, for whoever looks on.

Nobody does, unless the job is tested: see `faults`, which lets something go wrong at such a point,
and `history`, which writes down what takes effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Called with a point's name, the number of steps that have taken effect (None: as it was before),
#: and more about it.
Listener = Callable[[str, int | None, Mapping[str, Any]], None]

listeners: list[Listener] = []


def happened(point: str, step: int | None = None, **about: Any) -> None:
    """Tells those who look on, if there are any, that the worker has come to a point."""
    if listeners:
        for listener in listeners:
            listener(point, step, about)
