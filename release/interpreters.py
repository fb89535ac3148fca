"""Which Pythons this machine has: on the PATH, those that uv manages, and pyenv's."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

#: uv, which the extra `release` installs beside this Python.
UV = (sys.executable, "-m", "uv")


def interpreter(version: str) -> str | None:
    """Returns the path of the Python of a version, such as "3.12", or None if there is none.

    pyenv's are found by their folders: its commands on the PATH are scripts, which only start the
    versions that are switched on.
    """
    root = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    folders = sorted(str(folder) for folder in root.glob(f"versions/{version}*/bin"))
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    found = subprocess.run(
        [*UV, "python", "find", "--no-project", "--no-python-downloads", version],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else None
