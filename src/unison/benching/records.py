"""`Record`: the measurements of one worker in one run of the program."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """The measurements of one worker.

    Attributes:
        loop: The name of the loop.
        replicas: The number of replicas of all workers.
        device: The kind of this worker's first device.
        steps: The total number of steps.
        examples: The number of examples in a step, on all replicas; None if it is unknown.
        launches: The number of steps of each launch that was measured for the pace, and the seconds
            since the end of the previous one; after other steps (those of an
            evaluation, say), since the loop resumed.
        waited: The seconds for which the loop waited for its input during those launches.
        single: The seconds of a step that starts when the previous one has ended.
        alone: The seconds in which the replicas compute their parts of a step; None if they are
            unknown.
        why_not: The reason why they are unknown.
        memory: The maximum resident memory of the process in bytes, up to then.
        device_memory: The maximum memory in use of the device with the most; None if not reported.
        versions: The versions of the libraries.
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
        """The number of steps that were measured for the pace."""
        return sum(steps for steps, _ in self.launches)

    @property
    def seconds(self) -> float:
        """Their duration."""
        return sum(seconds for _, seconds in self.launches)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, said: dict[str, Any]) -> Record:
        """Returns a record, given the result of its `as_dict`, possibly converted to JSON and back.

        Raises:
            TypeError: It is something else.
        """
        launches = [(int(steps), float(seconds)) for steps, seconds in said["launches"]]
        return cls(**{**said, "launches": launches})
