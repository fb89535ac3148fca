"""The state of a loop of Keras while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from unison.cells import Cell
from unison.interrupts import signals_held
from unison.keras.step import CompiledStep


class Running:
    """The state of a running loop: the stored arrays of its cells, which it borrows.

    Args:
        cells: The cells whose arrays are taken.
        give_back: Called when a cell is read from elsewhere: returns the arrays to it, if possible.
    """

    def __init__(self, cells: list[Cell], give_back: Callable[[], None]):
        self.give_back = give_back
        self.cells = cells
        #: The step that the loop runs.
        self.step: CompiledStep | None = None
        self._thread = threading.get_ident()
        with signals_held:
            self.state = [cell.take() for cell in cells]
            for cell in cells:
                cell.lend(self)

    @property
    def is_of_this_thread(self) -> bool:
        """Whether it runs in the thread that asks."""
        return self._thread == threading.get_ident()

    def store(self) -> None:
        """Returns the arrays to the cells, after all steps."""
        if self.step is not None:
            self.step.finish(self.state)
        self.put_back()

    def put_back(self) -> None:
        """Returns the arrays to the cells as they are.

        A cell that another thread or a signal handler has assigned meanwhile keeps that value.
        """
        with signals_held:
            for cell, array in zip(self.cells, self.state, strict=True):
                cell.take_back(self, array)
