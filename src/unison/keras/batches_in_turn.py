"""A `PyDataset` in Keras' loops on several workers: they compute its batches in turn.

A `PyDataset` computes whole batches, by their numbers. Of as many batches as there are workers
each computes one, and sends the others their rows, so that a worker more is input speed more.

That is so for datasets with `use_multiprocessing=True`: Keras computes their batches in processes,
each with a copy of the dataset as it is when a pass begins, in any order and ahead of the steps.
So do the workers. Other datasets may count what is read, or look at the model: each worker calls
them for every batch, in the thread of the loop.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from unison.data import Shares
from unison.data.distribution.own_rows import OwnRows
from unison.errors import InvalidArgumentError, UnknownError
from unison.interrupts import is_of_a_signal_handler
from unison.keras.dataset_processes import DatasetProcesses, pickled
from unison.keras.differing_data import compare_batches
from unison.runtime.all_to_all import all_to_all
from unison.runtime.process_group import all_gather_json
from unison.storage.decoding import bytes_of, dtype_named, name_of_dtype
from unison.strategies import Strategy
from unison.values import is_numeric

_NAME = "The batches of a PyDataset"

#: The attribute of a Keras adapter with the processes that compute its batches.
_PROCESSES = "_unison_processes"


class SharedDataset(keras.utils.PyDataset):
    """A dataset whose batches the workers compute in turn.

    Keras' adapter of it starts no processes, which would compute all batches on each worker.

    Args:
        dataset: The user's dataset.
    """

    def __init__(self, dataset: keras.utils.PyDataset):
        super().__init__()
        self.dataset = dataset
        #: The number of epochs that have begun, also those before a loop that is resumed.
        self.epochs = 0

    @property
    def num_batches(self) -> int | None:
        count: int | None = self.dataset.num_batches
        return count

    def __getitem__(self, number: int) -> Any:
        return self.dataset[number]

    def on_epoch_begin(self) -> None:
        self.epochs += 1
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.dataset.on_epoch_end()


def shared(data: Any, strategy: Strategy) -> Any:
    """Returns what Keras' loops on several workers are given: a `SharedDataset`, or data as it is.

    Where several workers are one in the input, since they have a replica together, each computes
    all batches; so do they, with a warning, if the dataset cannot be pickled.
    """
    are_teams = strategy.input_workers.num_workers != jax.process_count()
    if are_teams or not isinstance(data, keras.utils.PyDataset):
        return data
    if not data.use_multiprocessing or data.workers < 1:
        return data
    said = outcome_of(lambda: len(pickled(data)))
    errors = [error for error in all_gather_json(str(said), _NAME) if not error.isdecimal()]
    if not errors:
        return SharedDataset(data)
    if jax.process_index() == 0:
        warnings.warn(f"Each worker computes all batches. {errors[0]}", stacklevel=2)
    return data


def are_shared(adapter: Any) -> bool:
    """Whether the workers compute the batches of Keras' adapter in turn."""
    is_of_dataset = isinstance(adapter, PyDatasetAdapter)
    return is_of_dataset and isinstance(adapter.py_dataset, SharedDataset)


class BatchesInTurn(Iterator[Any]):
    """The batches of a pass over a `PyDataset`, as trees of `OwnRows`.

    Args:
        adapter: Keras' adapter of a `SharedDataset`.
        strategy: The strategy whose replicas get the batches.
    """

    def __init__(self, adapter: PyDatasetAdapter, strategy: Strategy):
        self._adapter = adapter
        self._strategy = strategy
        self._pass: _Pass | None = None
        #: The batches of the latest round that are left, the last one first.
        self._left: list[Any] = []

    def example(self) -> Any:
        """Returns the first batch, whole, which each worker computes."""
        batch = _Pass(self._adapter, self._strategy).first()
        compare_batches(self._adapter, batch)
        return batch

    def skip(self, count: int) -> None:
        """Leaves out batches; at the beginning of the pass, they are not computed.

        Their order is drawn now: the random state may be another one afterwards.
        """
        if self._pass is None and count:
            self._pass = _Pass(self._adapter, self._strategy, skipped=count)
            return
        for _ in range(count):
            next(self)

    def __next__(self) -> Any:
        if self._pass is None:
            self._pass = _Pass(self._adapter, self._strategy)
        if not self._left:
            self._left = self._pass.next_round()[::-1]
        if not self._left:
            raise StopIteration
        return self._left.pop()


