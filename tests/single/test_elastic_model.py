"""The rules by which an elastic group changes hold in every state that can be reached."""

import pytest

from elastic_model import Setting, explore
from unison.net.lines import Message
from unison.runtime.elastic.participant import Participant
from unison.runtime.elastic.roster import Phase, Roster, _State

EXPLORED = {
    "nothing-fails": Setting(faults=0, steps=2),
    "three-start": Setting(faults=0, workers=3, most=3),
    "a-newcomer-comes": Setting(faults=0, newcomers=1, most=3),
    "a-newcomer-waits-until-one-is-lost": Setting(
        faults=1, kinds=("crash",), workers=1, newcomers=1, most=1
    ),
    "they-end": Setting(faults=1, kinds=("crash", "notice"), is_finite=True),
    "one-program-ends-before-the-other": Setting(faults=0, steps=2, shorter=1, is_finite=True),
    "one-is-stopped-and-wakes-after-the-end": Setting(faults=1, kinds=("silence",), is_finite=True),
    "one-is-cut-off-and-wakes-after-the-end": Setting(
        faults=1, kinds=("cut",), is_finite=True, newcomers=1, workers=1
    ),
    "a-lonely-one-leaves-when-another-comes": Setting(
        faults=1, kinds=("notice",), workers=1, newcomers=1
    ),
    "a-lonely-one-leaves-and-is-cut-off": Setting(
        faults=2, kinds=("notice", "cut"), workers=1, restarts=1, is_finite=True
    ),
    "one-comes-when-the-other-ends": Setting(faults=0, workers=1, newcomers=1, is_finite=True),
    "one-is-lost-and-comes-again": Setting(faults=1, kinds=("crash",), restarts=1, steps=2),
    "two-are-lost": Setting(faults=2, kinds=("crash",), restarts=1, least=2),
    "a-connection-is-cut": Setting(faults=1, kinds=("cut",)),
    "one-is-silent-and-late": Setting(faults=1, kinds=("silence", "late")),
    "one-is-suspected-or-leaves": Setting(faults=1, kinds=("suspect", "notice"), least=2),
    "a-lonely-one-is-thought-lost": Setting(
        faults=1, kinds=("silence", "cut"), workers=1, newcomers=1
    ),
    "a-lonely-one-is-cut-twice": Setting(faults=2, kinds=("cut",), workers=1, newcomers=1, most=1),
    "a-program-fails": Setting(faults=1, kinds=("failure",), restarts=1),
    "the-job-is-stopped": Setting(faults=1, kinds=("stop",), newcomers=1, workers=1),
    "two-cannot-reach-each-other": Setting(faults=0, apart=((0, 1),)),
    "the-only-two-cannot-reach-each-other": Setting(faults=0, apart=((0, 1),), least=2),
}


@pytest.mark.parametrize("name", EXPLORED)
def test_the_rules_hold_in_every_state(name):
    found = explore(EXPLORED[name])
    assert found.broken is None, "\n".join([found.broken, *found.way])
    assert found.states > 50


#: Of 20 to 365 thousand states.
FARTHER = {
    "every-move-by-itself": Setting(faults=1, is_fine=True),
    "two-faults": Setting(faults=2, kinds=("crash", "suspect", "late")),
    "one-is-to-end-soon-and-is-cut-off": Setting(faults=2, kinds=("notice", "cut")),
    "two-faults-and-two-steps": Setting(faults=2, kinds=("crash", "silence"), steps=2),
    "a-newcomer-and-a-fault": Setting(faults=1, newcomers=1, kinds=("crash", "late")),
    "three-and-a-fault": Setting(faults=1, workers=3, least=2, most=3, kinds=("crash", "suspect")),
    "cut-and-come-again": Setting(
        faults=2, kinds=("crash", "cut"), restarts=1, workers=1, newcomers=1
    ),
}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FARTHER)
def test_the_rules_hold_in_every_state_farther_away(name):
    found = explore(FARTHER[name])
    assert found.broken is None, "\n".join([found.broken, *found.way])


# Rules that are broken on purpose: each has to be found.


