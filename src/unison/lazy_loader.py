"""Public names of packages, loaded on first use.

Importing all of Unison takes about 0.3 s beyond `import jax`; `import unison` defers that to the
first use. A package lists its names in its stub, `__init__.pyi`, which type checkers, editors and
the reference read, too:

    import package.submodule  # an attribute of the package, not in `__all__`
    from package.module import Name as Name  # in `__all__`

and its `__init__.py` attaches them:

    __getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

Sources: PEP 562, and `lazy_loader.attach_stub` of scientific Python (its SPEC 1).
"""

from __future__ import annotations

import ast
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: The number of attempts to import a module, and the seconds between two.
_TRIES = 20
_SECONDS_BETWEEN_TRIES = 0.02

#: The threads that import the module of a name.
_importing: set[int] = set()


def attach_stub(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns the `__getattr__`, the `__dir__` and the `__all__` of a package.

    A name is imported when it is first used, possibly by several threads concurrently, and is an
    ordinary attribute from then on.

    Args:
        package: The `__name__` of the package.
        file: The `__file__` of its `__init__.py`; the stub is in the same directory.

    Raises:
        ImportError: If there is no stub.
    """
    try:
        stub = Path(file).with_name("__init__.pyi").read_text("utf-8")
    except OSError as error:
        raise ImportError(
            f"The names of {package} are listed in its __init__.pyi, which cannot be read: "
            f"{error}. Install Unison again, or bring this file along where it is bundled.",
            name=package,
        ) from error
    statements = ast.parse(stub).body
    public = dict(_exported_names(statements, package))
    origins = {**_submodules(statements, package), **public}

    def load(name: str) -> Any:
        if name not in origins:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}",
                name=name,
                obj=sys.modules.get(package),
            )
        module, attribute = origins[name]
        value: Any = _imported(module)
        if attribute:
            value = getattr(value, attribute)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins})

    return load, names, sorted(public)


def _imported(module: str) -> Any:
    """Imports a module, again if threads that import the same modules waited for each other.

    Where each of two threads waits for a module that the other one has begun to import, Python
    raises an error in one of them, which has no public name, or lets it see a part of the module,
    or a package disappears that a third one has just waited for. When all that this thread has
    begun is undone, the other thread goes on: so only the outermost import is repeated.
    """
    thread = threading.get_ident()
    if thread in _importing:
        return importlib.import_module(module)
    _importing.add(thread)
    try:
        for _ in range(_TRIES - 1):
            try:
                return importlib.import_module(module)
            except (RuntimeError, ImportError, KeyError) as error:
                if not _is_of_another_thread(error):
                    raise
                time.sleep(_SECONDS_BETWEEN_TRIES)
        return importlib.import_module(module)
    finally:
        _importing.discard(thread)


def _is_of_another_thread(error: Exception) -> bool:
    """Whether an import failed for what another thread was importing."""
    if isinstance(error, KeyError):  # of `sys.modules`: a package whose import was undone
        root = __name__.partition(".")[0]
        return str(error.args[0]).partition(".")[0] == root
    is_deadlock = type(error).__name__ == "_DeadlockError"
    return is_deadlock or str(error).startswith("cannot import name")


#: The module that defines a name, and its name there; an empty one for the module itself.
_Origin = tuple[str, str]


def _exported_names(statements: list[ast.stmt], package: str) -> Iterator[tuple[str, _Origin]]:
    """Yields the names imported in the form `Name as Name`, which a stub exports."""
    for statement in statements:
        if not isinstance(statement, ast.ImportFrom) or statement.module is None:
            continue
        for alias in statement.names:
            if alias.asname is None:
                continue
            if statement.module == package:
                yield alias.asname, (f"{package}.{alias.name}", "")
            else:
                yield alias.asname, (statement.module, alias.name)


def _submodules(statements: list[ast.stmt], package: str) -> dict[str, _Origin]:
    """Returns the direct submodules that are imported by their full names."""
    modules = [
        alias.name
        for statement in statements
        if isinstance(statement, ast.Import)
        for alias in statement.names
    ]
    return {
        module.rpartition(".")[2]: (module, "")
        for module in modules
        if module.rpartition(".")[0] == package
    }
