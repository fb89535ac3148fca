"""`CommunicationOptions(auto_tune=True)`: measures the first steps to find the fastest options.

Some of the first steps run with each of several `CommunicationOptions` in turn, and all workers
choose the fastest. These are ordinary training steps: with all options, the gradients' sums are the
same up to round-off. The user's options are the first candidate, and only clearly faster ones
replace them. A compression that the user has not configured is never tried.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from unison.cells import live_cells
from unison.collectives import AggregationMethod, Communication, CommunicationOptions
from unison.program.identity import identity
from unison.runtime import process_group
from unison.runtime.placement import Placement
from unison.values import PerReplica, is_distributed

logger = logging.getLogger("unison")

Result = TypeVar("Result")

#: The number of measured steps of each candidate, after one that compiles it.
_ROUNDS = 8

#: The user's options are replaced only if a step gets faster by at least this fraction.
_LEAST_GAIN = 0.03

#: Sizes of buffers that are tried, in bytes.
_PACKS = (2**20, 2**22, 25 * 2**20)


class Tuning:
    """Measures the first steps of a strategy's programs, and chooses how they communicate.

    All workers must run the same steps in the same order.

    Args:
        communication: Holds the options that the programs communicate with; they are changed.
        forget_other_ways: Drops programs that were compiled for other options than the current
            ones.
    """

    def __init__(self, communication: Communication, forget_other_ways: Callable[[], None]):
        self._communication = communication
        self._forget_other_ways = forget_other_ways
        #: The trials by key of the step; None for a program that does not sum gradients.
        self._trials: dict[Hashable, _Trial | None] = {}
        communication.options = dataclasses.replace(communication.options, auto_tune=False)
        #: Whether the choice has been made.
        self.has_settled = False

    def step(
        self, key: Hashable, run: Callable[[], Result], outputs: Callable[[Result], Any]
    ) -> Result:
        """Runs a step, and measures it if it is part of a trial.

        Args:
            key: Equal for steps of the same program on batches of the same shape.
            run: Runs the step.
            outputs: Given its result, returns arrays that are available when the step is done.
        """
        if key not in self._trials:
            return self._first_step(key, run)
        trial = self._trials[key]
        if trial is None:
            return run()
        default = self._communication.options
        self._communication.options = trial.way
        begin = time.perf_counter()
        try:
            result = run()
            jax.block_until_ready(outputs(result))
        finally:
            self._communication.options = default
        trial.note(time.perf_counter() - begin)
        if trial.is_over:
            self._settle(trial)
        return result

    def _first_step(self, key: Hashable, run: Callable[[], Result]) -> Result:
        """Runs the first step of a program, which traces it, and records what it requests."""
        communication = self._communication
        communication.was_asked, communication.warmup_steps = False, None
        result = run()
        self._trials[key] = None
        if communication.was_asked:
            ways = ways_to_try(communication.options, communication.warmup_steps is not None)
            self._trials[key] = _Trial(ways, communication.warmup_steps or 0)
        return result

    def _settle(self, trial: _Trial) -> None:
        of_workers = process_group.all_gather_json(
            trial.seconds, "The times of ways to communicate"
        )
        # The shortest time of a step counts, that of the worker that arrived last: others waited.
        seconds = np.min(np.asarray(of_workers), axis=0)
        place = fastest(seconds)
        chosen = trial.ways[place]
        times = ", ".join(
            f"{describe(way)} {1000 * median:.3g} ms"
            for way, median in zip(trial.ways, np.median(seconds, axis=1), strict=True)
        )
        why = f"no other options are {_LEAST_GAIN:.0%} faster" if place == 0 else "measured fastest"
        # The user of `auto_tune` wants to see this: it is shown without UNISON_LOG, once.
        level = logging.WARNING if process_group.is_first() else logging.INFO
        logger.log(
            level,
            "Gradients are now communicated %s: %s. Median time of %d steps: %s.",
            describe(chosen),
            why,
            _ROUNDS,
            times,
        )
        if trial.ways[0].compresses and not chosen.compresses:
            logger.log(level, "Compression is switched off: the network is not the bottleneck.")
        self._communication.options = chosen
        self.has_settled = True
        self._trials.clear()
        self._forget_other_ways()


class _Trial:
    """The steps of one program, with several options in turn.

    Args:
        ways: The candidate options; the first are those used without tuning.
        steps_to_skip: The number of first steps, which are not typical.
    """

    def __init__(self, ways: Sequence[CommunicationOptions], steps_to_skip: int):
        self.ways = ways
        #: The seconds of the steps of each way.
        self.seconds: list[list[float]] = [[] for _ in ways]
        self._steps = -steps_to_skip

    @property
    def way(self) -> CommunicationOptions:
        """The options for the next step."""
        return self.ways[max(self._steps, 0) % len(self.ways)]

    @property
    def is_over(self) -> bool:
        return len(self.seconds[-1]) == _ROUNDS

    def note(self, seconds: float) -> None:
        """Records the time of a step with the options `way`, except for the compiling one."""
        if self._steps >= len(self.ways):
            self.seconds[self._steps % len(self.ways)].append(seconds)
        self._steps += 1


def ways_to_try(given: CommunicationOptions, compresses: bool) -> list[CommunicationOptions]:
    """Returns the options that are compared; the first are the given ones.

    Args:
        given: The options of the user. Those that differ from the defaults are kept.
        compresses: Whether the program compresses gradients, so that not compressing can be tried.

    Examples:
        >>> from unison import CommunicationOptions
        >>> [describe(way) for way in ways_to_try(CommunicationOptions(bytes_per_pack=512), False)]
        ['by DEFAULT in packs of 512 bytes', 'by ADD_N in packs of 512 bytes', 'by TREE in packs \
of 512 bytes', 'by ACCUMULATE_N in packs of 512 bytes']
    """
    methods = [given]
    if given.method is AggregationMethod.DEFAULT:
        methods += [
            dataclasses.replace(given, method=method)
            for method in AggregationMethod
            if method is not AggregationMethod.DEFAULT
        ]
    packed = []
    if given.bytes_per_pack == 0:
        packed = [dataclasses.replace(given, bytes_per_pack=size) for size in _PACKS]
    ways = [*methods, *packed]
    if compresses and given.compresses:
        return [given, *(dataclasses.replace(way, compresses=False) for way in ways)]
    return ways


def fastest(seconds: np.ndarray) -> int:
    """Returns the index of the fastest options; 0 unless others are faster beyond the noise.

    Args:
        seconds: The time of each step, `[ways, rounds]`. The options took turns: other load in a
            round slowed all of them down.

    Examples:
        >>> fastest(np.array([[1.0, 1.1, 1.0, 5.0], [0.5, 0.6, 0.5, 4.0]]))
        1
        >>> fastest(np.array([[1.0, 1.1, 1.0, 5.0], [0.5, 2.0, 2.0, 0.5]]))
        0
    """
    medians = np.median(seconds, axis=1)
    best = int(np.argmin(medians))
    gains = seconds[0] - seconds[best]
    is_clear = np.median(gains) >= _LEAST_GAIN * medians[0] and np.quantile(gains, 0.25) > 0
    return best if is_clear else 0


def describe(way: CommunicationOptions) -> str:
    """Describes how gradients are communicated with `way`, except for the implementation."""
    size = way.bytes_per_pack
    if size and size % 2**20 == 0:
        packs = f" in packs of {size // 2**20} MiB"
    else:
        packs = f" in packs of {size} bytes" if size else ""
    return f"by {way.method.name}{packs}{'' if way.compresses else ', not compressed'}"


def key_of_run(
    function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], placement: Placement
) -> Hashable:
    """Returns a key that is equal for calls of `strategy.run` that run the same program."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            return tuple(leaf.shapes(placement))  # of all workers, whose shapes may differ
        return np.shape(leaf) if isinstance(leaf, np.ndarray | jax.Array) else type(leaf)

    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_distributed)
    return identity(function), structure, tuple(map(shape, leaves))


def arrays_of_run(result: Any, placement: Placement) -> list[Any]:
    """Returns the arrays that are available when a call of `strategy.run` with `result` is done."""
    stored = [cell.array for cell in live_cells(placement)]
    leaves = jax.tree.leaves(result, is_leaf=is_distributed)
    components = [leaf.values if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
    return [array for array in (*stored, *components) if array is not None]
