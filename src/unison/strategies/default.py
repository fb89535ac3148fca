"""The strategy outside any scope: one replica on the default device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from unison.runtime import devices
from unison.strategies.base import Strategy


class DefaultStrategy(Strategy):
    """One replica on the default device; what `get_strategy()` returns outside any scope."""

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Does nothing: outside any scope this strategy already is the current one."""
        yield self


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Returns the one default strategy of this process."""
    return DefaultStrategy(devices.local_devices()[:1])
