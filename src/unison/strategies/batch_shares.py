"""The share of a global batch that each replica gets, either given or measured.

A step takes as long as its slowest replica. The time that a replica needs for n examples is modeled
as a line, a + b n, and measured: each replica computes its part of a step for two numbers of
examples, without waiting for the others (see `unison.program.single_replica`). Then every example
is assigned to the replica that would finish it first.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from unison.data import EQUAL_SHARES, InputWorkers, ReplicaShares, Shares
from unison.errors import InvalidArgumentError
from unison.runtime.placement import Placement
from unison.thread_pool import ThreadPool
from unison.values import PerReplica, is_distributed

logger = logging.getLogger("unison")

#: The value that replaces numbers if the replicas' speed is to be measured.
MEASURED = "measured"

#: Steps that run before the first measurement: the first one compiles.
_FIRST_STEPS = 3

#: The time between two measurements, as a multiple of one's duration; each change doubles it.
_TIME_BETWEEN = 50

#: For how many seconds, and at least how many times, a replica repeats its parts.
_SECONDS = 0.4
_RUNS = 3

#: Shares are changed if a step is expected to save at least this fraction of its time and this many
#: seconds: smaller differences are considered noise.
_LEAST_PART_GAINED = 0.1
_LEAST_SECONDS_GAINED = 0.3e-3

#: Measured shares are multiples of an equal share divided by this, so that programs compiled for a
#: division can be reused.
_GRAINS = 16


def replica_shares(
    batch_shares: Sequence[float] | str | None, num_replicas: int, workers: InputWorkers
) -> ReplicaShares:
    """Returns the shares of global batches that a strategy's replicas get.

    Args:
        batch_shares: The proportions of the parts, one number per replica or per worker;
            `"measured"`; None for equal parts.
        num_replicas: The number of replicas on all workers.
        workers: This worker's place; all workers must pass the same shares.

    Raises:
        ValueError: `batch_shares` is none of these.
        InvalidArgumentError: Another worker was given different shares.
    """
    given = batch_shares if isinstance(batch_shares, str | None) else list(batch_shares)
    for worker, said in enumerate(workers.talk("batch shares").ask(given)):
        if said != given:
            raise InvalidArgumentError(
                message="All workers must be given the same batch_shares. Worker "
                f"{workers.index} has {given}, worker {worker} has {said}."
            )
    if given is None:
        return EQUAL_SHARES
    if isinstance(given, str):
        if given != MEASURED:
            raise _unfit(given, num_replicas, workers)
        return MeasuredShares(num_replicas, workers) if num_replicas > 1 else EQUAL_SHARES
    if len(given) == workers.num_workers:
        given = [share for share in given for _ in range(num_replicas // workers.num_workers)]
    are_numbers = all(isinstance(share, int | float) and 0 <= share < math.inf for share in given)
    if len(given) != num_replicas or not are_numbers or not any(given):
        raise _unfit(batch_shares, num_replicas, workers)
    return ReplicaShares(tuple(given))


def _unfit(batch_shares: Any, num_replicas: int, workers: InputWorkers) -> ValueError:
    of_workers = f", or {workers.num_workers} (one per worker)" if workers.num_workers > 1 else ""
    return ValueError(
        f"Expected batch_shares as {num_replicas} numbers (one per replica){of_workers}, none of "
        f'them negative and not all 0; or "{MEASURED}". Received: {batch_shares!r}'
    )


class Pace(NamedTuple):
    """The time that a replica needs for its part of a step.

    Attributes:
        fixed: Seconds, independent of the number of examples.
        per_example: Seconds for each example.
    """

    fixed: float
    per_example: float

    def seconds(self, examples: int) -> float:
        return self.fixed + self.per_example * examples

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> Pace:
        """Returns the line through two measurements, each a number of examples and seconds.

        Since both are noisy, the fixed time is limited to between zero and half the second time.

        Examples:
            >>> Pace.through((8, 1.5), (16, 2.5))
            Pace(fixed=0.5, per_example=0.125)
            >>> Pace.through((8, 1.0), (16, 4.0))
            Pace(fixed=0.0, per_example=0.25)
            >>> Pace.through((8, 4.0), (16, 4.0))
            Pace(fixed=2.0, per_example=0.125)
        """
        examples, seconds = many
        fixed = 0.0
        if examples > few[0]:
            fixed = seconds - examples * (seconds - few[1]) / (examples - few[0])
        fixed = min(max(fixed, 0.0), seconds / 2)
        return cls(fixed, (seconds - fixed) / examples)


def balanced(paces: Sequence[Pace], examples: int) -> tuple[int, ...]:
    """Returns the numbers of examples that minimize the time of the slowest replica.

    Args:
        paces: Those of the replicas.
        examples: Their total number, in any unit.

    Examples:
        >>> balanced([Pace(0.0, 1.0), Pace(0.0, 3.0)], 8)
        (6, 2)
        >>> balanced([Pace(0.0, 1.0), Pace(9.0, 1.0)], 8)
        (8, 0)
    """
    counts = [0] * len(paces)
    queue = [(pace.seconds(1), replica) for replica, pace in enumerate(paces)]
    heapq.heapify(queue)
    for _ in range(examples):
        _, replica = queue[0]
        counts[replica] += 1
        heapq.heapreplace(queue, (paces[replica].seconds(counts[replica] + 1), replica))
    return tuple(counts)


class MeasuredShares(ReplicaShares):
    """Shares by measured speed, initially equal.

    Args:
        num_replicas: The number of replicas on all workers.
        workers: This worker's place.
    """

    proportions: tuple[float, ...]
    may_change = True

    def __init__(self, num_replicas: int, workers: InputWorkers):
        super().__init__((1,) * num_replicas)
        self._talk = workers.talk("measured shares")
        self._steps = 0
        self._next = _FIRST_STEPS
        self._changes = 0
        self._step_seconds = 0.0

    def is_due(self) -> bool:
        """Counts a step, on all workers; returns whether to measure before it."""
        self._steps += 1
        return self._steps > self._next

    def measure(self, examples: int, parts: Callable[[int], Sequence[Callable[[], Any]]]) -> None:
        """Measures the replicas' paces, and changes the shares if that is worthwhile.

        All workers must call this at the same point of the program.

        Args:
            examples: The size of the global batch.
            parts: Given a number of examples, returns for each of this process's replicas a
                function that computes its part of a step on that many, alone, and waits for it.
        """
        many = -(-examples // len(self.proportions))
        few = max(many // 2, 1)
        with self._failing_together():
            few_parts, many_parts = parts(few), parts(many)
            for part in (*few_parts, *many_parts):
                part()  # compiles
        # All at the same time: on a shared machine, they slow each other down, as in a step.
        self._talk.ask(None)
        begin = time.perf_counter()
        with self._failing_together():
            seconds = _seconds_of(zip(few_parts, many_parts, strict=True))
        own = [Pace.through((few, less), (many, more)) for less, more in seconds]
        said = self._talk.ask([time.perf_counter() - begin, own])
        self.choose(examples, [Pace(*pace) for _, paces in said for pace in paces])
        interval = _TIME_BETWEEN * max(duration for duration, _ in said) / self._step_seconds
        self._next = self._steps + math.ceil(interval * 2**self._changes)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Context manager that reports an error to the other workers, which wait for this one."""
        try:
            yield
        except Exception as error:
            self._talk.fail(f"measuring its pace: {type(error).__name__}: {error}")
            raise

    def choose(self, examples: int, paces: Sequence[Pace]) -> None:
        """Changes the shares if the replicas' paces make it worthwhile.

        Args:
            examples: The size of the global batch.
            paces: Those of all replicas.
        """
        grains = _GRAINS * len(paces)
        of_grain = examples / grains
        chosen = balanced([Pace(p.fixed, p.per_example * of_grain) for p in paces], grains)
        self._step_seconds = _step_seconds(examples, paces, self.proportions)
        seconds = _step_seconds(examples, paces, chosen)
        gain = self._step_seconds - seconds
        if gain < max(_LEAST_SECONDS_GAINED, _LEAST_PART_GAINED * self._step_seconds):
            return
        logger.info(
            "The replicas get %s of the global batch by their measured speed: their part of a step "
            "takes %.3g ms instead of %.3g ms.",
            ":".join(map(str, Shares(examples, len(paces), chosen).counts)),
            1000 * seconds,
            1000 * self._step_seconds,
        )
        self.proportions = chosen
        self._step_seconds = seconds
        self._changes += 1


