"""Keras' `PyDataset` in loops on several workers: each computes batches for all, in turn.

A `PyDataset` computes whole batches, by their numbers. Of as many batches as there are workers,
each worker computes one, and sends the others their rows. So adding workers adds input speed, and
the batches are those of one process, in the order of their numbers, or in one that is drawn.

A batch is then computed up to a round ahead of its step, on one worker. That is so where the
dataset allows threads or processes (`workers` above 1, or `use_multiprocessing`): Keras computes
its batches ahead and in any order, too. Others may count what is read, or look at the model: they
are called for every batch, in the thread of the loop, on every worker.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from unison.data import Shares
from unison.data.distribution.own_rows import OwnRows
from unison.data.distribution.replica_batches import cut
from unison.errors import InvalidArgumentError, UnknownError
from unison.runtime.all_to_all import all_to_all
from unison.runtime.process_group import all_gather_json
from unison.storage.decoding import bytes_of, dtype_named, name_of_dtype
from unison.storage.structures import decode_structure, encode_structure
from unison.strategies import Strategy
from unison.values import is_numeric

_NAME = "The batches of a PyDataset"


class SharedDataset(keras.utils.PyDataset):
    """A dataset whose batches the workers compute in turn.

    Keras' adapter of it starts no threads, which would compute all batches on each worker.

    Args:
        dataset: The user's dataset.
    """

    def __init__(self, dataset: keras.utils.PyDataset):
        super().__init__()
        self.dataset = dataset

    @property
    def num_batches(self) -> int | None:
        return self.dataset.num_batches

    def __getitem__(self, number: int) -> Any:
        return self.dataset[number]

    def on_epoch_begin(self) -> None:
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.dataset.on_epoch_end()


def shared(data: Any, strategy: Strategy) -> Any:
    """Returns what Keras' loops on several workers are given: a `SharedDataset`, or data as it is.

    Where several workers are one in the input, since they have a replica together, each computes
    all batches.
    """
    is_alone = strategy.input_workers.num_workers != jax.process_count()
    if not isinstance(data, keras.utils.PyDataset) or is_alone:
        return data
    return SharedDataset(data) if data.workers > 1 or data.use_multiprocessing else data


def are_shared(adapter: Any) -> bool:
    """Whether the workers compute the batches of Keras' adapter in turn."""
    is_of_dataset = isinstance(adapter, PyDatasetAdapter)
    return is_of_dataset and isinstance(adapter.py_dataset, SharedDataset)


class SharedBatches(Iterator[Any]):
    """The batches of a pass over a `PyDataset`, as trees of `OwnRows`.

    Args:
        adapter: Keras' adapter of a `SharedDataset`.
        strategy: The strategy whose replicas get the batches.
    """

    def __init__(self, adapter: PyDatasetAdapter, strategy: Strategy):
        self._adapter = adapter
        self._strategy = strategy
        self._skipped = 0
        self._batches: Iterator[Any] | None = None

    def skip(self, count: int) -> None:
        """Leaves out batches; at the beginning of the pass, they are not computed."""
        if self._batches is None:
            self._skipped += count
            return
        for _ in range(count):
            next(self._batches)

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._rounds()
        return next(self._batches)

    def _rounds(self) -> Iterator[Any]:
        workers = self._strategy.input_workers
        order = self._order()
        mine = _Turns(self._adapter.py_dataset.dataset, order, workers.index, workers.num_workers)
        adapter = PyDatasetAdapter(mine, self._adapter.class_weight)
        # Keras' threads would wait for ever for the first of no batches.
        computed = iter(()) if mine.num_batches == 0 else adapter.get_jax_iterator()
        try:
            while True:
                batches = self._exchanged(computed)
                yield from batches
                if len(batches) < workers.num_workers:
                    return
        finally:
            if adapter.enqueuer is not None:
                adapter.enqueuer.stop()

    def _order(self) -> Sequence[int] | None:
        """Returns the numbers of the batches of this pass; None: all, without an end."""
        count = self._adapter.num_batches
        if count is None:
            if self._skipped:
                raise InvalidArgumentError(
                    message="A pass over a PyDataset without an end cannot be resumed, as nobody "
                    "knows where it was. Give it a length."
                )
            return None
        order = list(range(count))
        if self._adapter.shuffle:
            (seed, *_) = all_gather_json(random.getrandbits(53), "The order of a PyDataset")
            random.Random(seed).shuffle(order)
        return order[self._skipped :]

    def _exchanged(self, computed: Iterator[Any]) -> list[Any]:
        """Returns this worker's rows of the next batches, of one of which it computes the whole."""
        leaves: list[np.ndarray] = []
        said, error = None, None
        try:
            batch = next(computed, None)
            if batch is not None:
                said = encode_structure(batch, functools.partial(_described, leaves))
        except Exception as raised:
            error, said = raised, f"{type(raised).__name__}: {raised}"
        of_all = all_gather_json(said, _NAME)
        if error is not None:
            raise error
        for worker, answer in enumerate(of_all):
            if isinstance(answer, str):
                raise UnknownError(message=f"{_NAME}: worker {worker} has failed: {answer}")
        described = [_Batch(answer) for answer in of_all if answer is not None]
        if any(each.structure != described[0].structure for each in described):
            structures = "; ".join(str(each.structure) for each in described)
            raise InvalidArgumentError(
                message=f"{_NAME} must have one structure. Received: {structures}"
            )
        return self._own_rows(described, leaves) if described else []

    def _own_rows(self, batches: Sequence[_Batch], own: Sequence[np.ndarray]) -> list[Any]:
        """Returns this worker's rows of batches.

        Args:
            batches: The batches, of one worker after the other.
            own: The leaves of this worker's batch, if there is one.
        """
        workers, strategy = self._strategy.input_workers, self._strategy
        count = strategy.placement.num_replicas
        each = count // workers.num_workers
        replicas = [range(first, first + each) for first in range(0, count, each)]
        proportions = strategy.replica_shares.proportions
        shares = [Shares(batch.examples, count, proportions) for batch in batches]
        rows = [[of_batch.of(its) for its in replicas] for of_batch in shares]
        pieces = [np.empty(0, np.uint8)] * len(replicas)
        if own:
            pieces = [_bytes_of([leaf[part] for leaf in own]) for part in rows[workers.index]]
        longest = max(
            batch.row_bytes * (part.stop - part.start)
            for batch, parts in zip(batches, rows, strict=True)
            for part in parts
        )
        received = all_to_all(pieces, longest)
        mine = replicas[workers.index]
        found = []
        for batch, of_batch, parts, content in zip(batches, shares, rows, received, strict=False):
            own_part = parts[workers.index]
            arrays = batch.arrays_of(content, own_part.stop - own_part.start)
            counts = of_batch.counts[mine.start : mine.stop]
            cuts = (cut([array], counts)[0] for array in arrays)
            leaves = [OwnRows(each, of_batch, mine.start) for each in cuts]
            found.append(batch.with_leaves(leaves))
        return found


