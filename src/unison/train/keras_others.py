"""Variables that a model's own steps use, and that are not reachable from the model.

A `train_step` may assign a variable of the program, or use an optimizer in its closure. To
resume a training, they are needed as much as the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from unison.cells import Cell
from unison.train.graph import cells_of, parts_of

if TYPE_CHECKING:
    from unison.keras.trainer import ReplicaTrainer


class OtherVariable:
    """Such a variable, as a checkpoint follows it.

    Args:
        cell: Its cell.
    """

    def __init__(self, cell: Cell):
        self.cell = cell
        self.name = cell.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.cell.aval.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.cell.aval.dtype)


def others_of(trainer: ReplicaTrainer) -> list[Any]:
    """Returns these variables of a trainer's steps, in the order of their first use."""
    others = trainer.other_cells()
    held = set(cells_of(trainer.model, parts_of)) if others else set()
    return [OtherVariable(cell) for cell in others if cell not in held]
