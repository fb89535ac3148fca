"""Builds the compiled part of the package: collective operations through shared memory.

Without a C++ compiler the package is built without it, and processes of a machine talk by sockets.
"""

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
    """Compiles `exchange.cc` for wheels and for editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        library = Path(self.root, FOLDER, "_exchange.so")
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        if shutil.which(compiler[0]) is None:
            library.unlink(missing_ok=True)
            self.app.display_warning(
                f"There is no C++ compiler ({compiler[0]}; set CXX to name another): processes of "
                "a machine will talk by sockets, and not through shared memory."
            )
            return
        import jaxlib

        fresh = library.with_suffix(f".{os.getpid()}")
        command = [
            *compiler,
            *("-O3", "-std=c++17", "-DNDEBUG", "-fPIC", "-shared", "-Wall", "-Wno-sign-compare"),
            *("-isystem", str(Path(jaxlib.__file__).parent / "include")),
            *("-o", str(fresh)),
            str(Path(self.root, FOLDER, "exchange.cc")),
        ]
        subprocess.run(command, check=True)
        fresh.replace(library)  # processes that have the old one loaded keep it
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().translate(str.maketrans('-.', '__'))}"
        )
        build_data["artifacts"].append(str(FOLDER / library.name))
