"""The workers that share one input: they exchange the states of streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unison.data.state import State, decode, encode
from unison.runtime.agreement import (
    PATIENCE,
    Codec,
    ConnectedWorkers,
    MemoryStore,
    Store,
    Talk,
    TeamsOfWorkers,
    Workers,
)
from unison.runtime.coordination import CoordinationStore
from unison.runtime.elastic import ElasticGroup

__all__ = ["InputWorkers", "Talk", "connected", "workers_in_threads", "workers_of_cluster"]

#: A worker's index among those that share an input; by default, the only worker.
InputWorkers = Workers


def _packed(state: State) -> bytes:
    text, data = encode(state)
    described = text.encode()
    return len(described).to_bytes(8, "big") + described + data.tobytes()


def _unpacked(packed: bytes) -> State:
    end = 8 + int.from_bytes(packed[:8], "big")
    return decode(packed[8:end].decode(), np.frombuffer(packed[end:], np.uint8))


def connected(
    num_workers: int, index: int, store: Store, name: str = "input", patience: float = PATIENCE
) -> InputWorkers:
    """Returns the index of a worker among those that share a store; see `ConnectedWorkers`."""
    return ConnectedWorkers(num_workers, index, store, name, patience, Codec(_packed, _unpacked))


def workers_in_threads(num_workers: int, patience: float = PATIENCE) -> list[InputWorkers]:
    """Returns the indices of workers that are threads of this process.

    Examples:
        >>> first, second = workers_in_threads(2)
        >>> first.num_workers, second.index
        (2, 1)
    """
    store = MemoryStore()
    return [connected(num_workers, index, store, patience=patience) for index in range(num_workers)]


class _Members(Workers):
    """A worker's index among the members of a group, which may change."""

    may_change = True

    def __init__(self, group: ElasticGroup):
        self._group = group

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        return self._group.num_members

    @property
    def index(self) -> int:  # type: ignore[override]
        return self._group.index

    def talk(self, matter: str) -> Talk:
        return _TalkOfMembers(self._group)


class _TalkOfMembers(Talk):
    def __init__(self, group: ElasticGroup):
        self._group = group

    def ask(self, answer: State) -> Sequence[State]:
        return [_unpacked(packed) for packed in self._group.all_gather(_packed(answer))]


def workers_of_group(group: ElasticGroup) -> InputWorkers:
    """Returns the index of this process among the workers of a group that may change."""
    return _Members(group)


def workers_of_cluster(
    num_workers: int,
    index: int,
    name: str = "input",
    patience: float = PATIENCE,
    workers_per_replica: int = 1,
) -> InputWorkers:
    """Returns the index of this process among the processes of `jax.distributed`.

    Args:
        num_workers: The number of workers.
        index: The index of this one.
        name: Distinguishes several groups of the same processes.
        patience: The timeout in seconds for other workers.
        workers_per_replica: How many consecutive workers compute a replica together. They read the
            same input, as one worker.

    Raises:
        RuntimeError: The coordination service is not running.
    """
    workers = connected(num_workers, index, CoordinationStore(), name, patience)
    return workers if workers_per_replica == 1 else TeamsOfWorkers(workers, workers_per_replica)
