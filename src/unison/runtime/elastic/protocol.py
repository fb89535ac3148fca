"""The messages between the register and the workers of an elastic job.

A *view* is a numbered list of members that compute together. The register (`register`, in the
process that starts the workers) decides on the next view (`roster`); a worker takes part in it
(`membership`, by the rules of `participant`). The states, the messages and the assumptions of each
side are documented in docs/elastic_protocol.md.

A message is one line of JSON (`unison.net.lines`) whose field `is` states its type. Received data
is never executed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: The exit codes of a worker's process, depending on the register.
DONE: Final = 0
TOO_FEW_WORKERS: Final = 77
REGISTER_LOST: Final = 78

#: The reason for which the workers end when the user stops the job.
STOPPED: Final = "the job is stopped"
REFUSED: Final = 79
LEFT_BY_NOTICE: Final = 143

#: The codes with which a job ends early, so that all workers save their state.
SAVING: Final = (TOO_FEW_WORKERS, REGISTER_LOST)

#: Seconds between two heartbeats of a worker.
BEAT: Final = 0.2

#: The channels of an elastic job (`unison.net.proof`): of workers to the register, and between the
#: members of a view.
REGISTER_CHANNEL: Final = b"register-2"
MEMBERS_CHANNEL: Final = b"members-2"


class Member(NamedTuple):
    """A worker in a view.

    Attributes:
        id: A globally unique id of the process.
        name: Its name in messages to users.
        host: Equal for processes that can share memory.
        address: The address at which it listens for other members, as host:port.
        replicas: The number of its replicas.
    """

    id: str
    name: str
    host: str
    address: str
    replicas: int


class View(NamedTuple):
    """The workers that compute together. Replicas are numbered member by member.

    Attributes:
        number: Greater than that of any earlier view.
        members: These workers; those that were in the previous view are first, in the same order.
        own: This worker's index among them.
        steps: The step of each member's state, as the register counts it; None if it has no state,
            or if the others have continued past it without this member.
        source: The index of the first member with the greatest step; None if no member has a state.
            Members with a different step get the state from it.
    """

    number: int
    members: tuple[Member, ...]
    own: int
    steps: tuple[int | None, ...] = ()
    source: int | None = None


class Welcome(NamedTuple):
    """The state with which a worker begins.

    Attributes:
        nominal: The number of workers with which the job began.
        is_joining: Whether it joins a job that others have begun.
    """

    nominal: int
    is_joining: bool


class End(NamedTuple):
    """The outcome of a worker's part in the job.

    Attributes:
        code: The exit code for the process; see docs/elastic_protocol.md.
        why: The reason as text.
        saves: Whether it is to save its state for a later run.
    """

    code: int
    why: str
    saves: bool


class Ended(Exception):  # noqa: N818 - an answer, not an error
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


class Interrupted(Exception):  # noqa: N818 - an answer, not an error
    """The view to be formed is already over; `Membership.regroup` leads to the next one."""
