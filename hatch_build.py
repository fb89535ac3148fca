"""Builds the compiled parts of the package: collective operations, and the scaling of images.

A library serves every supported Python and JAX, since it is loaded by `ctypes` and its headers are
the oldest (see `build-system` in pyproject.toml), and every glibc from 2.28 on, since it has
libstdc++ inside and imports no newer symbol. Where the linker cannot do that, the library and its
wheel are for this machine. Without a C++ compiler the package is built without them; a library that
is there and fits its source stays in use.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The sources, each with what is used in place of its library. `NAME.cc` becomes `_NAME.so`.
SOURCES = {
    "src/unison/runtime/shared_memory/exchange.cc": "Processes of a machine will talk by sockets, "
    "and not through shared memory.",
    "src/unison/tf/scaling.cc": "Images will be resized by NumPy.",
}

# What a library shows.
SHOWN = "src/unison/native.map"

# What the platform tag manylinux_2_28 allows: https://peps.python.org/pep-0600/.
NEWEST = {b"GLIBC": (2, 28), b"GCC": (7, 0)}

# libstdc++ is linked statically. So is libgcc's arithmetic, but not what unwinds the stack, which
# all libraries of a process share.
PORTABLE = ("-static-libstdc++", "-l:libgcc.a")


class BuildHook(BuildHookInterface):
    """Compiles the sources, and what they include, for wheels and for editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        built = [self._built(Path(self.root, source)) for source in SOURCES]
        libraries = [library for library in built if library is not None]
        if libraries:
            build_data["pure_python"] = False
            tag = platform_tag(b"".join(library.read_bytes() for library in libraries))
            build_data["tag"] = f"py3-none-{tag}"
            build_data["artifacts"] += [str(each.relative_to(self.root)) for each in libraries]

    def _built(self, source: Path) -> Path | None:
        """Returns the library of a source; None, with a warning, where it could not be built."""
        library = source.with_name(f"_{source.stem}.so")
        parts = [*sorted(source.parent.glob("*.cc")), *sorted(source.parent.glob("*.h"))]
        digest = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
        problem = self._compile(source, library, digest)
        if not problem:
            return library
        if library.exists() and digest.encode() in library.read_bytes():
            self.app.display_warning(f"{problem} {library}, which fits its source, stays in use.")
            return library
        otherwise = SOURCES[str(source.relative_to(self.root))]
        self.app.display_warning(f"{problem} {otherwise}")
        return None

    def _compile(self, source: Path, library: Path, digest: str) -> str:
        """Replaces `library`, or returns why it could not and leaves it alone."""
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        if shutil.which(compiler[0]) is None:
            return f"There is no C++ compiler ({compiler[0]}; set CXX to name another)."
        import jaxlib

        fresh = library.with_suffix(f".{os.getpid()}")
        command = [
            *compiler,
            *("-O3", "-std=c++17", "-fwrapv", "-fPIC", "-shared", "-Wall", "-Wno-sign-compare"),
            *("-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "-Wl,--strip-all"),
            "-ffp-contract=off",  # numbers are NumPy's and XLA's, which round each product
            *("-DNDEBUG", f'-DUNISON_SOURCE="{digest}"'),
            *("-isystem", str(Path(jaxlib.__file__).parent / "include")),
            f"-Wl,--version-script={Path(self.root, SHOWN)}",
            *("-o", str(fresh)),
            str(source),
        ]
        try:
            # Some systems have no static libstdc++; there the compiler's complaint comes first, and
            # the library is linked with the one that the system has.
            for libraries in (PORTABLE, ()):
                if subprocess.run([*command, *libraries]).returncode == 0:
                    fresh.replace(library)  # processes that have the old one loaded keep it
                    return ""
        finally:
            fresh.unlink(missing_ok=True)
        return f"{source} could not be compiled by {compiler[0]}."


def platform_tag(libraries: bytes) -> str:
    """The tag of a wheel with these libraries: manylinux where their symbols are old enough."""
    own = sysconfig.get_platform().translate(str.maketrans("-.", "__"))
    versions = re.findall(rb"\0(GLIBC|GCC)_(\d+)\.(\d+)", libraries)
    is_portable = b"libstdc++.so" not in libraries and all(
        (int(major), int(minor)) <= NEWEST[name] for name, major, minor in versions
    )
    if not versions or not is_portable:
        return own
    return own.replace("linux", "manylinux_2_28", 1)
