"""Programs over several devices: launched one at a time, and few enough to be in flight.

**One at a time.** Accelerators execute programs in the order of their launches. If two threads
launched programs with collectives in different orders on two devices, each device would wait for
the other forever. `LAUNCH_LOCK` orders the launches of a process.

**Few in flight.** XLA's CPU client runs programs on a pool of max(NPROC, cores, devices) threads. A
collective inside one process blocks a pool thread per device until the last device arrives. A
device takes at most 32 programs in flight, and the launch of one more parks a pool thread per
device until one has finished. When these occupy the whole pool, the last device has no thread left
for its work: the program hangs until XLA aborts the process. This is our explanation of the
following runs (JAX 0.10.2, 2 cores, steps fed from host memory without waiting for the previous
step; 32 to 34 steps pass with any pool, 36 get stuck), with D devices and T Python threads that
launch at the same time:

====  =======================  =====================  =============
D     T                        gets stuck with        runs with
====  =======================  =====================  =============
2     1                        2, 3                   4
4     1                        4, 5, 6                7, 8
8     1                        8, 9, 10, 12, 13       15, 16
2     2                        4, 5                   6
4     2                        10, 11                 12
2     3                                               7, 8
2-8   1, with `launched`                              D
2-8   4, with `launched`                              D
====  =======================  =====================  =============

A pool of (T + 1) x D threads would do, but XLA cuts its work into as many pieces as there are
threads: on two cores, steps of an LSTM on two devices take 1.5 times as long with four threads as
with two, of a GRU 1.3, of a GPT 1.1, and the process takes 8 to 18 % more memory. So the pool stays
as XLA makes it, and `launched` waits for earlier programs long before 32 are in flight. What is
left of the 32 is for programs that the user launches.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Sharding

from unison.interrupts import signals_held
from unison.runtime.transfers import copied, placed

LAUNCH_LOCK = threading.RLock()
"""Held while a program over several devices is launched (not while it runs)."""

#: At most twice as many programs are in flight when another one is launched.
_LAUNCHES_BETWEEN_WAITS = 7

#: Larger results are not copied, and are kept only as long as they are not too many.
_SMALL_BYTES = 1 << 16
_KEPT_BYTES = 1 << 24

#: The number of a program's results, from the end, among which a small one is looked for.
_MOST_LOOKED_AT = 8


class _Flight:
    """The programs over several CPU devices that were launched; guarded by `LAUNCH_LOCK`.

    Of every program one result is kept. If a later program takes it, it tells nothing any more, but
    then that program's result tells that both have finished.
    """

    def __init__(self) -> None:
        #: With whether no program takes it.
        self._results: list[tuple[jax.Array, bool]] = []
        self._launches = 0
        self._bytes = 0
        #: Results of the programs before these, or copies of them which no program takes.
        self._earlier: list[jax.Array] = []

    def add(self, results: Any, are_kept: bool) -> None:
        self._launches += 1
        if (result := _smallest(results)) is not None:
            self._results.append((result, are_kept))
            self._bytes += result.nbytes
        if self._launches < _LAUNCHES_BETWEEN_WAITS and self._bytes <= _KEPT_BYTES:
            return
        with signals_held:
            earlier = self._begin_again()
        for result in earlier:
            if not result.is_deleted():
                # The error of a program is raised where its results are read.
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    result.block_until_ready()

    def _begin_again(self) -> list[jax.Array]:
        """Makes the latest results the earlier ones; returns those to wait for."""
        earlier, latest = self._earlier, self._results
        self._earlier, self._results, self._launches, self._bytes = [], [], 0, 0
        for result, is_kept in latest:
            if result.nbytes > _SMALL_BYTES:
                earlier.append(result)
            elif is_kept:
                self._earlier.append(result)
            elif not result.is_deleted():
                with jax.ensure_compile_time_eval():  # also inside a function that JAX traces
                    self._earlier.append(copied(result))
        return earlier


_flight = _Flight()


def launched(results: Any, are_kept: bool = False) -> None:
    """Takes note of the launch of a program over several CPU devices of this process.

    Waits for earlier ones, if many are in flight. Called with `LAUNCH_LOCK` held.

    Args:
        results: What the program returned, a tree of arrays, which were not donated yet.
        are_kept: Whether no program will take (donate) them.
    """
    _flight.add(results, are_kept)


def moved(values: Any, sharding: Sharding) -> Any:
    """Returns a tree of arrays on CPU devices of this process, as `transfers.placed` does.

    To divide an array differently, JAX launches a program, for each array of a tree.
    """

    def move(leaf: Any) -> jax.Array:
        if not _is_elsewhere(leaf, sharding):
            return placed(leaf, sharding)
        with LAUNCH_LOCK:
            result = placed(leaf, sharding)
            launched(result, are_kept=True)
        return result

    return jax.tree.map(move, values)


def _is_elsewhere(leaf: Any, sharding: Sharding) -> bool:
    """Whether an array is divided over several devices, and not as `sharding` says."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return len(leaf.sharding.device_set) > 1 and leaf.sharding != sharding


def _smallest(results: Any) -> jax.Array | None:
    """Returns a small one of the last arrays of a tree; None if there is no array."""
    last = list(itertools.islice(_from_the_end(results), _MOST_LOOKED_AT))
    return min(last, key=lambda array: array.nbytes, default=None)


def _from_the_end(tree: Any) -> Iterator[jax.Array]:
    if isinstance(tree, jax.Array):
        if not isinstance(tree, jax.core.Tracer) and not tree.is_deleted():
            yield tree
        return
    if isinstance(tree, dict):
        tree = list(tree.values())
    elif not isinstance(tree, list | tuple):
        tree = [leaf for leaf in jax.tree.leaves(tree) if leaf is not tree]
    for part in reversed(tree):
        yield from _from_the_end(part)
