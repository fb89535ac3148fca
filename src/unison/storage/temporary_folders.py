"""Temporary folders that are removed even if their process is killed.

A process that is killed removes nothing. So each keeps a file in its folder locked, and the process
that creates the next folder for the same purpose removes those that are not locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_LOCK = "lock"
_CONTENT = "content"

#: A folder that is younger than these seconds may belong to a process that has not locked it yet.
_YOUNG = 60.0


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[str]:
    """Yields the path of a new, empty folder that is removed at the end of the block.

    Args:
        purpose: Its purpose, in a word; part of its name.

    Examples:
        >>> with temporary_folder("example") as folder:
        ...     os.listdir(folder)
        []
        >>> os.path.exists(folder)
        False
    """
    prefix = f"unison-{purpose}-"
    remove_left_behind(prefix, [_LOCK])
    owner = os.getpid()
    outer = tempfile.mkdtemp(prefix=prefix)
    lock = os.open(os.path.join(outer, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = os.path.join(outer, _CONTENT)
        os.mkdir(content, 0o700)
        yield content
    finally:
        if os.getpid() == owner:  # and no child that was forked inside
            shutil.rmtree(outer, ignore_errors=True)
        os.close(lock)


def remove_left_behind(
    prefix: str, locks: Sequence[str], is_kept: Callable[[Path], bool] = lambda _: False
) -> None:
    """Removes this user's temporary folders whose processes have ended.

    Args:
        prefix: The prefix of the folders' names.
        locks: The files in them of which a living process has locked at least one.
        is_kept: Whether a folder is kept nevertheless.
    """
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        found = [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]
        for folder in found:
            with contextlib.suppress(OSError):
                if _is_old_folder_of_this_user(folder) and not is_kept(folder):
                    _remove_unless_locked(folder, locks)


def _is_old_folder_of_this_user(folder: Path) -> bool:
    about = folder.lstat()
    is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()
    return is_own and time.time() - about.st_mtime > _YOUNG


def _remove_unless_locked(folder: Path, locks: Sequence[str]) -> None:
    with contextlib.ExitStack() as opened:
        for name in locks:
            with contextlib.suppress(FileNotFoundError):
                file = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                opened.callback(os.close, file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
        shutil.rmtree(folder, ignore_errors=True)