class _Pass:
    """A pass that has begun.

    Args:
        adapter: Keras' adapter of a `SharedDataset`.
        strategy: The strategy whose replicas get the batches.
        skipped: The number of batches that are left out at the beginning.

    Raises:
        TypeError: The dataset can no longer be pickled.
        InvalidArgumentError: The workers have other numbers of batches.
    """

    def __init__(self, adapter: PyDatasetAdapter, strategy: Strategy, skipped: int = 0):
        self._adapter = adapter
        self._strategy = strategy
        self._structure: Any = None
        self._count: int | None = adapter.num_batches
        #: The number of batches that are done.
        self._done = skipped
        self._numbers = list(range(self._count or 0))
        if adapter.shuffle:  # as Keras' adapter does, by the same random numbers
            random.shuffle(self._numbers)
        if not hasattr(adapter, _PROCESSES):
            setattr(adapter, _PROCESSES, DatasetProcesses(adapter.py_dataset.dataset))
        self._processes: DatasetProcesses = getattr(adapter, _PROCESSES)
        self._random_state = _digest_of_random_state()
        self._computed = self._begin()

    def _begin(self) -> Iterator[Any]:
        """Returns the batches that this worker computes, of the dataset as it is now."""
        self._epoch: int = self._adapter.py_dataset.epochs
        outcome = outcome_of(self._processes.take_copy)
        seed = self._random_state ^ self._epoch
        of_all = _answers_of_all(outcome or [self._count, seed])
        for worker, (count, _) in enumerate(of_all):
            if count != of_all[0][0]:
                raise InvalidArgumentError(
                    message="All workers must be given a PyDataset of as many batches, as each "
                    f"computes a part of them. Worker 0 has {of_all[0][0]} batches, worker "
                    f"{worker} has {count}."
                )
        self._seed = of_all[0][1]
        workers = self._strategy.input_workers
        first, step = self._done + workers.index, workers.num_workers
        own: Iterable[int] = itertools.count(first, step)
        if self._count is not None:
            own = self._numbers[first::step]
        return self._processes.batches(own, self._seed)

    def first(self) -> Any:
        """Returns the first batch, whole."""
        number = self._numbers[0] if self._numbers else 0
        return self._batch_of(self._processes.batches([number], self._seed))

    def next_round(self) -> list[Any]:
        """Returns this worker's rows of the next batches, of one of which it computes the whole.

        Raises:
            UnknownError: Another worker could not compute its batch.
            InvalidArgumentError: The batches cannot be divided by examples.
        """
        workers = self._strategy.input_workers
        count = workers.num_workers
        if self._count is not None:
            count = min(max(self._count - self._done, 0), count)
        if not count:
            return []
        if self._epoch != self._adapter.py_dataset.epochs:  # a pass over several
            self._computed = self._begin()
        self._done += count
        leaves: list[np.ndarray] = []

        def computed() -> Any:
            if workers.index >= count:
                return None
            own, self._structure = _leaves_of(self._batch_of(self._computed))
            leaves.extend(own)
            described = [[list(leaf.shape), name_of_dtype(leaf.dtype)] for leaf in own]
            return [str(self._structure), described]

        of_all = _answers_of_all(outcome_of(computed))[:count]
        if any(structure != of_all[0][0] for structure, _ in of_all):
            structures = "; ".join(structure for structure, _ in of_all)
            raise InvalidArgumentError(
                message=f"{_NAME} must have one structure. Received: {structures}"
            )
        if self._structure is None:  # this worker computes none in this pass
            _, self._structure = _leaves_of(self.first())
        return self._own_rows([_Described(described) for _, described in of_all], leaves)

    def _batch_of(self, batches: Any) -> Any:
        return self._adapter._standardize_batch(next(batches))

    def _own_rows(self, batches: Sequence[_Described], own: Sequence[np.ndarray]) -> list[Any]:
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
            leaves = [OwnRows.of(array, of_batch, mine) for array in arrays]
            found.append(jax.tree.unflatten(self._structure, leaves))
        return found


