"""A check that the copies of variables are equal on all workers, as they must be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import jax
import numpy as np

from unison.cells import Cell, Layout
from unison.errors import InternalError
from unison.runtime.process_group import all_gather_json
from unison.runtime.transfers import shards_of

#: The layouts whose copies are equal by design.
_EQUAL = (Layout.MIRRORED, Layout.STREAM)


class EqualCopies:
    """Compares digests of mirrored variables between workers at regular intervals.

    Args:
        every: The number of steps in an interval, the same on all workers.
    """

    def __init__(self, every: int):
        if every < 1:
            raise ValueError(f"Expected a number of steps, at least 1. Received: {every}")
        self._every = every
        self._steps = 0

    def is_due(self) -> bool:
        """Counts a step, and returns whether the check is due after it."""
        self._steps += 1
        return self._steps % self._every == 0

    def check(self, stored: Iterable[tuple[Cell, jax.Array]]) -> None:
        """Compares the stored arrays of cells, in the same order on all workers.

        Raises:
            InternalError: Some differ; the message names the first variable and worker.
        """
        own = {
            f"{cell.serial_number} {cell.name}": [_digest(s.data) for s in shards_of(array)]
            for cell, array in stored
            if cell.layout in _EQUAL
        }
        of_all = all_gather_json(own, f"The digests of variables after step {self._steps}")
        # Unused variables may have been deleted on some workers and not yet on others.
        common = [key for key in of_all[0] if all(key in of_worker for of_worker in of_all)]
        if own and not common:
            raise InternalError(
                message=f"After step {self._steps}, the workers have no variable in common. They "
                f"run different programs. Received: {[list(of_worker) for of_worker in of_all]}"
            )
        for key in common:
            for worker, of_worker in enumerate(of_all):
                if {*of_worker[key]} != {of_all[0][key][0]}:
                    name = key.partition(" ")[2]
                    raise InternalError(
                        message=f"After step {self._steps}, variable {name!r} differs between "
                        f"worker 0 and worker {worker}. Either a value that differs between "
                        "workers is assigned outside the replicas, or a machine computes different "
                        "results."
                    )


def _digest(copy: jax.Array) -> str:
    return hashlib.blake2b(np.asarray(copy).tobytes(), digest_size=16).hexdigest()
