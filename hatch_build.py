"""Builds the compiled part of the package: collective operations through memory and sockets.

Without a C++ compiler the package is built without it, and processes of a machine talk by sockets.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/unison/runtime/shared_memory")


class BuildHook(BuildHookInterface):
    """Compiles `exchange.cc`, and what it includes, for wheels and for editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        library = Path(self.root, FOLDER, "_exchange.so")
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        library.unlink(missing_ok=True)  # processes that have it loaded keep it
        if shutil.which(compiler[0]) is None:
            self._warn(f"There is no C++ compiler ({compiler[0]}; set CXX to name another).")
            return
        import jaxlib

        folder = Path(self.root, FOLDER)
        source = folder / "exchange.cc"
        parts = [*sorted(folder.glob("*.cc")), *sorted(folder.glob("*.h"))]
        digest = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
        fresh = library.with_suffix(f".{os.getpid()}")
        command = [
            *compiler,
            *("-O3", "-std=c++17", "-fwrapv", "-fPIC", "-shared", "-Wall", "-Wno-sign-compare"),
            *("-DNDEBUG", f'-DUNISON_EXCHANGE_SOURCE="{digest}"'),
            *("-isystem", str(Path(jaxlib.__file__).parent / "include")),
            *("-o", str(fresh)),
            str(source),
        ]
        if subprocess.run(command).returncode != 0:
            self._warn(f"{source} could not be compiled by {compiler[0]}.")
            return
        fresh.replace(library)
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().translate(str.maketrans('-.', '__'))}"
        )
        build_data["artifacts"].append(str(FOLDER / library.name))

    def _warn(self, reason: str) -> None:
        self.app.display_warning(
            f"{reason} Processes of a machine will talk by sockets, and not through shared memory."
        )
