"""Observers that act while the scope of any strategy is open."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from unison.interrupts import begin_block, end_block


class ScopeObserver(Protocol):
    """Something that acts while scopes are open, in any thread."""

    def opened(self) -> None:
        """Called when the first scope has been opened."""

    def closed(self) -> None:
        """Called when the last scope has been closed."""


_preparations: list[Callable[[], None]] = []
_observers: list[ScopeObserver] = []
_open_scopes = 0
_scopes_lock = threading.RLock()


def before_scopes(prepare: Callable[[], None]) -> None:
    """Calls `prepare` before a scope opens while none is open.

    It may import modules that observe scopes: it is called without the lock, for which the import
    of such a module in another thread may wait.
    """
    _preparations.append(prepare)


def observe_scopes(observer: ScopeObserver) -> None:
    """Notifies `observer` when the first scope opens (now, if one is), and when the last closes."""
    with _scopes_lock:
        _observers.append(observer)
        if _open_scopes:
            observer.opened()


@contextlib.contextmanager
def as_outside_scopes(observer: ScopeObserver) -> Iterator[None]:
    """Has an observer restore what it changes in scopes for the duration of a block.

    For a block that changes the same objects for good, and may run while a scope is open.
    """
    with _scopes_lock:
        if _open_scopes:
            observer.closed()
        try:
            yield
        finally:
            if _open_scopes:
                observer.opened()


@contextlib.contextmanager
def observed_scope() -> Iterator[None]:
    """Counts a scope as open, for the observers."""
    if not _open_scopes:
        for prepare in _preparations:
            prepare()
    begin_block(_open, _close)
    try:
        yield
    finally:
        end_block(_close)


def _open() -> None:
    global _open_scopes
    with _scopes_lock:
        _open_scopes += 1
        if _open_scopes == 1:
            for observer in _observers:
                observer.opened()


def _close() -> None:
    global _open_scopes
    with _scopes_lock:
        _open_scopes -= 1
        if not _open_scopes:
            for observer in reversed(_observers):
                observer.closed()
