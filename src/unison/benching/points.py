"""Points of a measurement: the number of replicas, the batch size, the size of the data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class Scaling(enum.Enum):
    """The quantity that stays constant when replicas are added.

    Attributes:
        STRONG: The global batch: each replica has less to do.
        WEAK: A replica's part of it: the global batch grows.
        BOTH: First the one, then the other.
    """

    STRONG = "strong"
    WEAK = "weak"
    BOTH = "both"


class SizeError(ValueError):
    """A size that nothing can be measured with."""


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """One of the sizes that are measured.

    Attributes:
        workers: The number of processes.
        devices: The number of devices of each; there is one replica per device.
        batch: The number of examples in a global batch; None if the program determines it.
        examples: The total number of examples; None if the program determines it.
    """

    workers: int
    devices: int
    batch: int | None
    examples: int | None

    @property
    def replicas(self) -> int:
        """The number of replicas of all workers."""
        return self.workers * self.devices

    def __str__(self) -> str:
        """Describes it in words.

        Examples:
            >>> print(Point(2, 1, 64, None))
            2 workers, batch 64
            >>> print(Point(1, 4, 256, 8192))
            4 devices, batch 256, 8192 examples
        """
        parts = []
        if self.workers > 1:
            each = f" of {self.devices} devices" if self.devices > 1 else ""
            parts.append(f"{self.workers} workers{each}")
        else:
            parts.append(f"{self.devices} device{'s' if self.devices > 1 else ''}")
        parts += [f"batch {self.batch}"] if self.batch else []
        parts += [f"{self.examples} examples"] if self.examples else []
        return ", ".join(parts)


def points(
    places: Sequence[tuple[int, int]],
    batches: Sequence[int],
    examples: Sequence[int],
    scaling: Scaling = Scaling.BOTH,
) -> list[Point]:
    """Returns the sizes that are measured, each once, from few replicas to many.

    Args:
        places: The number of workers, and the number of devices of each.
        batches: The global batches with the fewest replicas; none where the program decides.
        examples: The sizes of the data; none where the program decides.
        scaling: What becomes of the batches with more replicas.

    Raises:
        SizeError: There are more replicas than examples in a batch, or a batch is larger than the
            data.

    Examples:
        >>> [point.batch for point in points([(1, 1), (1, 2)], [64], [1000])]
        [64, 64, 128]
    """
    first = min(workers * devices for workers, devices in places)
    found: dict[Point, None] = {}
    told_batches: Sequence[int | None] = batches or [None]
    told_examples: Sequence[int | None] = examples or [None]
    for workers, devices in sorted(places, key=lambda place: place[0] * place[1]):
        factor, rest = divmod(workers * devices, first)
        if rest and batches and scaling is not Scaling.STRONG:
            raise SizeError(
                f"Weak scaling takes multiples of the fewest replicas, {first}. Received: "
                f"{workers * devices}. Leave it out, or give --scaling strong."
            )
        for batch in told_batches:
            grown = None if batch is None else batch * factor
            wanted = {
                Scaling.STRONG: [batch],
                Scaling.WEAK: [grown],
                Scaling.BOTH: [batch, grown],
            }[scaling]
            for size in wanted:
                for count in told_examples:
                    found[_checked(Point(workers, devices, size, count))] = None
    return [*found]


def _checked(point: Point) -> Point:
    if point.batch is not None and point.batch < point.replicas:
        raise SizeError(
            f"A batch of {point.batch} has too few examples for {point.replicas} replicas. Give a "
            "larger --batch, or fewer replicas."
        )
    if point.batch is not None and point.examples is not None and point.examples < point.batch:
        raise SizeError(
            f"A batch of {point.batch} is larger than the data, {point.examples} examples. Give "
            "more --examples, or a smaller --batch (with weak scaling, it grows with the replicas)."
        )
    return point
