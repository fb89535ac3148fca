"""Names that were read from files: conversion to paths, and safe removal.

The author of a file chooses the names in it. `../victim`, `/etc/passwd` or a symbolic link would
lead out of the folder that the user has given; these functions reject them.
"""

from __future__ import annotations

import os
import re

from unison.errors import DataLossError
from unison.storage import files
from unison.storage.file_systems import is_remote, named_errors

#: The maximum length of a name in a message.
_SHOWN = 120

#: The maximum length of a path in a message.
_SHOWN_PATH = 1000


def checked_name(name: object, pattern: re.Pattern[str], where: str) -> str:
    """Returns a name that was read from a file, if it is a valid name of a file in a folder.

    Args:
        name: The value that was read.
        pattern: The pattern that all of it must match.
        where: The file, for messages.

    Raises:
        DataLossError: It is not text, does not match, or would lead out of the folder.

    Examples:
        >>> run = re.compile(r"run-[0-9a-f]{12}")
        >>> checked_name("run-0123456789ab", run, "dataset.json")
        'run-0123456789ab'
        >>> checked_name("../victim", run, "dataset.json")
        Traceback (most recent call last):
        unison.errors.DataLossError: dataset.json is corrupt: expected a name that matches ...
    """
    if not isinstance(name, str) or not pattern.fullmatch(name) or not _is_one_name(name):
        raise DataLossError(
            message=f"{where} is corrupt: expected a name that matches {pattern.pattern!r}. "
            f"Received: {str(name)[:_SHOWN]!r}"
        )
    return name


def path_inside(folder: str, *names: str) -> str:
    """Returns a path in a folder.

    Args:
        folder: A folder that the user has given.
        names: Names from `checked_name`, or of the program's own, the outermost first.

    Raises:
        DataLossError: It is outside: by a name, or a symbolic link.
    """
    path = "/".join([folder, *names]) if is_remote(folder) else os.path.join(folder, *names)
    if not all(map(_is_one_name, names)) or not (is_remote(folder) or leads_inside(path, folder)):
        raise _leads_out(path, folder)
    return path


def require_files_inside(folder: str) -> None:
    """Checks what is in a local folder, and in those inside, for code that would open anything.

    Args:
        folder: A folder that the user has given; it may be a link itself.

    Raises:
        DataLossError: There is a link that leads out of the folder, a pipe or a device.
    """
    waiting = [folder]
    while waiting:
        with named_errors(folder), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_symlink():
                    if not leads_inside(entry.path, folder):
                        raise _leads_out(entry.path, folder)
                elif not entry.is_file():
                    raise DataLossError(
                        message=f"{entry.path} is a pipe or a device. Expected a file. Remove it."
                    )


def remove_folder(folder: str, name: str, pattern: re.Pattern[str]) -> None:
    """Deletes a folder in a folder, if its name matches; for a symbolic link, only the link.

    Args:
        folder: A folder that the user has given.
        name: A name in it.
        pattern: The pattern that all of the name must match.

    Raises:
        DataLossError: The name does not match.
    """
    checked_name(name, pattern, folder)
    path = f"{folder}/{name}" if is_remote(folder) else os.path.join(folder, name)
    if os.path.islink(path):
        os.remove(path)
    else:
        # It does not follow links, not even one that is created at the same time.
        files.remove_folder(path)


def can_be_path(text: str) -> bool:
    """Whether the system accepts text as a path: it has no zero byte, and no lone surrogate."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def leads_inside(path: str, folder: str) -> bool:
    """Whether a local path is one of something in a folder, also through symbolic links."""
    inside, outside = os.path.realpath(path), os.path.realpath(folder)
    return inside.startswith(os.path.join(outside, ""))


def _is_one_name(name: str) -> bool:
    return name not in ("", ".", "..") and not {*"/\\"} & {*name} and can_be_path(name)


def _leads_out(path: str, folder: str) -> DataLossError:
    return DataLossError(
        message=f"{path[:_SHOWN_PATH]} leads out of the folder {folder}. Expected names and "
        "links of what is in that folder. Copy what it leads to into the folder if you trust "
        "whoever made it."
    )
