"""The command line: `python -m benchmarks [WHAT] ...`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks import (
    examples,
    machine,
    namespaces,
    peers,
    scaling,
    server_scaling,
    tables,
    workloads,
)
from benchmarks.contestants import ENTRIES, FAMILIES, PEERS, Entry
from benchmarks.driver import Limits, Result, measure
from benchmarks.namespaces import THIS_MACHINE, Host, Link
from benchmarks.workloads import RecoveryWork, TrainingWork, Work
from unison.runtime.cores import available_cores

_ROUNDS = 7
_QUICK_ROUNDS = 2

_MODELS_OF_FIT = ("mlp", "cnn")

#: The contests over links, of which `all` leaves out both.
_OVER_LINKS = ("network", "compression")

#: The contests in which several processes train.
_TRAINING = ("workers", "weak_scaling", *_OVER_LINKS)

#: The contests that can run on GPUs.
_ON_GPUS = ("fit", "run", "memory")

#: Milliseconds that packets take in the contest `network`, where the kernel can delay them.
_DELAYS = (0.0, 0.1, 1.0, 5.0)
_MEGABITS = (None, 10_000, 1_000, 100)


def main(arguments: list[str] | None = None) -> int:
    # Through `finally` blocks, so that no contestant stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(arguments: list[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    about = machine.description()
    print(f"{about['cpu']}, {about['cores']} cores, {about['system']}, Python {about['python']}")
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="unison-benchmarks-") as folder:
        works = {link: _workloads(options, folder, link) for link in _links(options)}
        of_all_links = [work for of_link in works.values() for work in of_link]
        pythons = _interpreters(options, of_all_links)
        examples.write_files(pathlib.Path(folder), of_all_links)
        for link, of_link in works.items():
            with _hosts(link) as hosts:
                for work in of_link:
                    print(f"\n{work.name}", flush=True)
                    contestants = _contestants(work, pythons)
                    limits = _limits(work)
                    results.append(measure(work, contestants, rounds, limits, _say, hosts))
                    print(tables.table(results[-1]), flush=True)
    cores = machine.cores()
    for summary in (
        scaling.summary(results, cores),
        server_scaling.summary(results, cores),
        tables.by_link(results),
    ):
        if summary:
            print(f"\n{summary}")
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
        epilog=(
            "Only ratios of one run count. Leave the machine alone meanwhile. `network` and "
            "`compression` make network namespaces, which only root may; `all` leaves them out."
        ),
    )
    add = parser.add_argument
    of_others = (
        "fit",
        "architectures",
        "run",
        "memory",
        "aggregation",
        "data",
        "image_input",
        "fsdp",
        "data_service",
        "all_reduce",
        "shares",
    )
    contests = (*of_others, "checkpoint", "recovery", "parameter_servers", *_TRAINING, "all")
    add("what", nargs="?", choices=contests, default="all")
    add("--model", choices=_models("all"), help="only this model (default: all)")
    add(
        "--task",
        default=",".join(workloads.TASKS),
        metavar="NAME,NAME",
        help="tasks of `data` (%(default)s)",
    )
    add("--batch", default="64,256,1024", metavar="N,N", help="global batches (%(default)s)")
    add("--megabits", type=int, metavar="N", help="only links of this rate")
    add("--scaling", action="store_true", help="more workers and servers in `parameter_servers`")
    add("--rounds", type=int, metavar="N", help=f"rounds of each contestant ({_ROUNDS})")
    add(
        "--contestants",
        default=",".join(FAMILIES),
        metavar="NAME,NAME",
        help="who takes part (%(default)s)",
    )
    add("--peers", type=pathlib.Path, metavar="FOLDER", help="what `benchmarks.peers` has made")
    add("--device", choices=workloads.DEVICES, default="cpu", help=f"gpu: {', '.join(_ON_GPUS)}")
    add("--keras-python", metavar="PATH", help="an interpreter that has JAX and Keras 3")
    add("--tf-python", metavar="PATH", help="an interpreter that has TensorFlow and Keras 3")
    add("--grain-python", metavar="PATH", help="an interpreter that has Grain")
    add("--orbax-python", metavar="PATH", help="an interpreter that has JAX and Orbax")
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
    known = _models(options.what)
    if known and options.model not in (None, *known):
        parser.error(f"--model of `{options.what}`: {', '.join(known)}. Received: {options.model}")
    if options.device == "gpu" and options.what not in _ON_GPUS:
        parser.error(f"--device gpu: for {', '.join(_ON_GPUS)}. Received: {options.what}")
    is_over_links = options.what in _OVER_LINKS
    if options.megabits is not None and (not is_over_links or options.megabits < 1):
        over_links = " and ".join(f"`{contest}`" for contest in _OVER_LINKS)
        parser.error(f"--megabits: 1 or more, for {over_links}. Received: {options.megabits}")
    if options.scaling and options.what != "parameter_servers":
        parser.error("--scaling: for `parameter_servers`")
    if is_over_links and (reason := namespaces.what_is_missing()):
        parser.error(f"`{options.what}` needs network namespaces, and {reason}.")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds: expected 1 or more. Received: {options.rounds}")


def _models(what: str) -> tuple[str, ...]:
    """Returns the models of which one can be chosen in a contest."""
    of_processes = tuple(workloads.WIDTHS)
    architectures = tuple(workloads.ARCHITECTURES)
    everything = tuple(dict.fromkeys((*_MODELS_OF_FIT, *architectures, *of_processes)))
    of_contests = {"fit": _MODELS_OF_FIT, "architectures": architectures, "all": everything}
    return of_contests.get(what, of_processes if what in (*_TRAINING, "recovery") else ())


def _peer_python(options: argparse.Namespace, peer: str) -> str | None:
    if (named := getattr(options, f"{peer}_python")) or options.peers is None:
        return named
    made = peers.python_of(options.peers, peer, options.device)
    return None if made is None else str(made)


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


def _links(options: argparse.Namespace) -> list[Link | None]:
    """Returns how the hosts are linked, one way after the other; None for this machine alone."""
    if options.what not in _OVER_LINKS:
        return [None]
    delays = _DELAYS if options.what == "network" else _DELAYS[:1]
    if reason := namespaces.what_is_missing(Link(delay=max(delays))):
        print(f"Links do not delay packets: {reason}")
        delays = _DELAYS[:1]
    rates = [options.megabits] if options.megabits else _MEGABITS
    return [Link(megabits, delay) for megabits in rates for delay in delays]


@contextlib.contextmanager
def _hosts(link: Link | None) -> Iterator[Sequence[Host]]:
    if link is None:
        yield [THIS_MACHINE]
    else:
        with namespaces.hosts(workloads.REPLICAS, link) as hosts:
            yield hosts


def _workloads(options: argparse.Namespace, folder: str, link: Link | None) -> list[Work]:
    works: list[Work] = []
    trained = [name for name in workloads.WIDTHS if options.model in (None, name)]
    if link is not None:
        return workloads.network_workloads(
            options.what, trained, options.batch, link, options.quick
        )
    if options.what in ("fit", "all"):
        models = [name for name in _MODELS_OF_FIT if options.model in (None, name)]
        works += workloads.fit_workloads(
            models, options.batch, options.data, options.verbose, options.device, options.quick
        )
    if options.what in ("architectures", "all"):
        models = [name for name in workloads.ARCHITECTURES if options.model in (None, name)]
        works += workloads.architecture_workloads(models, options.device, options.quick)
    if options.what in ("run", "all"):
        works += workloads.run_workloads(options.device, options.quick)
    if options.what in ("memory", "all"):
        works += workloads.memory_workloads(options.data, options.device, options.quick)
    if options.what in ("aggregation", "all"):
        works += workloads.aggregation_workloads(options.quick)
    if options.what in ("data", "all"):
        works += workloads.data_workloads(options.task, folder, options.quick)
    if options.what in ("workers", "all"):
        works += workloads.workers_workloads(trained, options.batch, options.quick)
    if options.what in ("image_input", "all"):
        works += workloads.image_input_workloads(available_cores(), options.quick)
    if options.what in ("fsdp", "all"):
        works += workloads.divided_workloads(options.quick)
    if options.what in ("data_service", "all"):
        works += workloads.service_workloads(options.quick)
    if options.what in ("all_reduce", "all"):
        works += workloads.all_reduce_workloads(options.quick)
    if options.what in ("shares", "all"):
        works += workloads.shares_workloads(options.quick)
    if options.what in ("checkpoint", "all"):
        works += workloads.checkpoint_workloads(folder, options.quick)
    if options.what in ("recovery", "all"):
        works += workloads.recovery_workloads(trained, options.batch, options.quick)
    if options.what == "parameter_servers" and options.scaling:
        works += workloads.server_scaling_workloads(options.quick)
    elif options.what in ("parameter_servers", "all"):
        works += workloads.server_workloads(options.quick)
    if options.what in ("weak_scaling", "all"):
        works += workloads.weak_scaling_workloads(trained, options.quick)
    return works


def _limits(work: Work) -> Limits:
    # Each waits for all others, and idle ones end by themselves.
    if isinstance(work, RecoveryWork):  # whose jobs have a limit
        of_each = work.seconds + 30
    elif isinstance(work, TrainingWork) and work.link:
        of_each = Limits().round
    else:
        return Limits()
    of_all = sum(entry.takes_part_in(work) for entry in ENTRIES) * of_each
    return Limits(start=of_all, round=of_all)


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
