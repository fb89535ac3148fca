"""What imports cost, beside `import jax`.

    python -m benchmarks.imports [--rounds 15] [--json PATH]

Each round starts one interpreter for each program, in turns. Measured is its processor time, that
of the interpreter itself included, since others may use the cores meanwhile; the modules have been
compiled to bytecode before. A program's distance from `import jax` is the median over rounds of the
difference in a round.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

#: The programs; the first one is what the others are compared with.
PROGRAMS = (
    "import jax",
    "import unison",
    "import unison.tf",
    "import unison; unison.MirroredStrategy",
    "import unison; from unison import *",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write the ratios there")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "JAX_PLATFORMS": "cpu"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for program in PROGRAMS:
            _processor_seconds(program, environment)
        for _ in range(options.rounds):
            for program in PROGRAMS:
                seconds[program].append(_processor_seconds(program, environment))
    of_jax = seconds[PROGRAMS[0]]
    print("| program | s | beyond `import jax`, s | ratio |\n| --- | --- | --- | --- |")
    ratios = {}
    for program, own in seconds.items():
        beyond = statistics.median(a - b for a, b in zip(own, of_jax, strict=True))
        ratios[program] = statistics.median(a / b for a, b in zip(own, of_jax, strict=True))
        print(
            f"| `{program}` | {statistics.median(own):.3f} | {beyond:.3f} | {ratios[program]:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(ratios) + "\n")


def _processor_seconds(program: str, environment: dict[str, str]) -> float:
    """Runs a program in a process of its own, and returns the processor time that it took."""
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{program!r} ended with exit code {process.returncode}")
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
