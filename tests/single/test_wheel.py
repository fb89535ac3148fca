"""The wheel: what is in it, for which machines it is, and what a build leaves alone."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = "unison/runtime/shared_memory"
LIBRARY = f"{FOLDER}/_exchange.so"
SCALING = "unison/tf/_scaling.so"
MACHINE = sysconfig.get_platform().replace("-", "_").replace(".", "_")

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the compiled parts are for Linux"
)


def static_libstdcxx() -> bool:
    """Whether the compiler has the static libstdc++, which some systems package apart."""
    if shutil.which("c++") is None:
        return False
    asked = ["c++", "-print-file-name=libstdc++.a"]
    return Path(subprocess.check_output(asked, text=True).strip()).is_absolute()


@pytest.fixture
def checkout(tmp_path):
    """What a wheel is built from, of a package with little in it but the compiled parts."""
    folder = tmp_path / "checkout"
    package = folder / "src" / "unison"
    for room in ("runtime", "tf"):
        (package / room).mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for hook in ROOT.glob("hatch_*.py"):
        shutil.copy(hook, folder)
    for name in ("__init__.py", "py.typed", "native.map", "tf/scaling.cc"):
        shutil.copy(ROOT / "src" / "unison" / name, package / name)
    shutil.copytree(
        ROOT / "src" / FOLDER,
        folder / "src" / FOLDER,
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    return folder


def wheel_of(checkout: Path, compiler: str | None = None) -> tuple[str, dict[str, bytes]]:
    """The platform tag and the files of a wheel that is built with `compiler`."""
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    if compiler is not None:
        environment["CXX"] = compiler
    dist = checkout / "dist"
    finished = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (built,) = dist.iterdir()
    with zipfile.ZipFile(built) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    built.unlink()
    return built.stem.partition("-py3-none-")[2], files


@pytest.mark.skipif(not static_libstdcxx(), reason="there is no static libstdc++")
def test_a_wheel_serves_every_python_and_every_glibc_from_2_28_on(checkout):
    tag, files = wheel_of(checkout)
    assert tag == MACHINE.replace("linux", "manylinux_2_28")
    assert {LIBRARY, SCALING} <= files.keys()


def test_a_wheel_has_the_licence_the_types_and_the_sources_of_the_compiled_parts(checkout):
    _, files = wheel_of(checkout, compiler="missing")
    names = {name.partition("/")[2] if ".dist-info/" in name else name for name in files}
    sources = {f"{FOLDER}/exchange.cc", "unison/tf/scaling.cc", "unison/native.map"}
    assert {"licenses/LICENSE", "unison/py.typed", *sources} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_without_a_compiler_the_wheel_is_pure(checkout):
    tag, files = wheel_of(checkout, compiler="missing")
    assert tag == "any"
    assert not files.keys() & {LIBRARY, SCALING}


def built_library(folder: Path) -> bytes:
    """A stand-in for the library that `folder` has the source of."""
    parts = [*sorted(folder.glob("*.cc")), *sorted(folder.glob("*.h"))]
    digest = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
    return b"\x7fELF\0GLIBC_2.17\0" + digest.encode()


@pytest.mark.parametrize("compiler", ["missing", "false"], ids=["none", "one that fails"])
def test_without_a_compiler_a_library_that_fits_stays_and_is_in_the_wheel(checkout, compiler):
    library = checkout / "src" / LIBRARY
    library.write_bytes(built_library(library.parent))
    tag, files = wheel_of(checkout, compiler)
    assert files[LIBRARY] == library.read_bytes()
    assert tag == MACHINE.replace("linux", "manylinux_2_28")


def test_without_a_compiler_a_library_of_another_source_stays_and_is_not_in_the_wheel(checkout):
    library = checkout / "src" / LIBRARY
    library.write_bytes(b"\x7fELF of another source")
    tag, files = wheel_of(checkout, compiler="missing")
    assert library.exists()
    assert (tag, LIBRARY in files) == ("any", False)


@pytest.mark.parametrize(
    ("symbols", "platform"),
    [
        (b"\0libc.so.6\0GLIBC_2.17\0GLIBC_2.28\0GCC_3.0\0", "manylinux_2_28"),
        (b"\0libc.so.6\0GLIBC_2.17\0GLIBC_2.34\0", "linux"),
        (b"\0libgcc_s.so.1\0GCC_12.0.0\0GLIBC_2.17\0", "linux"),
        (b"\0libstdc++.so.6\0GLIBC_2.17\0", "linux"),
        (b"\0libc.musl-x86_64.so.1\0", "linux"),
    ],
    ids=["old symbols", "newer glibc", "newer libgcc", "shared libstdc++", "musl"],
)
def test_the_tag_follows_the_symbols(symbols, platform):
    place = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    build = importlib.util.module_from_spec(place)
    place.loader.exec_module(build)
    assert build.platform_tag(symbols) == MACHINE.replace("linux", platform)
