"""What a job that ends before its time leaves in its folder, for the run that goes on.

Every worker that ends so may leave something, whoever else does: `state` is what all have in
common, and stays that of whoever was furthest; `state-...` are parts that one worker alone has.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from unison.errors import DataLossError

_STATE = "state"
_PART = re.compile(_STATE + r"-(?P<run>\d+)-(?P<view>\d+)-(?P<group>\w+)-(?P<place>\d+)")

#: Seconds that a worker waits for another one that puts its state there.
_SECONDS_TO_WAIT = 5.0


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
        DataLossError: It is damaged.
    """
    path = Path(folder, _STATE)
    try:
        header, _, held = _read(path).partition(b"\n")
    except FileNotFoundError:
        return None
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
    content = json.dumps(origin._asdict()).encode() + b"\n" + pack()
    with _written(folder, content) as aside, _alone_in(folder):
        if _is_kept(folder, origin):  # by another one, meanwhile
            return
        os.replace(aside, Path(folder, _STATE))
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
    with _written(folder, part) as aside:
        os.replace(aside, Path(folder, name))


def kept_parts(folder: str, origin: Origin) -> dict[int, bytes]:
    """Returns the parts that belong to a state, by the places of the workers that left them.

    Raises:
        DataLossError: One is damaged.
    """
    of_group = str(origin.run), str(origin.view), origin.group
    return {
        int(part["place"]): _read(path)
        for path, part in _parts(folder)
        if part.group("run", "view", "group") == of_group
    }


def _origin_of(header: bytes) -> Origin:
    return Origin(**json.loads(header))


def _parts(folder: str) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in Path(folder).iterdir():
        if part := _PART.fullmatch(path.name):
            yield path, part


def _is_kept(folder: str, origin: Origin) -> bool:
    """Whether the state that is there is as late."""
    try:
        with open(Path(folder, _STATE), "rb") as file:
            file.readline()  # the checksum
            return _origin_of(file.readline()) >= origin
    except (FileNotFoundError, ValueError, TypeError):  # the latter: it is damaged
        return False


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Inside, no other worker puts its state in the place of one that is there.

    One that hangs is not waited for.
    """
    last = time.monotonic() + _SECONDS_TO_WAIT
    with open(Path(folder, f"{_STATE}.lock"), "ab") as lock:
        while time.monotonic() < last:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.01)
        yield


def _read(path: Path) -> bytes:
    """Returns what `_written` was given."""
    checksum, _, content = path.read_bytes().partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(content):
        raise DataLossError(
            message=f"{path} is damaged: its checksum is another one. An earlier run of the job "
            "has left it. Remove it to go on without it."
        )
    return content


@contextlib.contextmanager
def _written(folder: str, content: bytes) -> Iterator[Path]:
    """Inside, there is a file with a checksum and the content, which is to be renamed."""
    # Not by the process: on several machines, some have the same number.
    aside = Path(folder, f"{_STATE}.{secrets.token_hex(8)}")
    try:
        with open(aside, "wb") as file:
            file.write(b"%08x\n" % zlib.crc32(content))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield aside
    finally:
        aside.unlink(missing_ok=True)
