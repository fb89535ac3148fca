"""The program of a worker process, of a pool or of an input service.

It is run as a file, not as a part of the package: a worker needs a few of its modules, which only
use NumPy, and importing the package would take many times as long. The main module of the parent
is not run again.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
import types
from pathlib import Path
from typing import Any


class _UnreadPackage(types.ModuleType):
    """A package whose `__init__` is run when one of its names is used, as by a user's function."""

    def __getattr__(self, name: str) -> Any:
        if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        self.__class__ = types.ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)


def _leave_unread(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    module = _UnreadPackage(name)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, name
    module.__file__, module.__path__ = spec.origin, [str(folder)]
    sys.modules[name] = module


def main() -> None:
    """Calls `serve` of the module in the first argument with the descriptors in the others."""
    # An interrupt is for the parent, which terminates its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(__file__).resolve().parents[2]
    _leave_unread("unison", folder)
    _leave_unread("unison.data", folder / "data")
    module, *descriptors = sys.argv[1:]
    importlib.import_module(module).serve(*map(int, descriptors))


if __name__ == "__main__":
    main()