class _Described:
    """The arrays of a batch, as the worker that has computed them describes them.

    Args:
        described: The shape, and the name of the dtype, of each.

    Attributes:
        examples: The number of examples.

    Raises:
        InvalidArgumentError: The arrays have different numbers of examples.
    """

    def __init__(self, described: Sequence[tuple[Sequence[int], str]]):
        self._arrays = [(tuple(shape), dtype_named(dtype)) for shape, dtype in described]
        self.examples = self._arrays[0][0][0]
        if any(shape[0] != self.examples for shape, _ in self._arrays):
            shapes = ", ".join(str(shape) for shape, _ in self._arrays)
            raise InvalidArgumentError(
                message=f"The arrays of a batch must have as many examples each. Received: {shapes}"
            )

    @property
    def row_bytes(self) -> int:
        """The bytes of an example."""
        return sum(bytes_of(shape[1:], dtype) for shape, dtype in self._arrays)

    def arrays_of(self, content: np.ndarray, rows: int) -> list[np.ndarray]:
        """Returns as many rows of each array out of their bytes."""
        arrays, begin = [], 0
        for (_, *inner), dtype in self._arrays:
            end = begin + rows * bytes_of(inner, dtype)
            arrays.append(content[begin:end].copy().view(dtype).reshape(rows, *inner))
            begin = end
        return arrays


def outcome_of(function: Callable[[], Any]) -> Any:
    """Returns what a function returns, or the error that it raises."""
    try:
        return function()
    except Exception as error:
        if is_of_a_signal_handler(error):
            raise
        return error


def _answers_of_all(outcome: Any) -> list[Any]:
    """Returns what all workers say.

    Args:
        outcome: This worker's; an error is raised on all.
    """
    failed = isinstance(outcome, Exception)
    said = [f"{type(outcome).__name__}: {outcome}", None] if failed else [None, outcome]
    of_all = all_gather_json(said, _NAME)
    if failed:
        raise outcome
    for worker, (error, _) in enumerate(of_all):
        if error is not None:
            raise UnknownError(message=f"{_NAME}: worker {worker} has failed: {error}")
    return [answer for _, answer in of_all]


def _leaves_of(batch: Any) -> tuple[list[np.ndarray], Any]:
    """Returns the arrays of a batch, and its structure.

    Raises:
        ValueError: It does not consist of arrays with the examples along the first axis.
    """
    leaves, structure = jax.tree.flatten(batch)
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array in arrays:
        if not is_numeric(array.dtype) or not array.ndim:
            raise ValueError(
                "Expected arrays of numbers with the examples along the first axis, from a "
                "PyDataset whose batches the workers share. Received: "
                f"{array.dtype} of shape {array.shape}. Without use_multiprocessing, each worker "
                "computes all batches."
            )
    return arrays, structure


def _bytes_of(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the bytes of arrays, one after the other."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return np.concatenate(flat)


def _digest_of_random_state() -> int:
    """Returns 48 bits of a digest of the random states of NumPy and Python, which stay the same."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = repr((kind, np.asarray(keys).tolist(), rest, random.getstate()))
    return int.from_bytes(hashlib.sha256(states.encode()).digest()[:6])
