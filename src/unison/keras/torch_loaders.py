"""PyTorch's `DataLoader` in Keras' loops on several workers: each loads its own examples.

PyTorch is not imported: an object can be its only if the program has imported it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from unison.data import Shares
from unison.data.distribution.own_rows import OwnRows
from unison.errors import InvalidArgumentError
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
    distributed = _loading().distributed.DistributedSampler
    return any(
        isinstance(sampler, distributed) and sampler.num_replicas > 1
        for sampler in _samplers_of(loader)
    )


def agree_on_order(loader: Any) -> list[str]:
    """Gives all processes the first one's random state of PyTorch, by which loaders shuffle.

    Returns:
        This state.
    """
    generators = _generators_of(loader)
    said = all_gather_json(_states_of(generators), "The random state of PyTorch's shuffling")
    first: list[str] = said[0]
    _set_states(generators, first)
    return first


def is_divisible(loader: Any) -> bool:
    """Whether a worker can load its own examples of every batch of a loader.

    Where something else than PyTorch's own loader and function make batches of examples, they may
    depend on all examples of a batch.
    """
    if not is_loader(loader) or loader.batch_sampler is None:
        return False
    try:
        len(loader.batch_sampler)
    except TypeError:  # a sampler without an end
        return False
    is_by_index = not isinstance(loader.dataset, _loading().IterableDataset)
    is_plain = type(loader) is _loading().DataLoader
    return is_by_index and is_plain and loader.collate_fn is _loading().default_collate


def rows_of_loader(
    adapter: Any, shares_of_size: Callable[[int], Shares], replicas: range, worker: int
) -> Iterator[Any]:
    """Yields this worker's rows of the batches of a loader.

    Args:
        adapter: Keras' adapter of a loader that `is_divisible`.
        shares_of_size: Returns the shares of a batch of a size.
        replicas: The worker's replicas.
        worker: The worker's index; all take the first one's order.

    Raises:
        InvalidArgumentError: The workers' samplers do not give the same batches.
    """
    loader: Any = adapter._dataloader
    if not hasattr(adapter, _OWN_LOADER):
        own: list[list[int]] = []
        options = {name: getattr(loader, name) for name in _OPTIONS}
        made = _loading().DataLoader(loader.dataset, batch_sampler=own, **options)
        setattr(adapter, _OWN_LOADER, (made, own))
    made, own = getattr(adapter, _OWN_LOADER)
    generators = _generators_of(loader)
    before = _states_of(generators)
    of_first = agree_on_order(loader)
    torch = sys.modules["torch"]
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as iterators begin
    batches = [list(batch) for batch in loader.batch_sampler]
    after = _states_of(generators)
    _require_the_same(batches)
    of_batches = [shares_of_size(len(batch)) for batch in batches]
    # A batch without examples cannot be made: one shows what it would be.
    pairs = zip(batches, of_batches, strict=True)
    own[:] = [batch[shares.of(replicas)] or batch[:1] for batch, shares in pairs]
    # What the dataset draws is this worker's own. The first one's goes on as without the others.
    if worker == 0:
        _set_states(generators, before)
        loaded = iter(made)
        _set_states(generators, after)
    else:
        for place, (generator, state) in enumerate(zip(generators, of_first, strict=True)):
            digest = hashlib.sha256(f"{worker} {place} {state}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8]) >> 1)
        loaded = iter(made)
    for batch, shares in zip(loaded, of_batches, strict=True):

        def own_rows(tensor: Any, shares: Shares = shares) -> OwnRows:
            return OwnRows.of(np.asarray(tensor.cpu()), shares, replicas)

        yield tuple(keras.tree.map_structure(own_rows, batch, none_is_leaf=False))


def _require_the_same(batches: Sequence[Sequence[int]]) -> None:
    """Raises an InvalidArgumentError on all workers unless they have the same batches."""
    digest = hashlib.sha256(json.dumps(batches, default=repr).encode()).hexdigest()
    of_all = all_gather_json([len(batches), digest], "The order of PyTorch's samplers")
    for worker, said in enumerate(of_all):
        if said != of_all[0]:
            raise InvalidArgumentError(
                message="All workers must be given DataLoaders of the same batches, of which each "
                f"loads its part. The samplers of workers 0 and {worker} give other indices "
                f"({of_all[0][0]} and {said[0]} batches). Let them draw from a torch.Generator "
                "of their own, with the same seed on all workers, or pass "
                "strategy.distribute_datasets_from_function(lambda context: "
                "Dataset.from_source(loader)) for loaders of each worker's own."
            )


def _samplers_of(loader: Any) -> list[Any]:
    batches = loader.batch_sampler
    found = [loader.sampler, batches, getattr(batches, "sampler", None)]
    return [sampler for sampler in found if sampler is not None]


def _generators_of(loader: Any) -> list[Any]:
    """Returns the generators by which a loader shuffles, each once."""
    held = [loader, *_samplers_of(loader)]
    found = [getattr(each, "generator", None) for each in held]
    found.append(sys.modules["torch"].default_generator)
    generators = [each for each in found if isinstance(each, sys.modules["torch"].Generator)]
    return list({id(generator): generator for generator in generators}.values())


def _states_of(generators: Sequence[Any]) -> list[str]:
    return [generator.get_state().numpy().tobytes().hex() for generator in generators]


def _set_states(generators: Sequence[Any], states: Sequence[str]) -> None:
    torch = sys.modules["torch"]
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(torch.as_tensor(np.frombuffer(bytes.fromhex(state), np.uint8).copy()))


def _loading() -> Any:
    return sys.modules["torch"].utils.data
