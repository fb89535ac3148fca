"""`Format`: how good files of a format are made, read and changed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def is_equal(found: Any, right: Any) -> bool:
    return found == right


def is_anything(found: Any, right: Any) -> bool:
    """Of formats without checksums: other bytes are other data."""
    return True


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of files, and how it is read.

    Attributes:
        write: Writes good files into an empty folder.
        read: Reads them as a user does; returns what can be compared.
        structures: Each changes the files in the folder so that checksums are right again, by
            random numbers, and returns what it did.
        errors: What reading may raise besides `OpError`, by its documentation; exactly these.
        is_right: Whether what was read after bytes were changed is right.
        changes_bytes: Whether bytes are changed at all.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    structures: Sequence[Callable[[Path, random.Random], str]] = ()
    errors: tuple[type[Exception], ...] = ()
    is_right: Callable[[Any, Any], bool] = is_equal
    changes_bytes: bool = True
