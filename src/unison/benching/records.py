"""`Record`: what one worker has measured in one run of the program."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """What one worker has measured.

    Attributes:
        loop: Whose steps they are.
        replicas: How many replicas all workers have.
        device: What this worker's first device is.
        steps: How many steps have been run in all.
        examples: How many examples a step has, on all replicas; None where that is not known.
        launches: The number of steps of each launch by which the pace was taken, and the seconds
            since the one before was done; where other steps ran in between (those of an
            evaluation, say), since the loop went on.
        waited: The seconds of those launches in which the loop waited for its input.
        single: The seconds that a step takes that starts when the one before it is done.
        alone: The seconds in which the replicas compute their parts of a step; None where that is
            not known.
        why_not: Why not.
        memory: The bytes that the process has used at most, by then.
        device_memory: The same of the device that used most; None where devices do not tell.
        versions: Those of the libraries.
    """

    loop: str
    replicas: int
    device: str
    steps: int
    examples: int | None
    launches: list[tuple[int, float]]
    waited: float
    single: list[float]
    alone: float | None
    why_not: str | None
    memory: int | None
    device_memory: int | None
    versions: dict[str, str]

    @property
    def paced_steps(self) -> int:
        """How many steps the pace was taken by."""
        return sum(steps for steps, _ in self.launches)

    @property
    def seconds(self) -> float:
        """How long these took."""
        return sum(seconds for _, seconds in self.launches)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, said: dict[str, Any]) -> Record:
        """Returns what `as_dict` has made a dictionary of; JSON may lie between.

        Raises:
            TypeError: It is something else.
        """
        launches = [(int(steps), float(seconds)) for steps, seconds in said["launches"]]
        return cls(**{**said, "launches": launches})
