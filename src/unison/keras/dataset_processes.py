"""Worker processes that compute the batches of a `PyDataset`, each with a copy of it."""

from __future__ import annotations

import collections
import hashlib
import os
import pickle
import random
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from unison.data.chunks import Chunk, ChunkFunction
from unison.data.functions import ElementFunction, as_it_is
from unison.data.leaves import as_leaf
from unison.data.structure import LEAF
from unison.data.workers.memory import new_file
from unison.data.workers.pool import Ticket, WorkerPool
from unison.errors import CancelledError

#: The number of copies that a process keeps: of the examples of training, and of validation.
_COPIES_A_PROCESS = 2

#: The pools, by their number of processes.
_pools: weakref.WeakValueDictionary[int, WorkerPool] = weakref.WeakValueDictionary()

#: The pool of each dataset, by its `id`: it stays as long as the dataset.
_pool_of: dict[int, WorkerPool] = {}

_LOCK = threading.Lock()


class DatasetProcesses:
    """Computes batches of a dataset in processes, which all datasets with as many of them share.

    Args:
        dataset: The dataset; its `workers` is the number of processes.
    """

    def __init__(self, dataset: keras.utils.PyDataset):
        self._dataset = dataset
        self._pool = _pool_for(dataset)
        self._copy: _Copy | None = None
        self._passes = 0

    def begin_pass(self) -> int:
        """Takes a copy of the dataset as it is now.

        Returns:
            The seed of the pass, 48 bits. The random states of NumPy and Python, and the number of
            passes, determine it; they stay as they are.

        Raises:
            TypeError: The dataset cannot be pickled.
        """
        import cloudpickle

        try:
            content = cloudpickle.dumps(self._dataset)
        except Exception as error:
            raise TypeError(
                "With use_multiprocessing=True, a PyDataset must be one that can be pickled, as it "
                f"is sent to processes: {error}. Open files and the like in __getitem__, at its "
                "first call, or leave out use_multiprocessing."
            ) from error
        if self._copy is None or hashlib.sha256(content).digest() != self._copy.digest:
            self._copy = _Copy(content)
        self._passes += 1
        kind, keys, *rest = np.random.get_state(legacy=True)
        states = (kind, np.asarray(keys).tolist(), rest, random.getstate(), self._passes)
        return int.from_bytes(hashlib.sha256(repr(states).encode()).digest()[:6])

    def batches(self, numbers: Iterable[int], seed: int) -> Iterator[Any]:
        """Returns batches of the copy, which are computed ahead once the first one is requested.

        Args:
            numbers: The indices of the batches.
            seed: The seed of the pass.
        """
        copy = self._copy
        assert copy is not None
        asked = (pickle.dumps((copy.digest, copy.path, number, seed)) for number in numbers)
        ahead = min(self._pool.most_under_way, max(self._dataset.max_queue_size, 1))
        return _computed(self._pool, asked, ahead)


class _Copy:
    """A copy of a dataset in memory, which processes of the same user open by a path.

    Args:
        content: The pickled dataset.

    Attributes:
        digest: The digest of the content, bytes[32].
        path: The path, as long as this object lives.
    """

    def __init__(self, content: bytes):
        file = new_file()
        weakref.finalize(self, os.close, file)
        with open(file, "wb", closefd=False) as opened:
            opened.write(content)
        self.digest = hashlib.sha256(content).digest()
        self.path = f"/proc/{os.getpid()}/fd/{file}"


def _computed(pool: WorkerPool, asked: Iterable[bytes], ahead: int) -> Iterator[Any]:
    """Yields batches in order, of which the pool computes some ahead."""
    tickets: collections.deque[Ticket] = collections.deque()
    for number, each in enumerate(asked):
        tickets.append(pool.submit(Chunk(number, elements=[(each,)])))
        if len(tickets) == ahead:
            yield _batch_of(pool, tickets.popleft())
    while tickets:
        yield _batch_of(pool, tickets.popleft())


def _batch_of(pool: WorkerPool, ticket: Ticket) -> Any:
    pool.wait([ticket])
    (outcome,) = ticket.result()
    if isinstance(outcome, Exception):
        raise outcome
    ((content,),) = outcome
    return pickle.loads(content)


def _pool_for(dataset: keras.utils.PyDataset) -> WorkerPool:
    count = max(dataset.workers, 1)
    with _LOCK:
        pool = _pools.get(count)
        if pool is None or pool.is_closed:
            function = ElementFunction(_Compute(), "PyDataset.__getitem__", as_it_is, as_leaf)
            pool = _pools[count] = WorkerPool(ChunkFunction(function, lambda: LEAF, False), count)
        if id(dataset) not in _pool_of:
            weakref.finalize(dataset, _pool_of.pop, id(dataset), None)
        _pool_of[id(dataset)] = pool
        return pool


class _Compute:
    """The function of the processes."""

    def __init__(self) -> None:
        self._copies: dict[bytes, Any] = {}

    def __call__(self, asked: bytes) -> bytes:
        """Returns a pickled batch.

        Args:
            asked: The digest of the dataset's copy and its path, the index of the batch, and the
                seed of the pass; the last two determine the random numbers.
        """
        digest, path, number, seed = pickle.loads(asked)
        if digest not in self._copies:
            while len(self._copies) >= _COPIES_A_PROCESS:
                del self._copies[next(iter(self._copies))]
            self._copies[digest] = _dataset_of(path, digest)
        sequence = np.random.SeedSequence([seed, number])
        np.random.seed(sequence.generate_state(4))
        random.seed(int(sequence.generate_state(1, np.uint64)[0]))
        batch = self._copies[digest][number]
        batch = keras.tree.map_structure(np.asarray, batch, none_is_leaf=False)
        return pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)


def _dataset_of(path: str, digest: bytes) -> Any:
    content = Path(path).read_bytes()
    if hashlib.sha256(content).digest() != digest:
        raise CancelledError(message="The pass over a PyDataset has ended.")
    return pickle.loads(content)
