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

    def take_copy(self) -> None:
        """Takes a copy of the dataset as it is now, for the batches that are asked for then.

        Raises:
            TypeError: The dataset cannot be pickled.
        """
        content = pickled(self._dataset)
        digest = hashlib.sha256(content).digest()
        if self._copy is None or digest != self._copy.digest:
            self._copy = _Copy(content, digest)

    def batches(self, numbers: Iterable[int], seed: int) -> Iterator[Any]:
        """Returns batches of the copy, which are computed ahead once the first one is requested.

        Args:
            numbers: The indices of the batches.
            seed: The seed of the pass, another one for each.
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
        digest: The digest of the content, bytes[32].

    Attributes:
        digest: The digest of the content.
        path: The path, as long as this object lives.
    """

    def __init__(self, content: bytes, digest: bytes):
        file = new_file()
        weakref.finalize(self, os.close, file)
        with open(file, "wb", closefd=False) as opened:
            opened.write(content)
        self.digest = digest
        self.path = f"/proc/{os.getpid()}/fd/{file}"


def pickled(dataset: keras.utils.PyDataset) -> bytes:
    """Returns a dataset as bytes for processes.

    Raises:
        TypeError: It cannot be pickled.
    """
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(dataset)
    except Exception as error:
        raise TypeError(
            f"The PyDataset cannot be sent to processes: {error}. Open files and the like in "
            "__getitem__, at its first call."
        ) from error
    return content


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
        #: The copies, by their digests and the seeds of their passes.
        self._copies: dict[tuple[bytes, int], Any] = {}

    def __call__(self, asked: bytes) -> bytes:
        """Returns a pickled batch.

        Args:
            asked: The digest of the dataset's copy and its path, the index of the batch, and the
                seed of the pass; the last two determine the random numbers.
        """
        digest, path, number, seed = pickle.loads(asked)
        copy = digest, seed  # in which nothing is left of an earlier pass
        if copy not in self._copies:
            while len(self._copies) >= _COPIES_A_PROCESS:
                del self._copies[next(iter(self._copies))]
            self._copies[copy] = _dataset_of(path, digest)
        sequence = np.random.SeedSequence([seed, number])
        np.random.seed(sequence.generate_state(4))
        random.seed(int(sequence.generate_state(1, np.uint64)[0]))
        batch = self._copies[copy][number]
        batch = keras.tree.map_structure(np.asarray, batch, none_is_leaf=False)
        return pickle.dumps(batch, pickle.HIGHEST_PROTOCOL)


def _dataset_of(path: str, digest: bytes) -> Any:
    """Returns the dataset in a copy.

    Raises:
        CancelledError: The copy is not there any more: the path is that of something else.
    """
    content = Path(path).read_bytes() if Path(path).is_file() else b""
    if hashlib.sha256(content).digest() != digest:
        raise CancelledError(message="The pass over a PyDataset has ended.")
    return pickle.loads(content)
