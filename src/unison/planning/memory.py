"""The memory that a step takes on each device, and options that reduce it."""

from __future__ import annotations

import dataclasses
import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
#: XLA's message about the memory that a program needs and that is available.
_NEEDED = [
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
]


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The bytes that a step takes on each device.

    Attributes:
        state: The state that is kept between steps, by kind: for a model that is trained
            `"trainable_variables"`, `"optimizer_variables"`, ...
        batch: The device's part of the batch, and other arguments.
        gradients: What the gradients of all weights take: a part of `temporaries`, as far as they
            are all there at once.
        temporaries: What lives within the step: gradients, activations, buffers.
        results: The results of the step beside the state.
        code: The program itself.
    """

    state: dict[str, int]
    batch: int
    gradients: int
    temporaries: int
    results: int
    code: int

    @property
    def total(self) -> int:
        """The sum, without the gradients, which are in `temporaries`."""
        kept = sum(self.state.values())
        return kept + self.batch + self.temporaries + self.results + self.code

    @property
    def activations(self) -> int:
        """The minimum part of `temporaries` that is not gradients: activations and buffers.

        More, if not all gradients are there when a step takes most.
        """
        return max(0, self.temporaries - self.gradients)


class DoesNotFitError(MemoryError):
    """A step takes more memory than a device has.

    Attributes:
        needed: The bytes that XLA found necessary.
        available: The bytes that there are.
    """

    def __init__(self, message: str, needed: int, available: int):
        super().__init__(message)
        self.needed = needed
        self.available = available


def needed_and_available(message: str) -> tuple[int, int] | None:
    """Returns the bytes in XLA's message of exhausted memory; None if it has none.

    Examples:
        >>> needed_and_available("Used 20.5G of 15.75G hbm. Exceeded by ...")
        (22011707392, 16911433728)
    """
    for pattern in _NEEDED:
        found = pattern.search(message)
        if found is not None:
            needed, needs_unit, there, there_unit = found.groups()
            return (
                round(float(needed) * _UNITS[needs_unit]),
                round(float(there) * _UNITS[there_unit]),
            )
    return None


def in_units(count: float) -> str:
    """Returns a number of bytes as people read it.

    Examples:
        >>> in_units(1536), in_units(3 * 2**30)
        ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
