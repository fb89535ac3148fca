"""PyTorch's `DataLoader` in Keras' loops on several workers: each loads its own examples.

PyTorch is not imported: an object can be its only if the program has imported it.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from unison.data import OwnRows, Shares
from unison.runtime.process_group import all_gather_json

#: The attribute of a Keras adapter with the loader of this worker's examples.
_OWN_LOADER = "_unison_own_loader"

#: The arguments of a loader that are those of the loader of a worker's examples.
_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "generator",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def is_loader(data: Any) -> bool:
    """Whether it is a PyTorch `DataLoader`."""
    return "torch" in sys.modules and isinstance(data, _loading().DataLoader)


def loads_a_part(loader: Any) -> bool:
    """Whether a loader's `DistributedSampler` leaves examples to other workers."""
    return isinstance(loader.sampler, _loading().distributed.DistributedSampler)


def agree_on_order(loader: Any) -> None:
    """Gives all processes the first one's random state of PyTorch, by which loaders shuffle."""
    torch = sys.modules["torch"]
    held = (loader.generator, getattr(loader.sampler, "generator", None), torch.default_generator)
    generators = [generator for generator in held if generator is not None]
    own = [generator.get_state().numpy().tobytes().hex() for generator in generators]
    first, *_ = all_gather_json(own, "The random state of PyTorch's shuffling")
    for generator, state in zip(generators, first, strict=True):
        generator.set_state(torch.as_tensor(np.frombuffer(bytes.fromhex(state), np.uint8).copy()))


def divisible_loader(adapter: Any) -> Any:
    """Returns the loader of a Keras adapter if a worker can load its own examples of every batch.

    None if not: where something else than PyTorch's own function makes batches of examples, they
    may depend on all examples of a batch.
    """
    loader = getattr(adapter, "_dataloader", None)
    if loader is None or not is_loader(loader) or loader.batch_sampler is None:
        return None
    is_by_index = not isinstance(loader.dataset, _loading().IterableDataset)
    return loader if is_by_index and loader.collate_fn is _loading().default_collate else None


def rows_of_loader(adapter: Any, shares_of_size: Callable[[int], Shares], replicas: range) -> Any:
    """Yields this worker's rows of the batches of a loader.

    Args:
        adapter: Keras' adapter of a `divisible_loader`.
        shares_of_size: Returns the shares of a batch of a size.
        replicas: The worker's replicas.
    """
    if not hasattr(adapter, _OWN_LOADER):
        setattr(adapter, _OWN_LOADER, _own_loader(adapter._dataloader))
    loader, indices = getattr(adapter, _OWN_LOADER)
    indices.divide_by(shares_of_size, replicas)
    for batch in loader:
        shares = indices.shares.popleft()
        counts = shares.counts[replicas.start : replicas.stop]

        def own_rows(tensor: Any, shares: Shares = shares, counts: Any = counts) -> OwnRows:
            rows = np.asarray(tensor.cpu())
            parts = np.split(rows[: sum(counts)], np.cumsum(counts)[:-1])
            return OwnRows(parts, shares, replicas.start)

        yield tuple(keras.tree.map_structure(own_rows, batch, none_is_leaf=False))


def _own_loader(loader: Any) -> tuple[Any, _OwnIndices]:
    """Returns a loader like another one, for some of the examples, and their indices."""
    indices = _OwnIndices(loader.batch_sampler)
    options = {name: getattr(loader, name) for name in _OPTIONS}
    return _loading().DataLoader(loader.dataset, batch_sampler=indices, **options), indices


class _OwnIndices:
    """The indices of a worker's examples of every batch of a sampler.

    Args:
        batches: A sampler of batches, the same on all workers.

    Attributes:
        shares: Those of the batches whose indices have been taken; the loader takes them ahead.
    """

    def __init__(self, batches: Iterable[list[int]]):
        self._batches = batches
        self.shares: collections.deque[Shares] = collections.deque()

    def divide_by(self, shares_of_size: Callable[[int], Shares], replicas: range) -> None:
        """Divides the batches of the next pass."""
        self._shares_of_size, self._replicas = shares_of_size, replicas
        self.shares.clear()

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            indices = list(batch)
            shares = self._shares_of_size(len(indices))
            self.shares.append(shares)
            # A batch without examples cannot be made: one shows what it would be.
            yield indices[shares.of(self._replicas)] or indices[:1]

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # samplers of a known length have it


def _loading() -> Any:
    return sys.modules["torch"].utils.data
