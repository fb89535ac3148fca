"""The command line: `python -m benchmarks [fit|run|memory|aggregation|data|all] ...`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence

from benchmarks import examples, machine, tables, workloads
from benchmarks.contestants import ENTRIES, FAMILIES, PEERS, Entry
from benchmarks.driver import Limits, Result, measure
from benchmarks.workloads import Work

_ROUNDS = 7
_QUICK_ROUNDS = 2


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    # Through `finally` blocks, so that no contestant stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    about = machine.description()
    print(f"{about['cpu']}, {about['cores']} cores, {about['system']}, Python {about['python']}")
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    results: list[Result] = []
    try:
        with tempfile.TemporaryDirectory(prefix="unison-benchmarks-") as folder:
            works = _workloads(options, folder)
            pythons = _interpreters(options, works)
            examples.write_files(pathlib.Path(folder), works)
            for work in works:
                print(f"\n{work.name}", flush=True)
                contestants = _contestants(work, pythons)
                results.append(measure(work, contestants, rounds, Limits(), _say))
                print(tables.table(results[-1]), flush=True)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    print(f"\n{_versions(results)}")
    if options.json:
        written = tables.to_dictionary(results, about)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if any(result.failures for result in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures Unison beside hand-written JAX and the peers, in turn, in one run.",
        epilog="Only ratios of one run count. Leave the machine alone meanwhile.",
    )
    add = parser.add_argument
    contests = ("fit", "run", "memory", "aggregation", "data", "all")
    add("what", nargs="?", choices=contests, default="all")
    add("--model", choices=("mlp", "cnn"), help="only this model (default: both)")
    add(
        "--task",
        default=",".join(workloads.TASKS),
        metavar="NAME,NAME",
        help="tasks of `data` (%(default)s)",
    )
    add("--batch", default="64,256,1024", metavar="N,N", help="global batches (%(default)s)")
    add("--rounds", type=int, metavar="N", help=f"rounds of each contestant ({_ROUNDS})")
    add(
        "--contestants",
        default=",".join(FAMILIES),
        metavar="NAME,NAME",
        help="who takes part (%(default)s)",
    )
    add("--tf-python", metavar="PATH", help="an interpreter that has TensorFlow and Keras 3")
    add("--grain-python", metavar="PATH", help="an interpreter that has Grain")
    add("--torch-python", metavar="PATH", help="an interpreter that has PyTorch")
    add("--data", metavar="PATH", help="images in the format of Keras' mnist.npz (synthetic)")
    add("--verbose", type=int, choices=(0, 1), default=0, help="that of fit (%(default)s)")
    add("--json", type=pathlib.Path, metavar="PATH", help="write everything measured there")
    add("--quick", action="store_true", help="two steps a round: shows that all works, no more")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Reads the lists, and refuses what would fail only later, in a contestant."""
    options.contestants = options.contestants.split(",")
    if unknown := set(options.contestants) - set(FAMILIES):
        parser.error(f"--contestants knows {', '.join(FAMILIES)}. Received: {', '.join(unknown)}")
    options.task = options.task.split(",")
    if unknown := set(options.task) - set(workloads.TASKS):
        parser.error(f"--task knows {', '.join(workloads.TASKS)}. Received: {', '.join(unknown)}")
    try:
        options.batch = workloads.parse_batches(options.batch)
    except ValueError as error:
        parser.error(f"--batch: {error}")
    if options.data:
        options.data = str(pathlib.Path(options.data).resolve())
        if not pathlib.Path(options.data).is_file():
            parser.error(f"--data: there is no file {options.data}")
    for peer in PEERS:
        if (python := _peer_python(options, peer)) and not shutil.which(python):
            parser.error(f"--{peer}-python: there is no program {python}")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds: expected 1 or more. Received: {options.rounds}")


def _peer_python(options: argparse.Namespace, peer: str) -> str | None:
    return getattr(options, f"{peer}_python")


def _interpreters(options: argparse.Namespace, works: Sequence[Work]) -> dict[str, str]:
    """Returns the interpreter of every family that takes part; says who does not."""
    wanted = [
        family
        for family in options.contestants
        if any(entry.family == family and any(map(entry.takes_part_in, works)) for entry in ENTRIES)
    ]
    pythons = {family: sys.executable for family in wanted if family not in PEERS}
    for peer, package in PEERS.items():
        if peer not in wanted:
            continue
        if python := _peer_python(options, peer):
            # Not resolved: a link into a virtual environment must stay one.
            pythons[peer] = str(pathlib.Path(shutil.which(python)).absolute())
        elif importlib.util.find_spec(package):
            pythons[peer] = sys.executable
        else:
            print(f"{peer} is left out: here is no {package}; give --{peer}-python PATH.")
    return pythons


def _workloads(options: argparse.Namespace, folder: str) -> list[Work]:
    works: list[Work] = []
    if options.what in ("fit", "all"):
        models = [options.model] if options.model else ["mlp", "cnn"]
        works += workloads.fit_workloads(
            models, options.batch, options.data, options.verbose, options.quick
        )
    if options.what in ("run", "all"):
        works += workloads.run_workloads(options.quick)
    if options.what in ("memory", "all"):
        works += workloads.memory_workloads(options.data, options.quick)
    if options.what in ("aggregation", "all"):
        works += workloads.aggregation_workloads(options.quick)
    if options.what in ("data", "all"):
        works += workloads.data_workloads(options.task, folder, options.quick)
    return works


def _contestants(work: Work, pythons: dict[str, str]) -> list[tuple[Entry, str]]:
    return [
        (entry, pythons[entry.family])
        for entry in ENTRIES
        if entry.family in pythons and entry.takes_part_in(work)
    ]


def _versions(results: list[Result]) -> str:
    found: dict[str, set[str]] = {}
    for result in results:
        for versions in result.versions.values():
            for library, version in versions.items():
                found.setdefault(library, set()).add(version)
    return ", ".join(f"{name} {'/'.join(sorted(found[name]))}" for name in sorted(found))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
