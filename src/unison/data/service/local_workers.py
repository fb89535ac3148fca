"""The input workers that this process has started, which `target_workers="LOCAL"` reads."""

from __future__ import annotations

_ids: set[str] = set()


def add_local_worker(worker_id: str) -> None:
    """Records a worker that was started by this process."""
    _ids.add(worker_id)


def remove_local_worker(worker_id: str) -> None:
    """Records that it has ended."""
    _ids.discard(worker_id)


def ids_of_local_workers() -> frozenset[str]:
    """Returns the ids of the workers that this process has started."""
    return frozenset(_ids)
