"""Detection of the member of a view that keeps the others waiting, and of where its program is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unison.runtime.liveness.failure_detector import Late
from unison.runtime.liveness.stragglers import Stragglers


class Lateness:
    """The register's record of the progress of a view's members.

    Args:
        view: The view's number.
        names: The members' names, by their ids.
        ask: Asks a member, given its id, where its program is.
        report: Called with a member's name, whether it is late or continues, and a text about it.

    Attributes:
        view: The view's number.

    Examples:
        >>> lateness = Lateness(1, {"a": "worker 0", "b": "worker 1"}, print, print)
        >>> for now in (0.0, 6.0):
        ...     lateness.look({"a": (8, "trains"), "b": (7, "trains")}, now)
        b
        >>> lateness.hear("b", "It sleeps.", 6.5)
        worker 1 True worker 1 has kept the others waiting for 6.5 s (an operation usually takes: \
not known yet). Last reported: trains.
        It sleeps.
    """

    def __init__(
        self,
        view: int,
        names: Mapping[str, str],
        ask: Callable[[str], None],
        report: Callable[[str, bool, str], None],
    ):
        self.view = view
        self._ids = list(names)
        called = list(names.values())
        self._stragglers = Stragglers(
            called,
            lambda question: ask(self._ids[question["worker"]]),
            lambda place, is_late, text: report(called[place], is_late, text),
        )
        #: For members that are behind: their count of exchanges, and since when.
        self._behind: dict[int, tuple[int, float]] = {}

    def look(self, begun: Mapping[str, tuple[int, str]], now: float) -> None:
        """Asks late members where their programs are.

        Args:
            begun: The number of exchanges that each member has begun in the view, and a description
                of what it is doing; a member that is missing here has not reported it, or is done.
            now: The time, in seconds.
        """
        most = max((count for count, _ in begun.values()), default=0)
        late = []
        for place, id_ in enumerate(self._ids):
            count, doing = begun.get(id_, (most, ""))
            if count == most:
                self._behind.pop(place, None)
                continue
            if place not in self._behind or self._behind[place][0] != count:
                self._behind[place] = (count, now)
            late.append(Late(place, count, self._behind[place][1], doing))
        self._stragglers.look(most, late, True, now)

    def hear(self, id_: str, stack: str, now: float) -> None:
        """Reports a late member once it has sent where its program is."""
        if id_ in self._ids:
            self._stragglers.hear(self._ids.index(id_), stack, now)
