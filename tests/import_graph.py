"""Which files of the package import which, read from their sources."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src" / "unison"


class Import(NamedTuple):
    """One name that a module imports, as the absolute dotted path of the module or attribute."""

    line: int
    path: str


def modules() -> list[str]:
    found = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]  # stubs list what is loaded later
    return sorted(module.relative_to(PACKAGE).as_posix() for module in found)


@functools.cache
def imports_of(module: str, source: str, for_types: bool = True) -> tuple[Import, ...]:
    """Every import statement of `source`, wherever it stands; one inside a function counts too.

    Args:
        module: The file of the package.
        source: Its source.
        for_types: Whether imports for type checkers count, which are not there when it runs.
    """
    return tuple(_imports_of(module, source, for_types))


def _imports_of(module: str, source: str, for_types: bool) -> Iterator[Import]:
    folders = ["unison", *module.split("/")[:-1]]
    statements = [
        statement
        for statement in ast.parse(source).body
        if for_types or not _is_for_types(statement)
    ]
    for node in itertools.chain.from_iterable(map(ast.walk, statements)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = [node.module] if node.module else []
            if node.level:
                origin = folders[: len(folders) - node.level + 1] + origin
            base = ".".join(origin)
            yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)


class FilesOfNames:
    """Finds the file of the package that a dotted name is defined in.

    A name that a stub lists is defined in the file that the stub names.

    Args:
        sources: The sources of the package's files and stubs, by file.
    """

    def __init__(self, sources: Mapping[str, str]):
        self._files = {dotted(name): name for name in sources if name.endswith(".py")}
        self._listed = {
            f"{dotted(name)}.{path.rpartition('.')[2]}": path
            for name in sources
            if name.endswith(".pyi")
            for _, path in imports_of(name, sources[name])
        }

    def find(self, path: str) -> str | None:
        """The file that defines a name, or the object whose attribute it is; None: no file."""
        while path and path not in self._files:
            listed = self._listed.get(path, path)
            path = path.rpartition(".")[0] if listed == path else listed
        return self._files.get(path)


def file_imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which files of the package each of its files imports, if not for types only."""
    files = FilesOfNames(sources)
    return {
        name: {files.find(path) for _, path in imports_of(name, source, for_types=False)}
        - {None, name}
        for name, source in sources.items()
        if name.endswith(".py")
    }


def dotted(module: str) -> str:
    """The name that a file of the package is imported by."""
    return ".".join(["unison", *Path(module).with_suffix("").parts]).removesuffix(".__init__")


def _is_for_types(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def circles(imported: dict[str, set[str]]) -> dict[str, set[str]]:
    """The files that import each other in a circle, or lie between circles, and what of these."""
    left = imported
    while True:
        needed = set().union(*left.values())
        kept = {name for name in left if name in needed and left[name] & left.keys()}
        if kept == left.keys():
            return left
        left = {name: left[name] & kept for name in kept}
