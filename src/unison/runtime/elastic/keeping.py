"""What a job that ends before its time leaves in its folder, for the run that resumes it.

Every worker that ends so may leave something, whoever else does: `state` is what all have in
common, and stays that of whoever was furthest; `state-...` are parts that one worker alone has.
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

#: Seconds that a worker waits for another one that puts its state there.
_SECONDS_TO_WAIT = 5.0

_REMEDY = "An earlier run of the job has left it. Remove it to start without it."


class Origin(NamedTuple):
    """Where a state has come about; of two, the greater one is the later.

    Attributes:
        run: In which of the job's runs, from 1.
        view: The number of the last view in which it was computed.
        step: Its number.
        group: The first member of that view. Two runs, of which the first has left no `state`,
            have the same number.
    """

    run: int
    view: int
    step: int
    group: str


class Kept(NamedTuple):
    """A state that was left.

    Attributes:
        origin: Where it has come about.
        held: The state, as `SharedState.pack` returned it.
    """

    origin: Origin
    held: bytes


def kept_state(folder: str) -> Kept | None:
    """Returns the state that a job has left; None if it has left nothing.

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
    """Leaves a state, unless one is there that is as late, and removes the parts of older ones.

    Args:
        folder: The job's.
        origin: Where the state has come about.
        pack: Returns it.
    """
    if _is_kept(folder, origin):
        return
    with atomic.aside(str(Path(folder, _STATE))) as new:
        with new.opened() as file:
            checksummed.write(file, [checksummed.header_line(origin._asdict()), pack()])
        # The one who holds the lock may hang: it is not waited for longer than that.
        with locks.locked(str(Path(folder, _LOCK)), _SECONDS_TO_WAIT):
            if _is_kept(folder, origin):  # by another one, meanwhile
                return
            new.publish()
    for path, part in _parts(folder):
        if (int(part["run"]), int(part["view"])) < (origin.run, origin.view):
            path.unlink(missing_ok=True)


def keep_part(folder: str, origin: Origin, place: int, part: bytes) -> None:
    """Leaves what a worker alone has.

    Args:
        folder: The job's.
        origin: Where the worker's state has come about.
        place: Its place among the members there.
        part: What it has.
    """
    name = f"{_STATE}-{origin.run}-{origin.view}-{origin.group}-{place}"
    with atomic.replacing(str(Path(folder, name))) as file:
        checksummed.write(file, [part])


def kept_parts(folder: str, origin: Origin) -> dict[int, bytes]:
    """Returns the parts that belong to a state, by the places of the workers that left them.

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
    """Removes the state that a job has left, and its parts; nothing else in the folder."""
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
    """Whether the state that is there is as late."""
    try:
        return _origin_of(checksummed.peeked_header(str(Path(folder, _STATE)))) >= origin
    except (FileNotFoundError, ValueError, KeyError):  # the latter: it is corrupt
        return False
