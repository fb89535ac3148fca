"""Builds and tries what is uploaded: `python -m release.distributions`, or `make dist`.

The sdist is built from the tree, and the wheels from the sdist: one with the compiled part, and one
without, for other platforms. Each is checked and installed in a fresh environment, where
`unison demo` must run: the wheel with the compiled part in one for each tested set whose Python is
on this machine.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable

from release.constraints import ROOT, TESTED_SETS, TestedSet
from release.interpreters import UV, interpreter

#: The newest glibc that the wheel may need.
GLIBC = (2, 28)

#: What is compiled.
LIBRARIES = {"unison/runtime/shared_memory/_exchange.so", "unison/tf/_scaling.so"}

#: What belongs to a work tree and not into a distribution.
LEFT_OUT = re.compile(r"(^|/)(__pycache__|\.venv|\.git|[.\w]+_cache|site|dist|build)/|\.pyc$")

# A program prints whether the compiled parts are in use.
IN_USE = (
    "from unison.runtime.shared_memory.library import library; from unison.tf import image_scaling;"
    "print(None not in (library(), image_scaling.library()))"
)


class DistributionError(Exception):
    """A distribution is not what it should be."""


def build(dist: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path, pathlib.Path]:
    """Fills the folder `dist` anew: the sdist, the wheel with the compiled parts, the pure wheel.

    Raises:
        subprocess.CalledProcessError: A build failed, and has said why.
        DistributionError: The compiled parts could not be built.
    """
    shutil.rmtree(dist, ignore_errors=True)
    build_by = [*UV, "build", "--quiet", "--python", sys.executable, "--out-dir", str(dist)]
    _run([*build_by, "--sdist", str(ROOT)])
    sdist = one_of(dist.glob("*.tar.gz"))
    from_sdist = [*build_by, "--wheel", str(sdist)]
    _run(from_sdist)
    compiled = one_of(dist.glob("*.whl"))
    if compiled.name.endswith("-any.whl"):
        raise DistributionError(f"{compiled.name} has no compiled part: install a C++ compiler.")
    _run(from_sdist, CXX="no-compiler")
    (dist / ".gitignore").unlink(missing_ok=True)
    return sdist, compiled, one_of(dist.glob("*-any.whl"))


def check(sdist: pathlib.Path, compiled: pathlib.Path, pure: pathlib.Path) -> None:
    """Checks metadata, platform and content.

    Raises:
        subprocess.CalledProcessError: twine refuses the metadata or the README, and has said why.
        DistributionError: A platform tag or a list of files is wrong.
    """
    _run([sys.executable, "-m", "twine", "check", "--strict", *map(str, (sdist, compiled, pure))])
    audit = [sys.executable, "-m", "auditwheel", "show", str(compiled)]
    shown = subprocess.run(audit, check=True, stdout=subprocess.PIPE, text=True).stdout
    complaints = [
        *complaints_about_platform(compiled.name, shown),
        *complaints_about_sdist(files_of(sdist)),
        *complaints_about_wheel(compiled.name, files_of(compiled), files_of(sdist)),
        *complaints_about_wheel(pure.name, files_of(pure), files_of(sdist)),
    ]
    if complaints:
        raise DistributionError("\n".join(complaints))


def complaints_about_platform(wheel: str, audit: str) -> list[str]:
    """One sentence where the wheel's tag, or auditwheel's report on its symbols, is too new."""
    promised = "manylinux_" + "_".join(map(str, GLIBC))
    if promised not in wheel:
        return [f"{wheel}: expected the tag {promised}; the symbols of its library are newer."]
    found = re.search(r'platform tag:\s+"manylinux_(\d+)_(\d+)_\w+"', audit)
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        return [f"{wheel}: auditwheel does not find it consistent with {promised}:\n{audit}"]
    return []


def complaints_about_sdist(files: set[str]) -> list[str]:
    """One sentence for each file of an sdist that is missing, or does not belong there."""
    needed = {"LICENSE", "PKG-INFO", "README.md", "hatch_build.py", "pyproject.toml"}
    left = sorted(name for name in files if LEFT_OUT.search(name) or name.endswith(".so"))
    return [
        *(f"The sdist lacks {name}." for name in sorted(needed - files)),
        *(f"The sdist has {name}." for name in left),
    ]


def complaints_about_wheel(wheel: str, files: set[str], source: set[str]) -> list[str]:
    """One sentence for each file of a wheel that is missing, or does not belong there.

    Args:
        wheel: The name of the wheel.
        files: What it holds.
        source: What the sdist holds, from which it was built.
    """
    package = {name.removeprefix("src/") for name in source if name.startswith("src/unison/")}
    if not wheel.endswith("-any.whl"):
        package |= LIBRARIES
    folder = f"{'-'.join(wheel.split('-')[:2])}.dist-info"
    known = {f"{folder}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    expected = package | known | {f"{folder}/licenses/LICENSE"}
    return [
        *(f"{wheel} lacks {name}." for name in sorted(expected - files)),
        *(f"{wheel} has {name}." for name in sorted(files - expected)),
    ]


def files_of(distribution: pathlib.Path) -> set[str]:
    """The files of a wheel, or of an sdist without the name of its folder."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as archive:
            return {name for name in archive.namelist() if not name.endswith("/")}
    with tarfile.open(distribution) as archive:
        return {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}


