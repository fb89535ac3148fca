"""Whether one run was faster than another, or whether it only looks so.

Each point has been measured in several rounds, and differences between rounds are noise. The
ratio of the rates, as geometric means over the rounds, gets a confidence interval by the bootstrap:
rounds are drawn again and again, with replacement, from each side. A few rounds spread less than
what they are drawn from, so the interval is that of a higher level, as Student's t has it: T.
Hesterberg, What Teachers Should Know About the Bootstrap (2015), section 3.3. And as several points
are several chances to be wrong, the level of each is that much higher (Bonferroni).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from unison.benching.points import Point
from unison.benching.results import Results
from unison.benching.scaling import rate_of

#: The number of bootstrap samples.
_DRAWS = 20_000

#: Of three rounds each, equal programs would seem to differ once in ten times.
LEAST_ROUNDS = 4

_LIBRARIES = ("unison", "jax", "jaxlib", "keras")


class NotComparableError(ValueError):
    """Two results without a common point."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of a point in two runs.

    Attributes:
        point: The point.
        before: The first run's rate.
        after: The second's.
        ratio: The second as a multiple of the first.
        interval: The confidence interval of the ratio.
        verdict: `"faster"`, `"slower"` or `"no difference"`.
    """

    point: Point
    before: float
    after: float
    ratio: float
    interval: tuple[float, float]
    verdict: str


def compare(
    before: Results, after: Results, confidence: float = 0.95, least: float = 0.02
) -> list[Comparison]:
    """Compares the points that two runs have in common.

    Args:
        before: The first run.
        after: The second.
        confidence: The probability that no point is reported as different that is not.
        least: Smaller relative differences are ignored.

    Raises:
        NotComparableError: They have measured different things, or too few rounds.
    """
    if before.target != after.target:
        raise NotComparableError(
            f"The runs have measured different programs: {before.target} and {after.target}."
        )
    common = [point for point in before.rounds if point in after.rounds]
    if not common:
        raise NotComparableError(
            "The runs have no point in common. Measure both with the same sizes. The first has: "
            f"{'; '.join(map(str, before.rounds))}. The second has: "
            f"{'; '.join(map(str, after.rounds))}."
        )
    found = []
    for point in common:
        one, other = before.rounds[point], after.rounds[point]
        if min(len(one), len(other)) < LEAST_ROUNDS:
            raise NotComparableError(
                f"{point} has been measured in {len(one)} and {len(other)} rounds. At least "
                f"{LEAST_ROUNDS} of each tell noise from difference: measure with --rounds 5."
            )
        if (one[0].examples is None) != (other[0].examples is None):
            raise NotComparableError(f"{point}: one run counts examples, the other one steps.")
        found.append(
            _compared(
                point,
                [rate_of(record) for record in one],
                [rate_of(record) for record in other],
                1 - (1 - confidence) / len(common),
                least,
            )
        )
    return found


def differences(before: Results, after: Results) -> list[str]:
    """Returns the other differences between two runs, in words."""
    found = []
    for name in _LIBRARIES:
        one, other = before.versions.get(name), after.versions.get(name)
        if one != other:
            found.append(f"{name} {one} and {other}")
    if before.machine != after.machine:
        found.append(f"machine: {before.machine} and {after.machine}")
    alone = set(before.rounds) ^ set(after.rounds)
    if alone:
        found.append(f"measured by one of them only: {'; '.join(map(str, sorted_points(alone)))}")
    return found


def sorted_points(points: set[Point]) -> list[Point]:
    """Returns points in order."""
    return sorted(points, key=lambda p: (p.replicas, p.batch or 0, p.examples or 0))


def interval_of_ratio(
    before: Sequence[float], after: Sequence[float], confidence: float
) -> tuple[float, float]:
    """Returns the interval in which the ratio of the geometric means of two samples lies.

    Examples:
        >>> low, high = interval_of_ratio([10, 10.1, 9.9, 10.2, 10], [20, 20.4, 19.8, 20, 20], 0.95)
        >>> 1.9 < low < 2 < high < 2.1
        True
    """
    generator = np.random.default_rng(0)
    means = [
        generator.choice(np.log(rates), (_DRAWS, len(rates))).mean(axis=1)
        for rates in (before, after)
    ]
    tail = _tail(1 - confidence, min(len(before), len(after)))
    low, high = np.quantile(means[1] - means[0], [tail, 1 - tail])
    return math.exp(low), math.exp(high)


def _tail(alpha: float, count: int) -> float:
    """Returns the part that is cut off at each end, for samples of `count`."""
    from scipy.stats import t  # slow to import; JAX needs it anyway

    quantile = t.ppf(1 - alpha / 2, count - 1)
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * float(quantile))


def _compared(
    point: Point,
    before: Sequence[float],
    after: Sequence[float],
    confidence: float,
    least: float,
) -> Comparison:
    one, other = (math.exp(np.log(rates).mean()) for rates in (before, after))
    ratio = other / one
    low, high = interval_of_ratio(before, after, confidence)
    verdict = "no difference"
    if abs(ratio - 1) >= least:
        if low > 1:
            verdict = "faster"
        elif high < 1:
            verdict = "slower"
    return Comparison(point, one, other, ratio, (low, high), verdict)
