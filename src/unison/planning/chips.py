"""What the chips of a TPU generation can do at most, as their makers state it."""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from typing import NamedTuple


class Device(NamedTuple):
    """A device's part of a chip.

    Attributes:
        memory: Its bytes of memory.
        memory_rate: Bytes per second to and from it.
        flops: 16-bit floating-point operations per second.
        link_rate: Bytes per second to other chips, one way.
    """

    memory: float
    memory_rate: float
    flops: float
    link_rate: float


def device_of(generation: str) -> Device | None:
    """Returns what a device of a TPU generation can do; None where nobody has stated it.

    Examples:
        >>> device_of("v5e").flops
        197000000000000.0
    """
    stated = _stated().get(generation)
    if stated is None:
        return None
    count = stated["devices"]
    return Device(
        stated["memory"] / count,
        stated["memory_rate"] / count,
        stated["flops"] / count,
        stated["link_rate"] / 2 / count,
    )


@functools.cache
def _stated() -> dict[str, dict[str, float]]:
    text = importlib.resources.files("unison.planning").joinpath("chips.toml").read_text("utf-8")
    return tomllib.loads(text)
