"""The compiled parts of the package: libraries that `hatch_build.py` makes when it is installed."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from unison.interrupts import is_of_a_signal_handler

logger = logging.getLogger("unison")


def library_or_none(
    file: Path, load: Callable[[Path], ctypes.CDLL], otherwise: str
) -> ctypes.CDLL | None:
    """Returns `load(file)`; None if the library was not built, or cannot be used.

    Args:
        file: The library.
        load: Loads it; see `loaded_library`.
        otherwise: What happens without it, for messages.
    """
    if not file.exists():
        logger.debug("%s: %s was not built", otherwise, file)
        return None
    try:
        return load(file)
    except Exception as error:  # a file that was built for another system may fail in any way
        if is_of_a_signal_handler(error):
            raise
        logger.warning(
            "%s, because %s cannot be used: %s. Install unison again.", otherwise, file, error
        )
        return None


def loaded_library(file: Path) -> ctypes.CDLL:
    """Loads `_NAME.so`, which was built from `NAME.cc` beside it and what that includes.

    The digest of the sources is that of `hatch_build.py`.

    Raises:
        OSError: It was built for another system.
        RuntimeError: It was built from another source.
    """
    name = file.stem.removeprefix("_")
    library = ctypes.CDLL(str(file))
    built_from = getattr(library, f"unison_{name}_source")
    built_from.restype = ctypes.c_char_p
    sources = [*sorted(file.parent.glob("*.cc")), *sorted(file.parent.glob("*.h"))]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if built_from() != digest.encode():
        raise RuntimeError(f"it was built from another {name}.cc")
    return library
