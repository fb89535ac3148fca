"""Random training programs: several replicas and two workers train as one device does.

A program (`generated_programs/choices.py`) is drawn from a seed and a number: a model with its
inputs, layers and outputs, losses, metrics, an optimizer, a step, data, and what is done with them.
It runs on one device without a strategy, and on 2, 3 and 4 replicas; all losses, metrics,
predictions, weights and optimizer variables must agree after each action. What is documented
to differ is calculated on one device as documented (`generated_programs/layers.py`) or not drawn,
for a reason that is written there (`generated_programs/drawing.py`).

    python tests/random_programs.py --seed 7 --programs 2000              on several replicas
    python tests/random_programs.py --seed 7 --programs 60 --workers 1    under two workers
    python tests/random_programs.py --seed 7 --first 123 --programs 1     one of them

A failing program is shrunk, and printed with the command that runs it again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import gc
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence

#: Programs of a child process, which forgets with it what it has compiled.
CHUNK = 25

#: Seconds for a program, on a busy machine and with shrinking.
SECONDS_EACH = 100

REPLICAS = (2, 3, 4)


@dataclasses.dataclass
class Report:
    """What became of programs.

    Attributes:
        programs: How many ran.
        failures: What is wrong with which program, and the command that runs it again.
    """

    programs: int
    failures: list[str]


def check(
    seed: int, first: int, count: int, replicas: Sequence[int] = REPLICAS, shrinks: bool = True
) -> Report:
    """Runs programs on several replicas, in this process.

    Args:
        seed: The seed of the programs.
        first: The number of the first program.
        count: How many programs.
        replicas: The numbers of replicas on which each runs; none: on the number that is drawn.
        shrinks: Whether a failing program is made small.
    """
    from generated_programs.comparing import complaint_about
    from generated_programs.drawing import draw_program, on_replicas

    failures = []
    for number in range(first, first + count):
        drawn = draw_program(seed, number)
        for program in [on_replicas(drawn, each) for each in replicas] or [drawn]:
            complaint = complaint_about(program)
            if complaint is not None:
                failures.append(_failure(seed, number, program, complaint, shrinks))
                break
        gc.collect()
    return Report(count, failures)


def check_under_two_workers(seed: int, first: int, count: int, devices: int) -> Report:
    """Runs programs under two workers of so many devices each, and does not shrink them."""
    from generated_programs.choices import describe
    from generated_programs.drawing import draw_program
    from generated_programs.two_workers import complaints_under_two_workers

    programs = [draw_program(seed, number) for number in range(first, first + count)]
    found = complaints_under_two_workers(programs, devices)
    return Report(
        count,
        [
            f"{complaint.kind}: {describe(program)}\n  {complaint.text}\n"
            f"  python tests/random_programs.py --seed {seed} --first {first} --programs {count} "
            f"--workers {devices}"
            for program, complaint in found.items()
        ],
    )


def _failure(seed: int, number: int, program, complaint, shrinks: bool) -> str:
    from generated_programs.choices import describe
    from generated_programs.comparing import complaint_about
    from generated_programs.drawing import consistent
    from generated_programs.shrinking import shrink

    if shrinks:

        def fails(candidate) -> bool:
            if consistent(candidate) != candidate:
                return False
            found = complaint_about(candidate)
            return found is not None and found.kind == complaint.kind

        program = shrink(program, fails)
        complaint = complaint_about(program) or complaint
    return (
        f"{complaint.kind}: {describe(program)}\n  {complaint.text[-2000:]}\n"
        f"  python tests/random_programs.py --seed {seed} --first {number} --programs 1"
    )


def check_in_processes(
    seed: int, first: int, count: int, processes: int = 2, workers: int = 0
) -> Iterator[Report]:
    """Runs programs in child processes, and yields a report of each."""
    begins = range(first, first + count, CHUNK)

    def run(begin: int) -> Report:
        number = min(CHUNK, first + count - begin)
        command = [sys.executable, __file__, "--seed", str(seed), "--first", str(begin)]
        command += ["--programs", str(number), *(["--workers", str(workers)] if workers else [])]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=120 + SECONDS_EACH * number
            )
        except subprocess.TimeoutExpired as error:
            return Report(number, [f"hangs: {' '.join(command)}\n{error.stdout!r}"])
        if done.returncode == 0:
            return Report(number, [])
        return Report(number, [done.stdout + done.stderr[-2000 * (done.returncode != 1) :]])

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        yield from pool.map(run, begins)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--programs", type=int, default=20, help="how many")
    parser.add_argument(
        "--workers", type=int, default=0, help="run them under two workers of so many devices"
    )
    parser.add_argument("--processes", type=int, default=2, help="processes, if there are many")
    options = parser.parse_args()
    if options.programs > CHUNK:
        run = failed = 0
        for report in check_in_processes(
            options.seed, options.first, options.programs, options.processes, options.workers
        ):
            run, failed = run + report.programs, failed + len(report.failures)
            print(*report.failures, sep="\n", end="\n" if report.failures else "", flush=True)
            print(f"{run} programs of seed {options.seed}, {failed} with failures", flush=True)
        return 1 if failed else 0
    prepare()
    begin = time.monotonic()
    if options.workers:
        report = check_under_two_workers(
            options.seed, options.first, options.programs, options.workers
        )
    else:
        report = check(options.seed, options.first, options.programs)
    print(*report.failures, sep="\n")
    seconds = time.monotonic() - begin
    print(f"{report.programs} programs in {seconds:.0f} s, {len(report.failures)} failures")
    return 1 if report.failures else 0


def prepare() -> None:
    """Prepares a process of its own as the tests' is prepared; see conftest."""
    import conftest  # noqa: F401
    from unison.runtime.devices import prepare_backend

    warnings.simplefilter("ignore")
    logging.getLogger("unison").setLevel(logging.ERROR)
    prepare_backend()


if __name__ == "__main__":
    sys.exit(main())
