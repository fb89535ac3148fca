"""`unison bench`: measures how training scales, and compares two measurements."""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from unison.benching import showing
from unison.benching.points import Point, Scaling, SizeError, points
from unison.benching.results import NoResultsError, Results, this_machine
from unison.benching.sweep import MeasurementError, Place, Sweep, Target
from unison.cli import programs, ray_places
from unison.cli.errors import CommandError
from unison.cli.numbers import positive, seconds
from unison.cli.terminal import Terminal
from unison.errors import UnavailableError
from unison.runtime.cluster_resolvers.gpus import gpus_of_jax
from unison.runtime.cores import available_cores

_MODELS = ("mlp", "cnn", "loop")
_COMPARE = "compare"

#: The global batch size of the built-in models with the fewest replicas.
_BATCH = 256

#: The number of examples of the built-in models' data, and the minimum number of the largest
#: batches in it: an epoch must not be too short.
_EXAMPLES = 8192
_BATCHES_OF_DATA = 32


def add_command(commands: Any) -> None:
    """Adds `bench` to the subcommands of a parser."""
    parser = commands.add_parser(
        "bench",
        help="measure how training scales with devices, batches and data",
        usage="unison bench [options] MODEL|SCRIPT ...\n       unison bench compare A B",
        description="Trains with more and more replicas, larger batches and more data, and "
        "measures speed, the times of steps, communication, waiting for input, and memory. MODEL "
        f"is one of {', '.join(_MODELS)}; SCRIPT is any program that trains by Keras' fit or "
        "strategy.run. It is not changed, and ended when it has been measured; among its "
        "arguments, {batch}, {examples}, {replicas}, {workers} and {devices} stand for numbers. "
        "`unison bench compare --help` shows how two measurements are compared.",
    )
    of_sizes = parser.add_argument_group("sizes", "lists: 1,2,4")
    of_sizes.add_argument(
        "--devices",
        type=_numbers,
        metavar="LIST",
        help="numbers of devices of one process (default: 1, 2, 4 ... as many as there are cores "
        "or GPUs)",
    )
    of_sizes.add_argument(
        "--workers", type=_numbers, metavar="LIST", help="numbers of processes, instead"
    )
    of_sizes.add_argument(
        "--devices-per-worker",
        type=positive,
        metavar="D",
        help="how many devices each of --workers has (default: 1)",
    )
    of_sizes.add_argument(
        "--batch",
        type=_numbers,
        metavar="LIST",
        help=f"global batches, with the fewest replicas (default of a model: {_BATCH})",
    )
    of_sizes.add_argument(
        "--examples",
        type=_numbers,
        metavar="LIST",
        help="sizes of the data (default of a model: enough for its batches)",
    )
    of_sizes.add_argument(
        "--scaling",
        choices=[scaling.value for scaling in Scaling],
        help="with more replicas, keep the global batch (strong), or each replica's part of it "
        "(weak; default: both)",
    )
    of_measuring = parser.add_argument_group("measuring")
    of_measuring.add_argument(
        "--rounds", type=positive, default=5, metavar="N", help="how often (default: 5)"
    )
    of_measuring.add_argument(
        "--steps", type=positive, default=100, metavar="N", help="steps a round (default: 100)"
    )
    of_measuring.add_argument(
        "--warmup",
        type=positive,
        default=30,
        metavar="N",
        help="steps that run before, for compiling among others (default: 30)",
    )
    of_measuring.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="for a round of one size (default: 600)",
    )
    ray_places.add_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        default="unison-bench",
        metavar="FOLDER",
        help="where results.json, report.html and scaling.png go (default: unison-bench)",
    )
    programs.add_arguments(parser, "target", "MODEL|SCRIPT", "what is measured")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.target == _COMPARE and not options.module:
        return _compare(options.arguments, options.no_color)
    programs.choose_keras_backend()
    target = _target(options)
    ray_places.check(options)
    console = Console(no_color=True if options.no_color else None, highlight=False)
    try:
        sizes = points(*_sizes(options, target))
        place = Place(options.address, options.cpus_per_worker, options.gpus_per_worker)
        sweep = Sweep(target, sizes, place, options.warmup, options.steps, options.timeout)
        _check_folder(options.output)
        results = _measured(sweep, target, options, console)
    except (SizeError, ImportError, UnavailableError) as error:
        raise CommandError(str(error)) from error
    except MeasurementError as error:
        terminal = Terminal(options.no_color)
        for line in error.last_lines:
            terminal.say(line)
        terminal.complain(f"unison bench: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    _show(results, pathlib.Path(options.output), console)
    return 0


def _target(options: argparse.Namespace) -> Target:
    name = options.target
    if name in _MODELS and not options.module:
        if options.arguments:
            raise CommandError(
                f"The model {name} takes no arguments. Received: {' '.join(options.arguments)}. "
                f"Options go before it: unison bench --batch 64 {name}"
            )
        return Target.model(name)
    if not options.module and not pathlib.Path(name).is_file():
        raise CommandError(
            f"Expected a model ({', '.join(_MODELS)}) or the file of a program. Received: {name!r}"
        )
    return Target(name, options.module, options.arguments, " ".join([name, *options.arguments]))


def _sizes(
    options: argparse.Namespace, target: Target
) -> tuple[list[tuple[int, int]], list[int], list[int], Scaling]:
    """Returns the arguments of `points`."""
    for name, given in (("batch", options.batch), ("examples", options.examples)):
        if given is not None and not target.is_told(name):
            raise CommandError(
                f"The program does not receive --{name}. Put {{{name}}} among its arguments: "
                f"unison bench --{name} {given[0]} {target.script} --{name} '{{{name}}}'"
            )
        if given is None and target.is_told(name) and not target.is_model:
            raise CommandError(
                f"The program's arguments have {{{name}}}, and --{name} does not say what it is."
            )
    if options.scaling is not None and not target.is_told("batch"):
        raise CommandError(
            "--scaling is about batches, and the program decides about its own. Put {batch} among "
            "its arguments, and give --batch."
        )
    scaling = Scaling(options.scaling or Scaling.BOTH.value)
    places = _places(options)
    batches, examples = options.batch or [], options.examples or []
    if target.is_model:
        batches = batches or [_BATCH]
        growth = max(w * d for w, d in places) // min(w * d for w, d in places)
        largest = max(batches) * (1 if scaling is Scaling.STRONG else growth)
        examples = examples or [max(_EXAMPLES, _BATCHES_OF_DATA * largest)]
    return places, batches, examples, scaling


def _places(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Returns the pairs of a number of workers and of devices per worker, in order."""
    if options.workers is None:
        for name, given in (
            ("--devices-per-worker", options.devices_per_worker),
            ("--address", options.address),
        ):
            if given is not None:
                raise CommandError(f"{name} is for several processes: give --workers, too.")
        return [(1, devices) for devices in options.devices or _powers_of_two()]
    if options.devices is not None:
        raise CommandError(
            "Give either --devices, of one process, or --workers, with --devices-per-worker."
        )
    return [(workers, options.devices_per_worker or 1) for workers in options.workers]


def _powers_of_two() -> list[int]:
    most = len(gpus_of_jax()) or available_cores()
    return [2**power for power in range(most.bit_length())]


def _measured(
    sweep: Sweep, target: Target, options: argparse.Namespace, console: Console
) -> Results:
    with console.status("starting") as status:

        def begun(number: int, point: Point) -> None:
            status.update(f"round {number + 1} of {options.rounds}: {point}")

        rounds = sweep.run(options.rounds, begun)
    return Results(target.name, this_machine(), sweep.notes, rounds)


def _check_folder(path: str) -> None:
    """Rejects a folder that cannot be created or written, before the measurements."""
    folder = pathlib.Path(path).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CommandError(f"Expected a folder for --output. Received: {path!r}")


def _show(results: Results, folder: pathlib.Path, console: Console) -> None:
    from unison.benching import drawing

    folder.mkdir(parents=True, exist_ok=True)
    results.write(folder / "results.json")
    (folder / "report.html").write_text(drawing.html(results), "utf-8")
    console.print(_table(results))
    console.print(showing.about(results), *results.notes, sep="\n", markup=False, soft_wrap=True)
    written = [folder / "results.json", folder / "report.html"]
    try:
        drawing.write_png(results, folder / "scaling.png")
        written.append(folder / "scaling.png")
    except ImportError as error:
        console.print(error, markup=False)
    console.print("Written:", *map(str, written), markup=False, soft_wrap=True)


def _table(results: Results) -> Table:
    title = f"unison bench: {results.target}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    header, rows = showing.numbers(showing.summaries_of(results))
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _compare(arguments: list[str], no_color: bool) -> int:
    from unison.benching.comparing import NotComparableError, compare, differences

    options = _comparing_parser().parse_args(arguments)
    try:
        before, after = (Results.read(pathlib.Path(path)) for path in (options.a, options.b))
        found = compare(before, after, options.confidence, options.least)
    except (NoResultsError, NotComparableError) as error:
        raise CommandError(str(error)) from error
    console = Console(no_color=True if no_color or options.no_color else None, highlight=False)
    title = f"{after.target}: B compared with A"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for place, name in enumerate(("", "A /s", "B /s", "B / A", "between", "B is")):
        table.add_column(name, justify="right" if 0 < place < 5 else "left", no_wrap=place > 0)
    for each in found:
        colour = {"faster": "green", "slower": "red"}.get(each.verdict)
        low, high = each.interval
        table.add_row(
            str(each.point),
            f"{each.before:,.0f}",
            f"{each.after:,.0f}",
            f"{each.ratio:.3f}",
            f"{low:.3f} and {high:.3f}",
            each.verdict,
            style=colour,
        )
    console.print(table)
    for difference in differences(before, after):
        console.print(f"The runs differ: {difference}", markup=False, soft_wrap=True)
    is_slower = any(each.verdict == "slower" for each in found)
    return 1 if options.fail_if_slower and is_slower else 0


class _ComparingParser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)")


def _comparing_parser() -> argparse.ArgumentParser:
    parser = _ComparingParser(
        prog="unison bench compare",
        description="Says for each size that two runs of `unison bench` have measured whether the "
        "second one was faster, slower, or whether there is no difference beyond the noise from "
        "round to round.",
    )
    parser.add_argument(
        "--confidence",
        type=_between(0.5, 1),
        default=0.95,
        metavar="P",
        help="the probability that no size is said to differ that does not (default: 0.95)",
    )
    parser.add_argument(
        "--least",
        type=_between(0, 1),
        default=0.02,
        metavar="PART",
        help="differences that are smaller are none (default: 0.02)",
    )
    parser.add_argument(
        "--fail-if-slower", action="store_true", help="exit with 1 if the second is slower anywhere"
    )
    parser.add_argument("--no-color", action="store_true", help="print without colours")
    parser.add_argument("a", metavar="A.json", help="the results.json of the first run")
    parser.add_argument("b", metavar="B.json", help="that of the second")
    return parser


def _numbers(text: str) -> list[int]:
    return sorted({positive(part.strip()) for part in text.split(",")})


def _between(low: float, high: float) -> Any:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value < high:
            raise argparse.ArgumentTypeError(
                f"expected a number from {low:g} up to, not including, {high:g}; received {text!r}"
            )
        return value

    return number
