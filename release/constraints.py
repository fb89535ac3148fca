"""Makes the tested sets: `python -m release.constraints`, or `make constraints`.

A tested set is a file of constraints for one JAX, with the Python that its tests run with. Of the
oldest JAX it has the lowest versions of everything that pyproject.toml names, so that a lower bound
that is wrong fails in the tests; of the others it has the newest. They hold on every platform, for
that Python and newer ones.
"""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
from dataclasses import dataclass

from release.interpreters import UV

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "constraints"

#: Every extra whose packages exist for each JAX; JAX's plugin for ROCm comes later than JAX.
EXTRAS = ("all", "cuda12", "cuda13", "dev", "docs", "release", "tpu")


@dataclass(frozen=True)
class TestedSet:
    """The packages that are tested with one JAX.

    Attributes:
        jax: Its version.
        python: The version of Python.
        resolution: Which versions of the other packages uv takes.
        constraints: The file that has them; None: this set's own.
    """

    jax: str
    python: str
    resolution: str
    constraints: pathlib.Path | None = None

    @property
    def minor(self) -> str:
        return ".".join(self.jax.split(".")[:2])

    @property
    def name(self) -> str:
        return f"jax{self.minor}-python{self.python}"

    @property
    def path(self) -> pathlib.Path:
        return self.constraints or FOLDER / f"{self.name}.txt"

    @property
    def header(self) -> str:
        of_what = "newest" if self.resolution == "highest" else "lowest direct"
        return (
            f"# JAX {self.jax} with Python {self.python}: the {of_what} versions of everything.\n"
            "# `make constraints` writes this file.\n"
        )


TESTED_SETS = (
    TestedSet("0.10.2", "3.11", "lowest-direct"),
    TestedSet("0.11.*", "3.12", "highest"),
    TestedSet("0.12.*", "3.13", "highest"),
)


def compiled(tested: TestedSet) -> str:
    """Returns the constraints of a set, as the package index has them today.

    Raises:
        subprocess.CalledProcessError: uv found no solution, and has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax = pathlib.Path(folder, "jax.txt")
        jax.write_text(f"jax=={tested.jax}\n")
        command = [
            *(*UV, "pip", "compile", str(ROOT / "pyproject.toml")),
            *(f"--extra={extra}" for extra in EXTRAS),
            *("--universal", "--python-version", tested.python),
            *("--resolution", tested.resolution, "--constraint", str(jax)),
            *("--no-config", "--no-header", "--no-annotate", "--quiet"),
        ]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for tested in TESTED_SETS:
        tested.path.write_text(tested.header + compiled(tested))
        print(tested.path.relative_to(ROOT))
    for left in set(FOLDER.iterdir()) - {tested.path for tested in TESTED_SETS}:
        left.unlink()


if __name__ == "__main__":
    main()
