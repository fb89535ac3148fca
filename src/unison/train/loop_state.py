"""The state of a training loop: objects, and the random generators of libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from unison.cells import Cell
from unison.runtime.placement import Placement
from unison.train.archive import Node
from unison.train.checkpoint import Checkpoint
from unison.train.checkpoint_formats import AnyArchive
from unison.train.graph import cells_of, describe
from unison.train.random_state import LibraryGenerators


class LoopState(Checkpoint):
    """The state of a loop, which is kept elsewhere than in files.

    Args:
        placement: The replicas whose random streams are included, with the global generators of
            libraries.
        objects: The objects to follow, by name; see `Checkpoint`.
    """

    def __init__(self, placement: Placement | None = None, /, **objects: Any):
        super().__init__(library_generators=LibraryGenerators(placement), **objects)

    def include_streams_of(self, placement: Placement) -> None:
        """Includes the random streams of a placement's replicas."""
        self.library_generators = LibraryGenerators(placement)

    def followed_cells(self) -> list[Cell]:
        """Returns the cells of the variables that are included."""
        return cells_of(self._root, self._parts)

    def described(
        self, value_of: Callable[[Cell], np.ndarray]
    ) -> tuple[list[Node], dict[str, np.ndarray]]:
        """Returns the objects, and the arrays of their state; see `describe`."""
        return describe(self._root, self._parts, value_of)

    def take(self, archive: AnyArchive) -> None:
        """Restores the state that an archive holds."""
        self._read_archive(archive).expect_partial()
