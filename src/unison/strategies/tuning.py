"""`CommunicationOptions(auto_tune=True)`: the first steps of training find the fastest way.

Each of several `CommunicationOptions` runs some of the first steps, in turn, and all workers settle
for the fastest. These are steps like any other: whatever the way, the gradients' sums are the same
up to round-off. The options of the user are the first of the ways, and what is not clearly faster
does not replace them. What is never tried is a compression that the user has not given.
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

#: How many steps of each way are measured, after one that compiles it.
_ROUNDS = 8

#: What replaces the options of the user is faster by this part of a step, at least.
_LEAST_GAIN = 0.03

#: Sizes of buffers that are tried.
_PACKS = (2**20, 2**22, 25 * 2**20)


class Tuning:
    """Measures the first steps of a strategy's programs, and chooses how they communicate.

    All workers must run the same steps in the same order.

    Args:
        communication: What the programs communicate by, and what is changed.
        forget_other_ways: Drops programs that go by other options than the present ones.
    """

    def __init__(self, communication: Communication, forget_other_ways: Callable[[], None]):
        self._communication = communication
        self._forget_other_ways = forget_other_ways
        #: The trials by what they are of; None for a program that sums no gradients.
        self._trials: dict[Hashable, _Trial | None] = {}
        communication.options = dataclasses.replace(communication.options, auto_tune=False)
        #: Whether the choice has been made.
        self.has_settled = False

    def step(
        self, key: Hashable, run: Callable[[], Result], outputs: Callable[[Result], Any]
    ) -> Result:
        """Runs a step, and measures it if that tells anything.

        Args:
            key: The same for steps of one program on batches of one shape.
            run: Runs the step.
            outputs: Given what it returned, returns arrays that are there when the step is done.
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
        """Runs the first step of a program, which is traced by it, and sees what it asks for."""
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
        # Of a step, the time of the worker that came last counts: the others waited for it.
        seconds = np.min(np.asarray(of_workers), axis=0)
        place = fastest(seconds)
        chosen = trial.ways[place]
        times = ", ".join(
            f"{describe(way)} {1000 * median:.3g} ms"
            for way, median in zip(trial.ways, np.median(seconds, axis=1), strict=True)
        )
        why = f"no other way takes {_LEAST_GAIN:.0%} less" if place == 0 else "measured fastest"
        # `auto_tune` is asked to say it: so it is seen without UNISON_LOG, once.
        level = logging.WARNING if process_group.is_first() else logging.INFO
        logger.log(
            level,
            "Gradients travel %s from now on: %s. A step took, as the median of %d: %s.",
            describe(chosen),
            why,
            _ROUNDS,
            times,
        )
        if trial.ways[0].compresses and not chosen.compresses:
            logger.log(
                level, "The compression is switched off: the network is not what a step waits for."
            )
        self._communication.options = chosen
        self.has_settled = True
        self._trials.clear()
        self._forget_other_ways()


class _Trial:
    """The steps of one program, by several ways in turn.

    Args:
        ways: The ways; the first is what there is without tuning.
        steps_to_skip: How many steps are not typical, at first.
    """

    def __init__(self, ways: Sequence[CommunicationOptions], steps_to_skip: int):
        self.ways = ways
        #: The seconds of the steps of each way.
        self.seconds: list[list[float]] = [[] for _ in ways]
        self._steps = -steps_to_skip

    @property
    def way(self) -> CommunicationOptions:
        """The way of the next step."""
        return self.ways[max(self._steps, 0) % len(self.ways)]

    @property
    def is_over(self) -> bool:
        return len(self.seconds[-1]) == _ROUNDS

    def note(self, seconds: float) -> None:
        """Takes note of the time of a step by `way`, but of the first, which compiles it."""
        if self._steps >= len(self.ways):
            self.seconds[self._steps % len(self.ways)].append(seconds)
        self._steps += 1


def ways_to_try(given: CommunicationOptions, compresses: bool) -> list[CommunicationOptions]:
    """Returns the ways that are compared; the first is that of the options as they are given.

    Args:
        given: The options of the user. What they say that is no default is kept.
        compresses: Whether the program compresses gradients, so that it can do without.

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
    """Returns the place of the fastest way; 0 unless another is faster beyond the noise.

    Args:
        seconds: The time of each step, `[ways, rounds]`. The ways took turns: what else happened
            in a round slowed all of them down.

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
    """Says how gradients travel by `way`, but for who moves the bytes."""
    size = way.bytes_per_pack
    if size and size % 2**20 == 0:
        packs = f" in packs of {size // 2**20} MiB"
    else:
        packs = f" in packs of {size} bytes" if size else ""
    return f"by {way.method.name}{packs}{'' if way.compresses else ', not compressed'}"


def key_of_run(
    function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], placement: Placement
) -> Hashable:
    """Returns what calls of `strategy.run` have in common that run one program."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            return tuple(leaf.shapes(placement))  # of all workers: what they have may differ
        return np.shape(leaf) if isinstance(leaf, np.ndarray | jax.Array) else type(leaf)

    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_distributed)
    return identity(function), structure, tuple(map(shape, leaves))


def arrays_of_run(result: Any, placement: Placement) -> list[Any]:
    """Returns what is computed when a call of `strategy.run` is done, which returned `result`."""
    stored = [cell.array for cell in live_cells(placement)]
    leaves = jax.tree.leaves(result, is_leaf=is_distributed)
    components = [leaf.values if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
    return [array for array in (*stored, *components) if array is not None]
