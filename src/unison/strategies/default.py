"""The strategy outside any scope: one replica on the default device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from unison.data import InputContext, InputOptions
from unison.runtime import devices
from unison.strategies.base import Strategy


class DefaultStrategy(Strategy):
    """One replica on the default device; what `get_strategy()` returns outside any scope."""

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Does nothing: outside any scope, this strategy is already the current one."""
        yield self

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Returns `dataset` unchanged: there is only one replica."""
        return dataset

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Returns the dataset that the function creates."""
        return dataset_fn(InputContext())

    experimental_distribute_datasets_from_function = distribute_datasets_from_function


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Returns the one default strategy of this process."""
    return DefaultStrategy(devices.local_devices()[:1], may_be_alone=True)
