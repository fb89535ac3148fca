"""The peers' environments: `python -m benchmarks.peers FOLDER` makes those that are not there yet.

Each peer has its own folder, since their requirements exclude each other; none is ever installed
beside Unison. What a folder holds is written into it last: an installation that was interrupted is
begun again.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence

from benchmarks.workloads import DEVICES

#: What is measured, by the peer's name in `--contestants`.
PACKAGES = {
    "keras": ("jax==0.10.2", "keras==3.15.1"),
    "tf": ("tensorflow==2.21.0", "pillow>=11,<14"),
    "torch": ("torch==2.13.0", "numpy>=2,<3", "pillow>=11,<14"),
    "grain": ("grain==0.2.18",),
    "orbax": ("jax==0.10.2", "orbax-checkpoint==0.12.8"),
}

#: The same for GPUs; those that are not named here are measured on CPUs only.
PACKAGES_ON_GPUS = {
    "keras": ("jax[cuda12]==0.10.2", "keras==3.15.1"),
    "tf": ("tensorflow[and-cuda]==2.21.0",),
}

_STAMP = "installed-packages.txt"


def packages_of(device: str) -> dict[str, tuple[str, ...]]:
    return PACKAGES if device == "cpu" else PACKAGES_ON_GPUS


def python_of(folder: pathlib.Path, peer: str, device: str = "cpu") -> pathlib.Path | None:
    """Returns the interpreter of a peer, if its environment is complete."""
    environment = folder / peer
    is_complete = _installed(environment) == packages_of(device).get(peer)
    return environment / "bin" / "python" if is_complete else None


def install(folder: pathlib.Path, peer: str, packages: Sequence[str]) -> None:
    """Makes the environment of a peer anew.

    Raises:
        subprocess.CalledProcessError: pip could not install it, and has said why.
    """
    environment = folder / peer
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=True)
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *packages], check=True)
    (environment / _STAMP).write_text("\n".join(packages) + "\n")


def _installed(environment: pathlib.Path) -> tuple[str, ...]:
    try:
        return tuple((environment / _STAMP).read_text().split())
    except FileNotFoundError:
        return ()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="where the environments are made")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PACKAGES)} (all)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="what they compute on")
    options = parser.parse_args(arguments)
    packages = packages_of(options.device)
    if unknown := set(options.peers) - set(packages):
        parser.error(f"expected peers of {', '.join(packages)}. Received: {', '.join(unknown)}")
    failed = []
    for peer in options.peers or packages:
        if python_of(options.folder, peer, options.device):
            print(f"{peer} is there")
            continue
        print(f"{peer}: {', '.join(packages[peer])} ...", flush=True)
        try:
            install(options.folder, peer, packages[peer])
        except subprocess.CalledProcessError:
            failed.append(peer)
    if failed:
        print(f"Not installed: {', '.join(failed)}; they will be left out.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
