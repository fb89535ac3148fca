"""What the register and the workers of an elastic job say to each other.

A *view* is a numbered list of members that compute together. The register (`register`, in the
process that starts the workers) decides which view comes next (`decisions`); a worker takes part in
it (`membership`, by the rules of `participant`). The states, the messages and what each side may
assume are written down in docs/elastic_protocol.md.

A message is one line of JSON (`unison.net.lines`) whose field `is` says what it is. Nothing that is
received is executed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: How a worker's process ends, by what the register has said or has not.
DONE: Final = 0
TOO_FEW_WORKERS: Final = 77
REGISTER_LOST: Final = 78
REFUSED: Final = 79
LEFT_BY_NOTICE: Final = 143

#: The codes with which a job ends before its time, so that all workers leave their state.
SAVING: Final = (TOO_FEW_WORKERS, REGISTER_LOST)

#: Seconds between two beats of a worker.
BEAT: Final = 0.2

#: The channels of an elastic job (`unison.net.proof`): of workers to the register, and between the
#: members of a view.
REGISTER_CHANNEL: Final = b"register-2"
MEMBERS_CHANNEL: Final = b"members-2"


class Member(NamedTuple):
    """A worker in a view.

    Attributes:
        id: The process, by a name that no other process has ever had.
        name: What it is called in messages to people.
        host: Equal for processes that can share memory.
        address: Where it listens for other members, as host:port.
        replicas: How many it computes with.
    """

    id: str
    name: str
    host: str
    address: str
    replicas: int


class View(NamedTuple):
    """Who computes together. The replicas are numbered member after member.

    Attributes:
        number: Greater than that of any view before.
        members: Those who do; the ones that were in the view before come first, in their order.
        own: This worker's place among them.
        steps: The step of each member's state, as the register counts it; None: it has none, or one
            that others have gone past without it.
        source: The place of the first member with the greatest step; None where no member has a
            state. Members whose step is another one get the state from it.
    """

    number: int
    members: tuple[Member, ...]
    own: int
    steps: tuple[int | None, ...] = ()
    source: int | None = None


class Welcome(NamedTuple):
    """How a worker begins.

    Attributes:
        nominal: With how many workers the job began.
        is_joining: Whether it comes to a job that others have begun.
    """

    nominal: int
    is_joining: bool


class End(NamedTuple):
    """How a worker's part in the job has ended.

    Attributes:
        code: With what exit code the process is to end; see docs/elastic_protocol.md.
        why: The reason, in words.
        saves: Whether it is to leave its state for a process that may continue.
    """

    code: int
    why: str
    saves: bool


class Ended(Exception):  # noqa: N818 - an answer, not a mistake
    """This worker's part in the job has ended.

    Attributes:
        code, why, saves: See `End`.
    """

    def __init__(self, code: int, why: str, saves: bool = False):
        super().__init__(code, why, saves)
        self.code = code
        self.why = why
        self.saves = saves

    def __str__(self) -> str:
        return f"{self.why} (exit code {self.code})"


class Interrupted(Exception):  # noqa: N818 - an answer, not a mistake
    """The view that was to be formed is not to be; `Membership.regroup` leads to the next one."""