def with_examples(tree: Any, count: int, placement: Placement) -> Any:
    """Returns `tree` with `count` examples for each replica in its `PerReplica` values.

    On a replica that has fewer, they are repeated; one that has none gets zeros.
    """

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica) or not leaf.shapes(placement)[0]:
            return leaf
        shapes = [(count, *shape[1:]) for shape in leaf.shapes(placement)]
        rows = [np.asarray(value) for value in leaf.values]
        return PerReplica([np.resize(x, (count, *x.shape[1:])) for x in rows], shapes)

    return jax.tree.map(resized, tree, is_leaf=is_distributed)


def examples_of(tree: Any, placement: Placement) -> int:
    """Returns the number of examples that all replicas have in the `PerReplica` values of `tree`.

    Raises:
        ValueError: There are no such values.
    """
    for leaf in jax.tree.leaves(tree, is_leaf=is_distributed):
        if isinstance(leaf, PerReplica) and leaf.shapes(placement)[0]:
            return sum(shape[0] for shape in leaf.shapes(placement))
    raise ValueError(
        "Measuring takes a batch among the arguments: PerReplica values with examples along their "
        "first axes. Received none. Pass what a distributed dataset gives."
    )


def _step_seconds(examples: int, paces: Sequence[Pace], proportions: Sequence[float]) -> float:
    """Returns the time that the slowest replica needs."""
    counts = Shares(examples, len(paces), tuple(proportions)).counts
    return max(pace.seconds(count) for pace, count in zip(paces, counts, strict=True))


def _seconds_of(parts: Iterable[Sequence[Callable[[], Any]]]) -> list[Sequence[float]]:
    """Returns the mean seconds of every replica's calls; the replicas run at the same time."""
    of_replicas = [*parts]
    with ThreadPool(len(of_replicas)) as threads:
        return [*threads.map(_mean_seconds, of_replicas)]


def _mean_seconds(calls: Sequence[Callable[[], Any]]) -> Sequence[float]:
    """Returns the mean seconds of calls that are repeated in turn.

    In turn, so that other load on the machine slows all of them down; the mean, because that load
    may vary.
    """
    seconds = np.zeros(len(calls))
    runs = 0
    while runs < _RUNS or seconds.sum() < _SECONDS:
        for place, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            seconds[place] += time.perf_counter() - begin
        runs += 1
    return (seconds / runs).tolist()
