"""The round that all contestants of `DataWork` share: whole passes over a dataset, counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.protocol import Contestant
from benchmarks.workloads import DataWork


class Epochs(Contestant):
    """Reads batches and drops them.

    Args:
        work: The workload.
        begin_pass: Returns the batches of one pass: arrays, or tuples of arrays.
        versions: The versions of the libraries that matter.
        total: What the numbers of the batches' last arrays add up to in a pass; None for text.

    Raises:
        AssertionError: A pass is not what it should be.
    """

    def __init__(
        self,
        work: DataWork,
        begin_pass: Callable[[], Iterable[Any]],
        versions: dict[str, str],
        total: int | None,
    ):
        self._work = work
        self._begin_pass = begin_pass
        self._versions = versions
        last = [_last(batch) for batch in begin_pass()]
        found = sum(map(len, last))
        if found != work.examples:
            raise AssertionError(f"Expected {work.examples} examples in a pass, not {found}.")
        if total is not None:
            found = sum(int(np.asarray(array).sum(dtype=np.int64)) for array in last)
            if found != total:
                raise AssertionError(f"Expected numbers that add up to {total}, not {found}.")

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    def round(self) -> float:
        examples = 0
        begin = now = time.perf_counter()
        while not examples or now - begin < self._work.seconds:
            for batch in self._begin_pass():
                examples += len(_last(batch))
            now = time.perf_counter()
        return examples / (now - begin)


def _last(batch: Any) -> Any:
    return batch[-1] if isinstance(batch, tuple | list) else batch
