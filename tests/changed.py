"""The test files that a change can reach, by what files mention: `make changed` runs them.

    python tests/changed.py                    beside the last commit
    python tests/changed.py --base origin/main

A file reaches what it imports, also inside a function or a program in a string, and what it calls
through `unison` and `unison.tf`; a test also the programs and folders beside it that it names. What
is not Python, such as a page, is reached by the tests that name it; what all tests depend on is
listed in `EVERYTHING`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from import_graph import PACKAGE, FilesOfNames, imports_of, modules

ROOT = Path(__file__).parents[1]
TESTS = "tests"

#: A change of one of these reaches all tests.
EVERYTHING = ("Makefile", "pyproject.toml", "tests/conftest.py", "tests/single/conftest.py")

#: A dotted name of the package, and one through the name that programs give to `unison.tf`.
_NAMES = re.compile(r"\bunison(?:\.\w+)+")
_OF_TF = re.compile(r"\btf((?:\.\w+)+)")


def reached_tests(
    changed: Iterable[str],
    sources: Mapping[str, str],
    reached: Mapping[str, set[str]] | None = None,
) -> list[str]:
    """Returns the test files that changed files can reach.

    Args:
        changed: Paths below the root of the repository.
        sources: The sources of the package's and the tests' files, by such a path.
        reached: Their `edges`, if they are known.
    """
    changed = set(changed)
    tests = [path for path in sources if Path(path).name.startswith("test_")]
    if changed.intersection(EVERYTHING):
        return sorted(tests)
    reached = edges(sources) if reached is None else reached
    others = {Path(path).name for path in changed - sources.keys()}
    affected = changed | {path for path, source in sources.items() if _names_one(source, others)}
    while new := {path for path, used in reached.items() if used & affected} - affected:
        affected |= new
    return sorted(affected.intersection(tests))


def edges(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns what each file uses of the others."""
    prefix = PACKAGE.relative_to(ROOT).as_posix() + "/"
    own = {path.removeprefix(prefix): sources[path] for path in sources if path.startswith(prefix)}
    files = FilesOfNames(own)
    beside = [path for path in sources if path.startswith(f"{TESTS}/")]
    found = {}
    for path, source in sources.items():
        names = set(_NAMES.findall(source))
        is_python = path.endswith((".py", ".pyi"))
        if is_python:
            names |= {name for _, name in imports_of(path.removeprefix(prefix), source)}
        if not is_python or "unison.tf" in source:
            names |= {f"unison.tf{rest}" for rest in _OF_TF.findall(source)}
        used = {prefix + file for name in names if (file := files.find(name))}
        if path in beside:
            words = set(re.findall(r"\w+", source))
            used |= {each for each in beside if _is_named(Path(each), words)}
        found[path] = used - {path}
    return found


def _is_named(path: Path, words: set[str]) -> bool:
    """Whether a program or module beside the tests, or its folder, is named."""
    if path.name.startswith("test_") or path.name == "conftest.py":
        return False
    return path.stem in words or (path.parent.name in words and path.parent.name != TESTS)


def _names_one(source: str, names: set[str]) -> bool:
    return any(name in source for name in names)


def sources_of_all() -> dict[str, str]:
    """Returns the sources of the package and the tests, by path below the root."""
    beside = [path for kind in ("py", "txt") for path in (ROOT / TESTS).rglob(f"*.{kind}")]
    paths = [*(PACKAGE / name for name in modules()), *beside]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def changed_files(base: str) -> list[str]:
    """Returns the files that differ from a commit, and those that git does not know yet."""

    def lines(*arguments: str) -> list[str]:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    return [
        *lines("diff", "--name-only", "--no-renames", base),
        *lines("ls-files", "--others", "--exclude-standard"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="HEAD", help="the commit to compare with (%(default)s)")
    options = parser.parse_args()
    print(*reached_tests(changed_files(options.base), sources_of_all()), sep="\n")


if __name__ == "__main__":
    main()