def trial(distribution: pathlib.Path, tested: TestedSet, python: str, has_library: bool) -> None:
    """Installs a distribution in a fresh environment, and runs `unison demo` there.

    Raises:
        subprocess.CalledProcessError: A command failed, and has said why.
        DistributionError: The compiled part is in use and should not be, or the other way round.
    """
    with tempfile.TemporaryDirectory() as folder:
        binaries = pathlib.Path(folder, "environment", "bin")
        _run([*UV, "venv", "--quiet", "--python", python, str(binaries.parent)])
        requirement = f"unison[demo] @ {distribution.absolute().as_uri()}"
        install = [*UV, "pip", "install", "--quiet", "--python", str(binaries / "python")]
        _run([*install, "--constraint", str(tested.path), requirement])
        # From elsewhere: the checkout is not to be imported.
        _run([str(binaries / "unison"), "demo"], folder=folder)
        asked = [str(binaries / "python"), "-c", IN_USE]
        answer = subprocess.run(asked, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        if answer.stdout.strip() != str(has_library):
            raise DistributionError(
                f"{distribution.name} with {tested.path.name}: expected the compiled part in use: "
                f"{has_library}. Received: {answer.stdout.strip()}."
            )


def try_all(sdist: pathlib.Path, compiled: pathlib.Path, pure: pathlib.Path) -> None:
    """Tries each distribution wherever this machine can; says where it cannot."""
    is_first = True
    for tested in TESTED_SETS:
        python = interpreter(tested.python)
        if python is None:
            print(f"Not tried: {tested.path.name}; there is no Python {tested.python} here.")
            continue
        trials = {compiled: True}
        if is_first:  # the others differ in the compiled part only
            trials |= {sdist: True, pure: False}
            is_first = False
        for distribution, has_library in trials.items():
            print(f"== {distribution.name} with {tested.path.name}", flush=True)
            trial(distribution, tested, python, has_library)


def one_of(paths: Iterable[pathlib.Path]) -> pathlib.Path:
    (path,) = paths
    return path


def _run(command: list[str], folder: str | None = None, **variables: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, **variables}, cwd=folder, timeout=1800)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m release.distributions", description=__doc__)
    parser.add_argument("--dist", type=pathlib.Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument(
        "--build-only", action="store_true", help="build and check, but install nothing"
    )
    arguments = parser.parse_args()
    try:
        distributions = build(arguments.dist)
        check(*distributions)
        if not arguments.build_only:
            try_all(*distributions)
    except (DistributionError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
    for distribution in distributions:
        print(f"{distribution} ({distribution.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
