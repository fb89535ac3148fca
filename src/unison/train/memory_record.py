"""Writing a worker's state into its host's memory; see `record_archive`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from unison.cells import Cell, StoredForm
from unison.storage.alignment import aligned
from unison.storage.decoding import name_of_dtype
from unison.storage.memory_slots import MemorySlots
from unison.train.chunk_plan import own_regions
from unison.train.loop_state import LoopState
from unison.train.record_archive import Place, array_at
from unison.train.snapshot import WHOLE, PartsSnapshot


class RecordWriter:
    """A record that is being written: begun at one instant, and finished in another thread.

    Args:
        state: The state.
        slots: The worker's slots.
        is_first: Whether it is the first worker of its host.
    """

    def __init__(self, state: LoopState, slots: MemorySlots, is_first: bool):
        self._slots = slots
        self._snapshot = PartsSnapshot()
        self._of_cells: dict[int, Cell] = {}
        #: The shapes and forms of the cells at that instant: programs may change the form.
        self._forms: dict[Cell, tuple[Any, StoredForm]] = {}
        self._nodes, arrays = state.described(self._stand_in)
        # The objects may change what is not a cell's.
        self._arrays = {
            key: array if id(array) in self._of_cells else np.array(array)
            for key, array in arrays.items()
        }
        self._places = _Places()
        self._cells = self._places.of_cells(self._forms, is_first)
        memory = slots.begin(self._places.size)
        try:
            for cell, places in self._cells.items():
                self._snapshot.add(cell, [array_at(memory, place) for place in places])
        except BaseException:
            self._snapshot.forget()
            raise

    def _stand_in(self, cell: Cell) -> np.ndarray:
        """Returns an array that stands for the value of a cell, of which no value is needed."""
        found = np.empty(())
        self._of_cells[id(found)] = cell
        self._forms[cell] = cell.aval, cell.stored_form
        return found

    @property
    def is_on_host(self) -> bool:
        """Whether the devices are the host's own cores, from which copying takes time."""
        return any(cell.placement.is_host for cell in self._cells)

    def finish(self, step: int, about: dict[str, Any]) -> float:
        """Copies what has not been copied yet, and completes the record.

        Args:
            step: The number of steps that the state has taken part in.
            about: What the reader is to know.

        Returns:
            The seconds that copies have taken in other threads than this one.
        """
        described = {}
        others = []
        for key, array in self._arrays.items():
            cell = self._of_cells.get(id(array))
            if cell is None:
                others.append((array, self._places.next(array)))
                described[key] = _described(array, [others[-1][1]], None)
            else:
                aval, form = self._forms[cell]
                described[key] = _described(aval, self._cells.get(cell), form)
        memory = self._slots.extend(self._places.size)
        for array, place in others:
            array_at(memory, place)[...] = array
        seconds = self._snapshot.finish()
        nodes = [vars(node) for node in self._nodes]
        self._slots.commit(step, {"about": about, "nodes": nodes, "arrays": described})
        return seconds

    def forget(self) -> None:
        """Drops what has not been copied."""
        self._snapshot.forget()


def size_of_record(state: LoopState, is_first: bool) -> int:
    """Returns the bytes of the variables in a record of a state."""
    places = _Places()
    places.of_cells(dict.fromkeys(state.followed_cells()), is_first)
    return places.size


class _Places:
    """The places of arrays in a record's data.

    Attributes:
        size: The bytes of the data.
    """

    def __init__(self) -> None:
        self.size = 0

    def next(self, array: Any, start: tuple[int, ...] = ()) -> Place:
        """Returns the place of a further array, or of a part that starts there."""
        place = Place(self.size, tuple(array.shape), np.dtype(array.dtype), start)
        self.size += aligned(array.nbytes)
        return place

    def of_cells(self, cells: Iterable[Cell], is_first: bool) -> dict[Cell, list[Place]]:
        """Returns the places of the parts of those of the cells that a worker keeps."""
        return {
            cell: [self.next(part, start) for start, part in _own_parts(cell.stored())]
            for cell in cells
            if is_first or not _is_equal_on_all(cell)
        }


def _own_parts(stored: jax.Array) -> list[tuple[tuple[int, ...], jax.Array]]:
    """Returns where the parts on this process's devices start, and the parts, without equal ones.

    They are those of `own_parts`.
    """
    if stored.is_fully_replicated:
        return [((0,) * stored.ndim, stored.addressable_data(0))]
    return [
        (tuple(begin for begin, _ in region), part) for region, part in own_regions(stored).items()
    ]


def _is_equal_on_all(cell: Cell) -> bool:
    """Whether all workers have the same copies of a cell."""
    return cell.placement.spans_processes and cell.layout in WHOLE and not cell.is_divided


def _described(
    array: Any, places: Sequence[Place] | None, form: StoredForm | None
) -> dict[str, Any]:
    """Returns the JSON for an array."""
    found: list[Any] | None = None
    if places is not None:
        found = [
            [each.offset, list(each.shape), name_of_dtype(each.dtype), list(each.start)]
            for each in places
        ]
    return {
        "shape": list(array.shape),
        "dtype": name_of_dtype(np.dtype(array.dtype)),
        "places": found,
        "form": form and [form.layout.value, list(form.division), form.extreme],
    }
