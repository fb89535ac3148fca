"""The state that the workers of a changing group exchange, and leave for a later run of the job.

Most of the state is the same on all workers, and one of them sends it to those that lack it.
`ON_READ` variables differ: each replica has its own copy, and reading combines all. To keep sums
correct, a joining worker gets zeros; and when a job resumes that has ended, the parts that
its workers have left are combined as reading does, and each replica gets its share.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from unison.cells import Cell, Layout, VariableAggregation, has_cell
from unison.runtime.placement import Placement
from unison.storage.checksummed import header_and_data
from unison.storage.decoding import decoding, plain_dict, whole_number
from unison.train.archive import Archive, Node, write_archive_to
from unison.train.graph import key_of, reachable
from unison.train.loop_state import LoopState


class Handover(LoopState):
    """The state of a worker in a group that changes. All workers create it of the same objects.

    Args:
        of_all: Returns the cells in which this worker has the combined value of the replicas of all
            workers, while it is not in a group: no part of the value is its own.
        placement: The replicas whose random streams are included, with the global generators of
            libraries.
        objects: The objects to follow, by name; see `Checkpoint`.

    Examples:
        >>> import unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     seen = unison.Variable(
        ...         6.0,
        ...         synchronization=unison.VariableSynchronization.ON_READ,
        ...         aggregation=unison.VariableAggregation.SUM,
        ...     )
        >>> state = Handover(seen=seen)
        >>> common, part = state.pack(), state.pack_part()
        >>> state.unpack(common)  # as a joining worker does
        >>> float(seen)
        0.0
        >>> state.resume(common, [part, part])  # as two workers have left them
        >>> float(seen)
        24.0
    """

    def __init__(
        self,
        of_all: Callable[[], Collection[Cell]] = tuple,
        placement: Placement | None = None,
        /,
        **objects: Any,
    ):
        super().__init__(placement, **objects)
        self._of_all = of_all

    def pack(self) -> bytes:
        """Returns the state, without sums, which are zero."""
        own = set(self._parts_of_its_own().values())

        def value_of(cell: Cell) -> np.ndarray:
            is_left_out = cell in own and cell.reading_aggregation is VariableAggregation.SUM
            return np.zeros(cell.aval.shape, cell.aval.dtype) if is_left_out else cell.numpy()

        return _packed(*self.described(value_of))

    def pack_part(self) -> bytes:
        """Returns this worker's part of what reading combines; empty if there is none."""
        own = self._parts_of_its_own()
        if not own:
            return b""
        cells = set(own.values())
        nothing = np.zeros(())
        nodes, arrays = self.described(lambda cell: cell.numpy() if cell in cells else nothing)
        for node in nodes:
            node.state = None
            node.variable = node.variable if node.variable in own else None
        about = {
            "replicas": max(len(cell.placement.local_replicas) for cell in cells),
            "aggregations": {key: cell.reading_aggregation.value for key, cell in own.items()},
        }
        parts = {key: arrays[key] for key in own}
        return json.dumps(about).encode() + b"\n" + _packed(nodes, parts)

    def unpack(self, held: bytes, keeps_part: bool = False) -> None:
        """Restores another worker's state.

        Args:
            held: The result of the other worker's `pack`.
            keeps_part: Whether this worker's part of what reading combines is kept; otherwise, its
                part of a sum is zero, and anything else is a copy of the other worker's.
        """
        own = self._parts_of_its_own().values() if keeps_part else ()
        kept = {cell: cell.stored() for cell in own}
        self.take(_archive(held))
        for cell, array in kept.items():
            cell.put(array)

    def resume(self, held: bytes, parts: Sequence[bytes]) -> None:
        """Restores the state of an earlier run of the job, on all workers.

        Args:
            held: The result of `pack` in that run.
            parts: The results of `pack_part` on its workers, in order.
        """
        self.take(_archive(held))
        if not parts:
            return
        nodes, values = _combined(parts)
        self.take(_archive(_packed(nodes, values)))

    def _parts_of_its_own(self) -> dict[str, Cell]:
        """Returns the cells whose copies are parts of what reading combines, by key."""
        of_all = set(self._of_all())
        return {
            key_of(path, "VARIABLE_VALUE"): owner.cell
            for path, owner in reachable(self._root, self._parts)
            if has_cell(owner) and _is_part(owner.cell) and owner.cell not in of_all
        }


def _is_part(cell: Cell) -> bool:
    """Whether reading combines the copies of a cell with those of other workers."""
    return (
        cell.layout is Layout.LOCAL
        and cell.array is not None
        and cell.reading_aggregation is not VariableAggregation.NONE
        and (cell.placement.is_elastic or not cell.is_alone)
    )


def _combined(parts: Sequence[bytes]) -> tuple[list[Node], dict[str, np.ndarray]]:
    """Returns the objects, and the combined value of the parts of all workers."""
    found: dict[str, list[tuple[np.ndarray, int]]] = {}
    aggregations: dict[str, str] = {}
    nodes: list[Node] = []
    with decoding("What the workers have left", "Remove it to start without it."):
        for part in parts:
            header, held = header_and_data(part)
            aggregations |= plain_dict(header["aggregations"])
            replicas = whole_number(header["replicas"], least=1)
            archive = _archive(bytes(held))
            nodes = nodes or archive.nodes
            for key in archive.arrays:
                found.setdefault(key, []).append((archive.read(key), replicas))
        return nodes, {
            key: _combine(VariableAggregation(aggregations[key]), pairs)
            for key, pairs in found.items()
        }


def _combine(how: VariableAggregation, of_workers: Sequence[tuple[np.ndarray, int]]) -> np.ndarray:
    """Returns the combined value of several workers', given the numbers of their replicas."""
    values = [value for value, _ in of_workers]
    dtype = values[0].dtype
    wide = np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype
    stacked = np.stack(values).astype(wide)
    if how is VariableAggregation.SUM:
        return np.sum(stacked, axis=0, dtype=wide).astype(dtype)
    if how is VariableAggregation.MEAN:
        replicas = [count for _, count in of_workers]
        return np.asarray(np.average(stacked, axis=0, weights=replicas)).astype(dtype)
    return values[0]


# In memory: a killed worker would leave a file.


def _packed(nodes: Sequence[Node], arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    write_archive_to(file, nodes, arrays)
    return file.getvalue()


def _archive(held: bytes) -> Archive:
    return Archive("of another worker or run", io.BytesIO(held))