class GoesOnBeforeTheLastViewIsOver(Roster):
    def _may_begin(self, candidates):
        self.is_over = True
        self._states = {id_: own for id_, own in self._states.items() if id_ in self.workers}
        return super()._may_begin(candidates)


class ForgetsThatTheStateMayComeBack(Roster):
    def _may_begin(self, candidates):
        self._states = {id_: own for id_, own in self._states.items() if id_ in self.workers}
        self._heirs = {}
        return super()._may_begin(candidates)


class BelievesEveryStep(Roster):
    def _propose(self, candidates):
        for worker in candidates:
            if worker.step is not None:
                self._states[worker.member.id] = _State(worker.slot, self._started)
        super()._propose(candidates)


class StartsWithTheFirstThatHasFormed(Roster):
    def formed(self, id_, view):
        super().formed(id_, view)
        if self.phase is Phase.FORMING:
            self._start()


class ForgetsAtOnceWhoLeaves(Roster):
    """Does not wait until the last worker with the state has left that for the others."""

    def _let_go(self, worker):
        self._forget(worker.member.id)
        super()._let_go(worker)


class WaitsForTheLost(Roster):
    """Does not interrupt a view that is formed when a member is lost."""

    def _interrupt(self, why):
        if self.phase is Phase.FORMING and "is lost" in why:
            return
        super()._interrupt(why)


class LeavesNobodyOut(Roster):
    def _bench(self, id_):
        pass


class LetsThoseWaitWhoAreNotDone(Roster):
    def _wake(self, timer, seconds):
        if timer != "done":
            super()._wake(timer, seconds)


class TakesAViewWhenItsPartHasEnded(Participant):
    def take(self):
        ended, self.ended = self.ended, None
        try:
            return super().take()
        finally:
            self.ended = ended


class KeepsAViewThatIsOver(Participant):
    """Does not ask again where a view is over before the program has taken it."""

    def hear(self, message: Message) -> None:
        is_taken = self._proposed is None
        super().hear(message)
        if message["is"] == "interrupt" and not is_taken:
            self.outbox.clear()


class LeavesWithoutAskingAgain(Participant):
    """Ends at once where it is to end soon and has lost the register, which may have ended it."""

    def cut(self, why):
        self._asks_again = True
        super().cut(why)


A_LONELY_ONE = Setting(faults=1, kinds=("silence",), workers=1, newcomers=1, most=1)
MUTATIONS = {
    GoesOnBeforeTheLastViewIsOver: (A_LONELY_ONE, "complete"),
    ForgetsThatTheStateMayComeBack: (
        A_LONELY_ONE._replace(faults=2, kinds=("cut",)),
        "is lost in view",
    ),
    BelievesEveryStep: (Setting(faults=1, kinds=("silence",)), "is lost in view"),
    StartsWithTheFirstThatHasFormed: (Setting(faults=0), "nothing can happen"),
    ForgetsAtOnceWhoLeaves: (
        Setting(faults=1, kinds=("notice",), workers=1, newcomers=1),
        "is lost in view",
    ),
    WaitsForTheLost: (Setting(faults=1, kinds=("crash",)), "it raises KeyError"),
    LeavesNobodyOut: (Setting(faults=0, apart=((0, 1),)), "view after view"),
    LetsThoseWaitWhoAreNotDone: (
        Setting(faults=0, steps=2, shorter=1, is_finite=True),
        "nothing can happen",
    ),
    LeavesWithoutAskingAgain: (
        Setting(faults=1, kinds=("silence",), is_finite=True),
        "leaves a state although the job is done",
    ),
    TakesAViewWhenItsPartHasEnded: (
        Setting(faults=1, kinds=("stop",)),
        "takes a view although its part has ended",
    ),
    KeepsAViewThatIsOver: (Setting(faults=1, kinds=("crash",)), "has nothing to say"),
}


@pytest.mark.parametrize("broken", MUTATIONS, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_found(broken):
    setting, message = MUTATIONS[broken]
    kind = "roster" if issubclass(broken, Roster) else "participant"
    found = explore(setting._replace(**{kind: broken}), 200_000)
    assert found.broken is not None
    assert message in found.broken
