"""Workers of a job of a fixed size end whatever happens, and blame the one that is at fault."""

import pytest

from liveness_model import Setting, explore
from unison.runtime.liveness.failure_detector import Watch

EXPLORED = {
    "nothing-fails": Setting(beats=2, pauses=1),
    "three-and-nothing-fails": Setting(workers=3, operations=1),
    "one-ends-early": Setting(shorter=1),
    "the-first-ends-early": Setting(shorter=0),
    "one-runs-a-different-operation": Setting(different=1),
    "the-first-runs-a-different-operation": Setting(different=0),
    "one-fails": Setting(faults=1),
    "one-fails-after-a-pause": Setting(faults=1, pauses=1, beats=0),
    "one-of-three-fails": Setting(faults=1, workers=3, operations=1, beats=0),
    "one-of-three-is-stopped-after-a-pause": Setting(
        faults=1, workers=3, operations=1, beats=0, pauses=1, kinds=("stop",)
    ),
    "both-fail": Setting(faults=2),
}


@pytest.mark.parametrize("name", EXPLORED)
def test_the_rules_hold_in_every_state(name):
    found = explore(EXPLORED[name])
    assert found.broken is None, "\n".join([found.broken, *map(str, found.way)])
    assert found.states > 50


#: Of 38 to 212 thousand states.
FARTHER = {
    "three-and-one-fails": Setting(faults=1, workers=3, operations=1),
    "three-and-one-is-stopped-after-two-pauses": Setting(
        faults=1, workers=3, operations=1, beats=0, pauses=2, kinds=("stop",)
    ),
    "three-and-one-ends-early": Setting(workers=3, shorter=1),
    "three-and-the-first-ends-early": Setting(workers=3, shorter=0),
    "three-and-one-runs-a-different-operation": Setting(workers=3, different=1),
    "one-fails-between-heartbeats": Setting(faults=1, beats=3),
    "two-of-three-fail": Setting(faults=2, workers=3, operations=1, beats=0),
}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FARTHER)
def test_the_rules_hold_in_every_state_farther_away(name):
    found = explore(FARTHER[name])
    assert found.broken is None, "\n".join([found.broken, *map(str, found.way)])


# Rules that are broken on purpose: each has to be found.


class TakesEveryEndForADeath(Watch):
    def hear(self, worker, message, now):
        finding = super().hear(worker, message, now)
        self._known[worker].has_left = False
        return finding


class MissesDeaths(Watch):
    def hear(self, worker, message, now):
        return None if message is None else super().hear(worker, message, now)


class MissesErrors(Watch):
    def hear(self, worker, message, now):
        is_error = message is not None and message["is"] == "failed"
        return super().hear(worker, {"is": "gone"} if is_error else message, now) and None


class MissesWhoEndsEarly(Watch):
    def look(self, count, doing, now):
        finding = super().look(count, doing, now)
        return None if finding is not None and finding.kind == "left" else finding


class BlamesWhoCannotBeHeardOf(Watch):
    """Takes those for stuck whose messages the first worker does not relay."""

    def look(self, count, doing, now):
        for worker, known in self._known.items():
            if worker and known.behind_since is not None:
                known.heard_at = now
        return super().look(count, doing, now)


class BlamesAnyoneForSilence(Watch):
    """Forgets that the first worker relays the messages of all."""

    def look(self, count, doing, now):
        if 0 in self._known:
            self._known[0].heard_at = now
        return super().look(count, doing, now)


class WaitsForTheStuck(Watch):
    def look(self, count, doing, now):
        for known in self._known.values():
            known.behind_since = None
        return super().look(count, doing, now)


class ComparesNothing(Watch):
    def compare(self, number, own):
        return None

    def compare_latest(self, operation_of):
        return None


STOPPED = Setting(faults=1, workers=3, operations=1, beats=0, pauses=1, kinds=("stop",))
MUTATIONS = {
    TakesEveryEndForADeath: (Setting(), "at fault is none"),
    MissesDeaths: (Setting(faults=1, kinds=("crash",)), "have not ended"),
    MissesErrors: (Setting(faults=1, kinds=("failure",)), "have not ended"),
    MissesWhoEndsEarly: (Setting(shorter=1), "have not ended"),
    BlamesWhoCannotBeHeardOf: (STOPPED, "at fault is [0]"),
    BlamesAnyoneForSilence: (STOPPED, "at fault is [0]"),
    WaitsForTheStuck: (Setting(faults=1, kinds=("hang",)), "have not ended"),
    ComparesNothing: (Setting(different=1), "have not found"),
}


@pytest.mark.parametrize("broken", MUTATIONS, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_found(broken):
    setting, message = MUTATIONS[broken]
    found = explore(setting._replace(watch=broken))
    assert found.broken is not None
    assert message in found.broken
