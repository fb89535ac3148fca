"""The compiled parts of the package: libraries that `hatch_build.py` makes when it is installed."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path


def loaded_library(file: Path) -> ctypes.CDLL:
    """Loads `_NAME.so`, which was built from `NAME.cc` beside it and what that includes.

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
