"""What `make gpu` needs where nothing can be downloaded: `make gpu-bundle` fills a folder with it.

    python -m release.gpu_bundle fill gpu-bundle
    PYTHON -m release.gpu_bundle install gpu-bundle ENVIRONMENT

`fill` downloads, into a folder, the wheels of Unison, of what it requires beyond JAX (with the
extra `records`), and of pip: JAX itself, with CUDA, is on the machine already. `install` makes an
environment that sees the packages of the interpreter that runs it, which stays as it is, and
installs the wheels there; it needs nothing but Python.
"""

from __future__ import annotations

import argparse
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Mapping, Sequence

from release.constraints import ROOT, TESTED_SETS, TestedSet
from release.distributions import build
from release.interpreters import UV

#: The Pythons of the environments; JAX 0.11 and later run on them.
PYTHONS = ("3.12", "3.13", "3.14")

#: The folder's limit, so that it can be sent to a machine by any way that there is.
MOST_BYTES = 60_000_000

#: The platforms of the wheels, from the oldest glibc that they may be built for.
_GLIBCS = ("manylinux2014", "manylinux_2_24", "manylinux_2_27", "manylinux_2_28")

#: The file by which the environment sees the packages of the interpreter.
_PTH = "packages_of_base.pth"

#: What the environment was made of: it is made anew when that changes.
_STAMP = "made-of.txt"


class BundleError(Exception):
    """The folder, or the environment, is not what it should be."""


def tested_set(python: str) -> TestedSet:
    """Returns the newest tested set for a Python: its own, or that of the newest JAX."""
    own = [tested for tested in TESTED_SETS if tested.python == python]
    return (own or list(TESTED_SETS))[-1]


def required(all_of: Mapping[str, str], of_jax: Mapping[str, str]) -> dict[str, str]:
    """Returns the packages, by name, that an environment with JAX lacks.

    >>> required({"jax": "0.11.2", "numpy": "2.5", "keras": "3.15"}, {"jax": "1", "numpy": "1"})
    {'keras': '3.15'}
    """
    return {name: version for name, version in all_of.items() if name not in of_jax}


def resolved(requirements: Sequence[str], python: str) -> dict[str, str]:
    """Returns the versions of packages and of what they require, in the tested set of a Python.

    Raises:
        subprocess.CalledProcessError: uv found none, and has said why.
    """
    options = ["--quiet", "--no-header", "--no-annotate", f"--python-version={python}"]
    options += ["--python-platform=x86_64-manylinux_2_28", "--constraint"]
    options.append(str(tested_set(python).path))
    done = subprocess.run(
        [*UV, "pip", "compile", *options, "-"],
        input="\n".join(requirements),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return dict(pinned_in(done.stdout))


def pinned_in(text: str) -> list[tuple[str, str]]:
    """Returns the names and versions of the lines `name==version`, with or without a condition.

    >>> pinned_in("cffi==2.1.1 ; python_version > '3'")
    [('cffi', '2.1.1')]
    """
    return re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)


def fill(folder: pathlib.Path, pythons: Sequence[str], architecture: str) -> int:
    """Fills a folder anew; returns its bytes.

    Raises:
        BundleError: The folder is larger than `MOST_BYTES`.
        subprocess.CalledProcessError: A build or a download failed, and has said why.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # The checks also write checkpoints for TensorFlow, whose checksums need an extra.
    requirements = project["dependencies"] + project["optional-dependencies"]["records"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as built:
        _, compiled, pure = build(pathlib.Path(built, "dist"))
        wheels = [pure] if architecture != platform.machine() else [pure, compiled]
        for wheel in wheels:
            shutil.copy(wheel, folder)
    platforms = [f"--platform={glibc}_{architecture}" for glibc in _GLIBCS]
    for python in pythons:
        packages = required(resolved(requirements, python), resolved(["jax"], python))
        wanted = [f"{name}=={version}" for name, version in packages.items()]
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        download += ["--only-binary=:all:", f"--python-version={python}", *platforms]
        download += ["--disable-pip-version-check", f"--dest={folder}"]
        subprocess.run([*download, *wanted, "pip"], check=True, timeout=600)
    size = sum(file.stat().st_size for file in folder.iterdir())
    if size > MOST_BYTES:
        raise BundleError(f"{folder} has {size:,} bytes; expected at most {MOST_BYTES:,}.")
    return size


def install(folder: pathlib.Path, environment: pathlib.Path) -> None:
    """Makes an environment of this interpreter's packages and the folder's wheels.

    Raises:
        BundleError: There is no folder, or no JAX.
        subprocess.CalledProcessError: pip could not install the wheels, and has said why.
    """
    pips = sorted(folder.glob("pip-*.whl"))
    if not pips:
        raise BundleError(
            f"Expected the wheels of `make gpu-bundle` in {folder}, made where there is a network."
        )
    wheels = "\n".join(f"{file.name} {file.stat().st_size}" for file in sorted(folder.iterdir()))
    of_this = f"{sys.executable}\n{wheels}\n"
    stamp = environment / _STAMP
    if stamp.exists() and stamp.read_text() == of_this:
        return
    base = [entry for entry in sys.path if pathlib.Path(entry).name.endswith("-packages")]
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    # `addsitedir` and not a line for each: so their own .pth files hold, too.
    lines = [f"import site; site.addsitedir({entry!r})" for entry in base]
    pathlib.Path(packages.stdout.strip(), _PTH).write_text("\n".join(lines) + "\n")
    found = subprocess.run([str(python), "-c", "import jax"], check=False, timeout=120)
    if found.returncode:
        raise BundleError(
            f"Expected an interpreter that has JAX: make gpu OFFLINE=1 PYTHON=PATH. Received: "
            f"{sys.executable}"
        )
    pip = [str(python), str(pips[-1] / "pip"), "--isolated", "install", "--quiet", "--no-index"]
    pip += ["--disable-pip-version-check", f"--find-links={folder}"]
    # The folder's Unison, even if the interpreter has one; and then what that requires and lacks.
    subprocess.run([*pip, "--no-deps", "--ignore-installed", "unison"], check=True, timeout=600)
    subprocess.run([*pip, "unison[records]"], check=True, timeout=600)
    stamp.write_text(of_this)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m release.gpu_bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    filling = commands.add_parser("fill", help="download the wheels")
    filling.add_argument("folder", type=pathlib.Path)
    filling.add_argument("--python", nargs="*", default=PYTHONS, help="of the other machine")
    filling.add_argument("--architecture", default="x86_64", help="x86_64 or aarch64")
    installing = commands.add_parser("install", help="make an environment of them")
    installing.add_argument("folder", type=pathlib.Path)
    installing.add_argument("environment", type=pathlib.Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "fill":
            size = fill(options.folder, options.python, options.architecture)
            print(f"{options.folder}: {size:,} bytes")
        else:
            install(options.folder.absolute(), options.environment.absolute())
    except (BundleError, subprocess.SubprocessError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
