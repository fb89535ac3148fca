"""The state that a job that ends early saves in its folder, for the run that resumes it.

Every worker that ends this way may save files, independently of the others: `state` is the state
that all share, of which the latest version is kept; `state-...` are parts that a single worker has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unison.errors import NotFoundError
from unison.storage import atomic, checksummed, locks
from unison.storage.decoding import decoding, plain_dict, plain_text, whole_number

_STATE = "state"
_LOCK = f"{_STATE}.lock"
_PART = re.compile(_STATE + r"-(?P<run>\d+)-(?P<view>\d+)-(?P<group>\w+)-(?P<place>\d+)")

#: Seconds that a worker waits for another one that is writing its state.
_SECONDS_TO_WAIT = 5.0

_REMEDY = "An earlier run of the job has left it. Remove it to start without it."


class Origin(NamedTuple):
    """The origin of a state; of two, the greater one is the later.

    Attributes:
        run: The run of the job, from 1.
        view: The number of the last view in which it was computed.
        step: The state's step.
        group: The first member of that view. It distinguishes runs: if a run saves no `state`, the
            next run has the same number.
    """

    run: int
    view: int
    step: int
    group: str


class Kept(NamedTuple):
    """A saved state.

    Attributes:
        origin: Its origin.
        held: The state, as returned by `SharedState.pack`.
    """

    origin: Origin
    held: bytes


def kept_state(folder: str) -> Kept | None:
    """Returns the state that a job has saved; None if there is none.

    Raises:
        DataLossError: It is corrupt.
    """
    path = str(Path(folder, _STATE))
    try:
        header, held = checksummed.read_headed(path, _REMEDY)
    except NotFoundError:
        return None
    with decoding(path, _REMEDY):
        return Kept(_origin_of(header), held)


def keep_state(folder: str, origin: Origin, pack: Callable[[], bytes]) -> None:
    """Saves a state, unless the saved one is at least as late; removes the parts of older ones.

    Args:
        folder: The job's folder.
        origin: The state's origin.
        pack: Returns the serialized state.
    """
    if _is_kept(folder, origin):
        return
    with atomic.aside(str(Path(folder, _STATE))) as new:
        with new.opened() as file:
            checksummed.write(file, [checksummed.header_line(origin._asdict()), pack()])
        # The holder of the lock may hang, so the wait is bounded.
        with locks.locked(str(Path(folder, _LOCK)), _SECONDS_TO_WAIT):
            if _is_kept(folder, origin):  # by another worker, in the meantime
                return
            new.publish()
    for path, part in _parts(folder):
        if (int(part["run"]), int(part["view"])) < (origin.run, origin.view):
            path.unlink(missing_ok=True)


def keep_part(folder: str, origin: Origin, place: int, part: bytes) -> None:
    """Saves the part of the state that only this worker has.

    Args:
        folder: The job's folder.
        origin: The origin of the worker's state.
        place: Its index among the members of that view.
        part: The part.
    """
    name = f"{_STATE}-{origin.run}-{origin.view}-{origin.group}-{place}"
    with atomic.replacing(str(Path(folder, name))) as file:
        checksummed.write(file, [part])


def kept_parts(folder: str, origin: Origin) -> dict[int, bytes]:
    """Returns the parts that belong to a state, by the indices of the workers that saved them.

    Raises:
        DataLossError: One is corrupt.
    """
    of_group = str(origin.run), str(origin.view), origin.group
    return {
        int(part["place"]): checksummed.read(str(path), _REMEDY)
        for path, part in _parts(folder)
        if part.group("run", "view", "group") == of_group
    }


def forget_kept(folder: str) -> None:
    """Removes the state that a job has saved, and its parts; nothing else in the folder."""
    for name in (_STATE, _LOCK):
        Path(folder, name).unlink(missing_ok=True)
    for path, _ in _parts(folder):
        path.unlink(missing_ok=True)
    atomic.remove_abandoned(str(Path(folder, _STATE)))


def _origin_of(header: Any) -> Origin:
    given = plain_dict(header)
    return Origin(
        whole_number(given["run"], least=1),
        whole_number(given["view"]),
        whole_number(given["step"]),
        plain_text(given["group"]),
    )


def _parts(folder: str) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in Path(folder).iterdir():
        if part := _PART.fullmatch(path.name):
            yield path, part


def _is_kept(folder: str, origin: Origin) -> bool:
    """Returns whether the saved state is at least as late."""
    try:
        return _origin_of(checksummed.peeked_header(str(Path(folder, _STATE)))) >= origin
    except (FileNotFoundError, ValueError, KeyError):  # the latter: it is corrupt
        return False
