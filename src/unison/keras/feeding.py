"""The batches of Keras' loops: a worker's own rows, on the devices before a step needs them.

Each of several workers takes its own rows of every batch (see `own_rows`).

For models on accelerators, a thread takes the batches of arrays and datasets from their source
and copies them to the replicas' devices, two ahead of the steps. It replaces the look-ahead of
Keras' own loops, which copies each batch whole to the first device.

Other sources are the user's own code: a generator or a `PyDataset` may call the model, depend on
what a callback has set, or count what is read. They are called in the thread of the loop, when a
step asks for its batch. Steps are launched without waiting for the devices, so that also their
batches are prepared and copied while earlier steps run.

On CPUs, the cores that would read ahead compute the steps: each batch is read when a step asks.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from unison.data import EQUAL_SHARES
from unison.data.distribution.own_rows import are_own_rows
from unison.data.leaves import shape_of
from unison.data.transformations.prefetching import ReadAhead
from unison.keras.batches_in_turn import BatchesInTurn
from unison.keras.datasets import DatasetAdapter
from unison.keras.differing_data import comparing
from unison.keras.own_rows import example_of, own_batches, skip_batches, takes_rows_alone
from unison.keras.step import as_array
from unison.runtime.placement import Placement
from unison.strategies import Strategy
from unison.thread_local import ThreadLocal
from unison.values import is_numeric

if TYPE_CHECKING:
    from unison.keras.trainer import ReplicaTrainer

#: The number of batches that wait on the devices. With the one that is being copied, and the one
#: of the step that runs, four are there at most.
_AHEAD = 2

#: The attribute of a Keras `EpochIterator` whose position is saved.
_IS_TRACKED = "_unison_position_is_saved"

_END = object()


class Feeder:
    """Feeds the steps of a loop: `fit`, `evaluate` or `predict`.

    Args:
        strategy: The strategy whose replicas get the batches.
        reads_ahead: Whether a thread takes the batches, and copies them to the devices.
        takes_own_rows: Whether this worker takes its own rows of the batches only.
    """

    def __init__(self, strategy: Strategy, reads_ahead: bool, takes_own_rows: bool):
        self._strategy = strategy
        self._reads_ahead = reads_ahead
        self._takes_own_rows = takes_own_rows
        self._feeds: weakref.WeakSet[_Feed] = weakref.WeakSet()
        #: Whether a step of this loop asks for its batch.
        self.is_asked = False

    def batches_of(self, epochs: Any) -> Iterator[Any]:
        """Returns the batches of a new pass of Keras' `EpochIterator`."""
        adapter = epochs.data_adapter
        own = own_batches(epochs, self._strategy) if self._takes_own_rows else None
        batches: Iterator[Any] = adapter.get_jax_iterator() if own is None else own
        if own is None and self._takes_own_rows and self._strategy.group is None:
            batches = comparing(adapter, batches)
        is_tracked = getattr(epochs, _IS_TRACKED, False)
        if not (self._reads_ahead and _may_be_read_ahead(adapter, is_tracked)):
            return batches if own is None else _UntilAsked(batches, self)
        feed = _Feed(batches, self)
        self._feeds.add(feed)
        return feed

    def asking(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches for the steps of this loop."""
        while True:
            self.is_asked = True
            try:
                with _feeder.bound_to(None):  # a loop inside the user's iterator is another one
                    batch = next(batches, _END)
            finally:
                self.is_asked = False
            if batch is _END:
                return
            yield batch

    def close(self) -> None:
        """Ends the threads of all passes when they have read their current batch."""
        for feed in self._feeds:
            feed.close()

    def placed(self, batch: Any) -> Any:
        """Returns a batch on the replicas' devices.

        Batches that cannot be divided evenly, or are not valid, are returned as they are: the step
        pads them, or raises the error.
        """
        leaves, structure = jax.tree.flatten(batch)
        placement = self._strategy.placement
        if are_own_rows(leaves):
            if not leaves[0].shares.are_even or not all(is_numeric(leaf.dtype) for leaf in leaves):
                return batch
            own = [placement.join_rows(as_array(leaf).parts) for leaf in leaves]
            return jax.tree.unflatten(structure, own)
        if not all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves):
            return batch
        sizes = {shape_of(leaf)[:1] for leaf in leaves}
        is_divisible = len(sizes) == 1 and all(
            size and size[0] and size[0] % placement.num_replicas == 0 for size in sizes
        )
        if not is_divisible or not all(is_numeric(leaf.dtype) for leaf in leaves):
            return batch
        return jax.tree.unflatten(structure, placement.divide([as_array(leaf) for leaf in leaves]))


class _Feed(Iterator[Any]):
    """The batches of a pass, which a thread reads ahead once a step asks for one.

    Before that, the loop builds the model from the first batch, which stays on the host.

    Args:
        batches: The batches, on the host.
        feeder: The feeder of the loop.
    """

    def __init__(self, batches: Iterator[Any], feeder: Feeder):
        self._batches = batches
        self._feeder = feeder
        self._ahead: ReadAhead[tuple[Any]] | None = None

    def __next__(self) -> Any:
        if self._ahead is None:
            if not self._feeder.is_asked:
                return example_of(next(self._batches))
            # The thread must not reference this object, so that dropping it ends the thread.
            reads = functools.partial(_read, self._batches, self._feeder.placed)
            options: Any = jax.config  # whose options are untyped
            has_64_bits = bool(options.jax_enable_x64)
            self._ahead = ReadAhead(_with_64_bits(has_64_bits, reads), _AHEAD)
        read = self._ahead.get()
        if read is None:
            raise StopIteration
        return read[0]

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            leave = getattr(self._batches, "leave", None)
            if leave is not None:  # its thread may wait for other workers
                leave()


class _UntilAsked(Iterator[Any]):
    """A worker's rows of the batches of a pass.

    Until a step asks for a batch, the loop builds the model from it: it gets arrays of the size of
    the whole batch, with this worker's rows repeated.
    """

    def __init__(self, batches: Iterator[Any], feeder: Feeder):
        self._batches = batches
        self._feeder = feeder

    def __next__(self) -> Any:
        if not self._feeder.is_asked and isinstance(self._batches, BatchesInTurn):
            return self._batches.example()
        batch = next(self._batches)
        return batch if self._feeder.is_asked else example_of(batch)

    def skip(self, count: int) -> None:
        skip_batches(self._batches, count)


def _read(batches: Iterator[Any], placed: Callable[[Any], Any]) -> tuple[Any] | None:
    batch = next(batches, _END)
    return None if batch is _END else (placed(batch),)


def _with_64_bits(enabled: bool, function: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `function`, which is called with JAX's 64-bit types enabled or not."""

    def call() -> Any:
        with jax.enable_x64(enabled):
            return function()

    return call


def _may_be_read_ahead(adapter: Any, is_tracked: bool) -> bool:
    """Whether nobody can notice that a thread reads the batches of an adapter early.

    Args:
        adapter: Keras' adapter of the data.
        is_tracked: Whether the position in the data is saved. Arrays are shuffled when a pass
            begins; a dataset may draw random numbers, or begin another pass, at every batch, and
            the saved state must be the one after the last batch that a step has got.
    """
    if isinstance(adapter, ArrayDataAdapter):
        return adapter._shuffle != "batch"  # which draws random numbers for every batch
    return isinstance(adapter, DatasetAdapter) and not is_tracked


def track_position(epochs: Any) -> None:
    """Takes note that the position in a Keras `EpochIterator` is saved."""
    setattr(epochs, _IS_TRACKED, True)


def feeder_of(trainer: ReplicaTrainer) -> Feeder | None:
    """Returns what feeds the loops of a model; None if each whole batch is taken when a step needs
    it.
    """
    strategy = trainer.strategy
    placement = strategy.placement
    # Other placements have no devices here, or a group of workers that may change.
    is_plain = type(placement) is Placement and strategy.replica_shares is EQUAL_SHARES
    if trainer.takes_text:  # the length of encoded text may depend on the whole batch
        return None
    reads_ahead, takes_own_rows = is_plain and not placement.is_host, takes_rows_alone(strategy)
    return Feeder(strategy, reads_ahead, takes_own_rows) if reads_ahead or takes_own_rows else None


@contextlib.contextmanager
def feeding(trainer: ReplicaTrainer) -> Iterator[None]:
    """Inside, the loop of a model that runs in this thread takes its batches from a feeder."""
    outer = trainer.feeder
    feeder = trainer.feeder = feeder_of(trainer)
    try:
        with _feeder.bound_to(feeder):
            yield
    finally:
        trainer.feeder = outer
        if feeder is not None:
            feeder.close()


#: The feeder of the innermost loop of a model of a strategy.
_feeder: ThreadLocal[Feeder | None] = ThreadLocal(None)


@functools.cache
def teach_feeding() -> None:
    """Lets feeders provide the batches of Keras' loops. Idempotent."""
    JAXEpochIterator._get_iterator = _asking_feeder(JAXEpochIterator._get_iterator)


def _asking_feeder(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def _get_iterator(self: Any) -> Any:
        feeder = _feeder.value
        if feeder is None or keras.distribution.distribution() is not None:
            return original(self)
        return feeder.batches_of(self)

    return _get_iterator
