"""Builds the compiled part of the package: collective operations through memory and sockets.

One library serves every supported Python and JAX, since it is loaded by `ctypes` and its headers
are the oldest (see `build-system` in pyproject.toml), and every glibc from 2.28 on, since it has
libstdc++ inside and imports no newer symbol. Where the linker cannot do that, the library and its
wheel are for this machine. Without a C++ compiler the package is built without it, and processes
of a machine talk by sockets; a library that is there and fits its source stays in use.
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

FOLDER = Path("src/unison/runtime/shared_memory")

# What the platform tag manylinux_2_28 allows: https://peps.python.org/pep-0600/.
NEWEST = {b"GLIBC": (2, 28), b"GCC": (7, 0)}

# libstdc++ is linked statically. So is libgcc's arithmetic, but not what unwinds the stack, which
# all libraries of a process share.
PORTABLE = ("-static-libstdc++", "-l:libgcc.a")


class BuildHook(BuildHookInterface):
    """Compiles `exchange.cc`, and what it includes, for wheels and for editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        folder = Path(self.root, FOLDER)
        library = folder / "_exchange.so"
        parts = [*sorted(folder.glob("*.cc")), *sorted(folder.glob("*.h"))]
        source = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
        problem = self._compile(folder, library, source)
        if problem and not (library.exists() and source.encode() in library.read_bytes()):
            self.app.display_warning(
                f"{problem} Processes of a machine will talk by sockets, and not through shared "
                "memory."
            )
            return
        if problem:
            self.app.display_warning(f"{problem} {library}, which fits its source, stays in use.")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library.read_bytes())}"
        build_data["artifacts"].append(str(FOLDER / library.name))

    def _compile(self, folder: Path, library: Path, source: str) -> str:
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
            *("-DNDEBUG", f'-DUNISON_EXCHANGE_SOURCE="{source}"'),
            *("-isystem", str(Path(jaxlib.__file__).parent / "include")),
            f"-Wl,--version-script={folder / 'exchange.map'}",
            *("-o", str(fresh)),
            str(folder / "exchange.cc"),
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
        return f"{folder / 'exchange.cc'} could not be compiled by {compiler[0]}."


def platform_tag(library: bytes) -> str:
    """The tag of a wheel with this library: manylinux where its symbols are old enough."""
    own = sysconfig.get_platform().translate(str.maketrans("-.", "__"))
    versions = re.findall(rb"\0(GLIBC|GCC)_(\d+)\.(\d+)", library)
    is_portable = b"libstdc++.so" not in library and all(
        (int(major), int(minor)) <= NEWEST[name] for name, major, minor in versions
    )
    if not versions or not is_portable:
        return own
    return own.replace("linux", "manylinux_2_28", 1)