class _Turns(keras.utils.PyDataset):
    """The batches of a dataset that a worker computes.

    Args:
        dataset: The dataset.
        order: The numbers of the batches of the pass; None: all, without an end.
        first: The place of the first one of this worker.
        step: The number of workers.
    """

    def __init__(
        self, dataset: keras.utils.PyDataset, order: Sequence[int] | None, first: int, step: int
    ):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._own = None if order is None else order[first::step]
        self._first, self._step = first, step

    @property
    def num_batches(self) -> int | None:
        return None if self._own is None else len(self._own)

    def __getitem__(self, number: int) -> Any:
        if self._own is None:
            return self._dataset[self._first + number * self._step]
        return self._dataset[self._own[number]]


class _Batch:
    """The form of a batch that a worker has computed.

    Args:
        encoded: Its structure, with what `_described` returns as leaves.

    Attributes:
        structure: Its structure, with the same leaf everywhere.
        examples: The number of its examples.
    """

    def __init__(self, encoded: Any):
        self._encoded = encoded
        self._leaves: list[tuple[tuple[int, ...], np.dtype]] = []
        self.structure = decode_structure(encoded, self._take)
        self.examples = self._leaves[0][0][0]
        if any(shape[0] != self.examples for shape, _ in self._leaves):
            shapes = ", ".join(str(shape) for shape, _ in self._leaves)
            raise InvalidArgumentError(
                message=f"The arrays of a batch must have as many examples each. Received: {shapes}"
            )

    def _take(self, described: Any) -> str:
        shape, dtype = described
        self._leaves.append((tuple(shape), dtype_named(dtype)))
        return "array"

    @property
    def row_bytes(self) -> int:
        """The bytes of an example."""
        return sum(bytes_of(shape[1:], dtype) for shape, dtype in self._leaves)

    def arrays_of(self, content: np.ndarray, rows: int) -> list[np.ndarray]:
        """Returns as many rows of each array out of their bytes."""
        arrays, begin = [], 0
        for (_, *inner), dtype in self._leaves:
            end = begin + rows * bytes_of(inner, dtype)
            arrays.append(content[begin:end].copy().view(dtype).reshape(rows, *inner))
            begin = end
        return arrays

    def with_leaves(self, leaves: Iterable[Any]) -> Any:
        """Returns a batch of this structure."""
        remaining = iter(leaves)
        return decode_structure(self._encoded, lambda _: next(remaining))


def _described(leaves: list[np.ndarray], value: Any) -> list[Any]:
    """Returns the shape and the dtype of an array of a batch, which is appended to a list."""
    array = np.asarray(value)
    if not is_numeric(array.dtype) or not array.ndim:
        raise ValueError(
            "Expected arrays of numbers with the examples along the first axis, from a PyDataset "
            f"whose batches the workers share. Received: {array.dtype} of shape {array.shape}. Set "
            "its workers to 1: then each worker computes all batches."
        )
    leaves.append(array)
    return [list(array.shape), name_of_dtype(array.dtype)]


def _bytes_of(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the bytes of arrays, one after the other."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return np.concatenate(flat)
