"""Which files of the package import which, read from their sources."""

from __future__ import annotations

import ast
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


def imports_of(module: str, source: str) -> Iterator[Import]:
    """Every import statement of `source`, wherever it stands; one inside a function counts too."""
    folders = ["unison", *module.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
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
        name: {files.find(path) for _, path in imports_of(name, without_type_imports(source))}
        - {None, name}
        for name, source in sources.items()
        if name.endswith(".py")
    }


def dotted(module: str) -> str:
    """The name that a file of the package is imported by."""
    return ".".join(["unison", *Path(module).with_suffix("").parts]).removesuffix(".__init__")


def without_type_imports(source: str) -> str:
    """A source without its imports for type checkers, which are not there when it runs."""
    tree = ast.parse(source)
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return ast.unparse(tree)


def circles(imported: dict[str, set[str]]) -> dict[str, set[str]]:
    """The files that import each other in a circle, or lie between circles, and what of these."""
    left = imported
    while True:
        needed = set().union(*left.values())
        kept = {name for name in left if name in needed and left[name] & left.keys()}
        if kept == left.keys():
            return left
        left = {name: left[name] & kept for name in kept}
