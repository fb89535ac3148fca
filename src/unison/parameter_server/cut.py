"""`cheapest_cut`: the cheapest division of a computation between two machines."""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

V = TypeVar("V", bound=Hashable)

_UNLIMITED = 1 << 60


def cheapest_cut(
    before: Mapping[V, Collection[V]],
    costs: Mapping[V, int],
    sources: Collection[V],
    targets: Collection[V],
) -> set[V]:
    """Returns the cheapest set of nodes on all paths from `sources` to `targets`.

    Among several, the one nearest to the sources is returned. This is a minimum vertex cut, by
    augmenting paths (Ford and Fulkerson, 1956; shortest first, Edmonds and Karp, 1972).

    Args:
        before: The direct predecessors of every node.
        costs: The cost of cutting each node: a positive integer.
        sources: The start nodes of paths; may be cut.
        targets: The end nodes of paths; may be cut.

    Examples:
        >>> before = {"a": [], "b": [], "sum": ["a", "b"], "half": ["sum"]}
        >>> cheapest_cut(before, dict.fromkeys(before, 4), ["a", "b"], ["half"])
        {'sum'}
    """
    # Every node is an edge from its entry to its exit, whose capacity is its cost.
    left: dict[tuple, dict[tuple, int]] = collections.defaultdict(dict)

    def connect(start: tuple, end: tuple, capacity: int) -> None:
        left[start][end] = capacity
        left[end].setdefault(start, 0)

    begin, end = ("begin",), ("end",)
    for node, cost in costs.items():
        connect((node, "in"), (node, "out"), cost)
        for earlier in before[node]:
            connect((earlier, "out"), (node, "in"), _UNLIMITED)
    for source in sources:
        connect(begin, (source, "in"), _UNLIMITED)
    for target in targets:
        connect((target, "out"), end, _UNLIMITED)
    while True:
        came_from = _reached(left, begin, end)
        if end not in came_from:
            break
        path = [end]
        while path[-1] != begin:
            path.append(came_from[path[-1]])
        steps = list(zip(path[1:], path, strict=False))
        flow = min(left[start][stop] for start, stop in steps)
        for start, stop in steps:
            left[start][stop] -= flow
            left[stop][start] += flow
    return {node for node in costs if (node, "in") in came_from and (node, "out") not in came_from}


def _reached(left: Mapping[tuple, Mapping[tuple, int]], begin: tuple, end: tuple) -> dict:
    """Returns the predecessor of every node that is reached; stops at `end`."""
    came_from = {begin: begin}
    queue = collections.deque([begin])
    while queue and end not in came_from:
        here = queue.popleft()
        for there, capacity in left[here].items():
            if capacity and there not in came_from:
                came_from[there] = here
                queue.append(there)
    return came_from
