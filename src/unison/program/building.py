"""The common part of `strategy.run` and Keras' steps: one program from replicas' traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from jax.extend.core import ClosedJaxpr

from unison.cells import Cell
from unison.lowering import has_shard_map, lower_for_cpu, lowered_trace
from unison.program.central_storage import HomeUpdate, K, SplitTrace, split_off_update
from unison.runtime.placement import Placement


class _HasJaxpr(Protocol):
    """A dataclass that holds the trace of a class of replicas."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def jaxpr(self) -> ClosedJaxpr: ...


T = TypeVar("T", bound=_HasJaxpr)


def lower_traces(
    placement: Placement, traces: Sequence[T]
) -> tuple[list[T], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Lowers the traces of a program for the devices.

    Returns:
        The lowered traces, and the function that lowers the program made of them. Traces that
        contain a `shard_map` are lowered as parts of the program.
    """
    if placement.platform != "cpu":
        return list(traces), _unchanged
    if any(has_shard_map(trace.jaxpr.jaxpr) for trace in traces):
        return list(traces), lower_for_cpu
    lowered = [dataclasses.replace(t, jaxpr=lowered_trace(t.jaxpr)) for t in traces]
    return lowered, _unchanged


def _unchanged(program: Callable[..., Any]) -> Callable[..., Any]:
    return program


class CellForms:
    """The forms that cells had when a program was compiled for them.

    Args:
        read: Returns the forms.
    """

    def __init__(self, read: Callable[[], Sequence[Hashable]]):
        self._read = read
        self._forms = read()
        self._layout_changes = Cell.form_changes

    def hold(self) -> bool:
        """Whether the cells still have them."""
        if self._layout_changes == Cell.form_changes:
            return True
        changes = Cell.form_changes
        if self._read() != self._forms:
            return False
        self._layout_changes = changes
        return True


@dataclasses.dataclass(frozen=True)
class NamedTrace(Generic[K]):
    """The trace of a class of replicas, with the variables that it takes and returns.

    Attributes:
        jaxpr: Computes one replica's part.
        inputs: The variables whose values are its first inputs.
        outputs: The variable whose new value an output is, or None.
    """

    jaxpr: ClosedJaxpr
    inputs: Sequence[K | None]
    outputs: Sequence[K | None]

    def split(
        self, at_home: Collection[K], updated: Collection[K], arriving: Collection[int]
    ) -> SplitTrace:
        """Splits off the part that can be computed at home; see `split_update_at_home`."""
        return split_off_update(
            self.jaxpr,
            at_home={i for i, name in enumerate(self.inputs) if name in at_home},
            arriving={len(self.inputs) + index for index in arriving},
            for_home={i for i, name in enumerate(self.outputs) if name in updated},
        )


def split_update_at_home(
    placement: Placement,
    traces: Sequence[NamedTrace[K]],
    at_home: Collection[K],
    written: Collection[K],
    updated: Collection[K],
    arriving: Collection[int] = (),
) -> tuple[list[SplitTrace], HomeUpdate[K]] | None:
    """Splits off the update that can be computed at home, where variables have their only copy.

    It is that of the first trace; in all others it is the same.

    Args:
        placement: The replicas' devices, and the home.
        traces: The trace of each class of replicas.
        at_home: The variables that are stored at home.
        written: The variables that the program writes.
        updated: Those of them that may be written at home.
        arriving: The arguments of the traces that are equal on all replicas, by their numbers
            after the variables.

    Returns:
        The parts of the traces, and the update; None if nothing can be computed at home.
    """
    if placement.home is None:
        return None
    splits = [trace.split(at_home, updated, arriving) for trace in traces]
    moved = [
        {trace.outputs[index] for index in split.outputs}
        for trace, split in zip(traces, splits, strict=True)
    ]
    crossing = [split.crossing for split in splits]
    if not moved[0] or any(each != moved[0] for each in moved):
        return None
    if any(each != crossing[0] for each in crossing):
        return None
    update = HomeUpdate(placement, splits[0], traces[0].inputs, traces[0].outputs)
    # The replicas must not overwrite variables that the update reads.
    if not set(written).difference(moved[0]).isdisjoint(update.read):
        return None
    return splits, update
