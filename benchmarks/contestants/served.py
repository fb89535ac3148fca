"""The round that all contestants of `ServiceWork` share: elements of a dataset without end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.protocol import Contestant
from benchmarks.workloads import ServiceWork

#: The images of a batch, and the part of an image that is used.
BATCH = 32
CROP = 128

#: The part of a round's elements that is read before, since buffers were filled in the meantime.
_PART_BEFORE = 1.5


class Served(Contestant):
    """Reads elements and drops them.

    Args:
        work: The workload.
        elements: The elements, without end.
        versions: The versions of the libraries that matter.
    """

    def __init__(self, work: ServiceWork, elements: Iterable[Any], versions: dict[str, str]):
        self._elements = iter(elements)
        self._versions = versions
        self._examples_of_element = BATCH if work.load == "jpeg" else 1
        self._count = work.examples // self._examples_of_element
        #: What has to stay as long as elements are read.
        self.kept: Any = None

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        self._read(int(_PART_BEFORE * self._count) + 1)
        begin = time.perf_counter()
        self._read(self._count)
        return self._count * self._examples_of_element / (time.perf_counter() - begin)

    def _read(self, count: int) -> None:
        for _ in itertools.islice(self._elements, count):
            pass
