"""`unison top`: shows the state of a running job in the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unison.cli.errors import CommandError
from unison.cli.programs import program_of
from unison.monitoring import grafana, otlp
from unison.monitoring.first_worker import VARIABLE
from unison.monitoring.launcher import Monitored
from unison.monitoring.metrics_endpoint import TOKEN_VARIABLE, place_of
from unison.monitoring.metrics_endpoint import VARIABLE as METRICS_VARIABLE
from unison.monitoring.otlp import VARIABLE as OPENTELEMETRY_VARIABLE
from unison.monitoring.progress import facts_of, workers_running
from unison.monitoring.running_jobs import RunningJob, running_jobs
from unison.net.runtime_folder import runtime_folder
from unison.planning.memory import in_units

#: Seconds between two requests, and the timeout of one.
_EVERY = 1.0
_PATIENCE = 5.0

#: The width in which all columns are shown, and those that are left out if it is narrower.
_WIDE = 110
_LEFT_OUT = ("90%", "sent", "on devices")

#: The number of the latest events that are shown, and the width of a curve.
_EVENTS = 6
_WIDTH = 48

#: The heights of a curve's columns, from the lowest.
_COLUMNS = "▁▂▃▄▅▆▇█"


def add_command(commands: Any) -> None:
    """Adds `top` to the subcommands of a parser."""
    parser = commands.add_parser(
        "top",
        help="watch a running job",
        description="Shows what the workers of a job do that this machine has started, or whose "
        f"first worker runs here with {VARIABLE}=1: steps, examples/s, the times of steps, who "
        "keeps the others waiting and why, memory, and the loss. Ctrl-C ends the showing, and not "
        "the job.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="the number of the process that runs it, or its URL (default: the only job of this "
        "user)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="show it once, and end")
    how.add_argument("--json", action="store_true", help="print what is known as JSON, and end")
    how.add_argument("--web", action="store_true", help="print the URL of its page, and end")
    how.add_argument(
        "--grafana", action="store_true", help="print a dashboard of jobs' metrics for Grafana"
    )
    how.add_argument(
        "--alerts", action="store_true", help="print rules for alerts about them for Prometheus"
    )
    parser.add_argument("--no-color", action="store_true", help="print without colours")
    parser.set_defaults(run=_run)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option to `unison run` that disables monitoring."""
    parser.add_argument(
        "--no-monitor", action="store_true", help="do not let `unison top` watch the job"
    )
    parser.add_argument(
        "--metrics-address",
        metavar="HOST:PORT",
        help="serve the job's metrics there, for Prometheus on any machine; the token that it "
        f"sends is in {TOKEN_VARIABLE} (default: {METRICS_VARIABLE})",
    )
    parser.add_argument(
        "--opentelemetry",
        action="store_true",
        help="send the job's metrics to OpenTelemetry, where its variables (OTEL_*) say (default: "
        f"{OPENTELEMETRY_VARIABLE}=1)",
    )


def monitored(options: argparse.Namespace, kind: str, workers: list[str]) -> Monitored:
    """Returns the monitoring of the job that `unison run` is about to start."""
    if options.no_monitor:
        os.environ.pop(VARIABLE, None)  # else its first worker would serve it
    try:
        metrics = place_of(options.metrics_address)
        is_exported = otlp.is_asked(options.opentelemetry)
        for variable in (METRICS_VARIABLE, OPENTELEMETRY_VARIABLE):
            os.environ.pop(variable, None)  # else the first worker would serve them, too
        program = shlex.join(program_of(options))
        return Monitored(program, kind, workers, not options.no_monitor, metrics, is_exported)
    except (ImportError, ValueError) as error:
        raise CommandError(str(error)) from error


def _run(options: argparse.Namespace) -> int:
    if options.grafana or options.alerts:
        print(json.dumps(grafana.dashboard(), indent=2) if options.grafana else grafana.ALERTS)
        return 0
    place = _placed(options.job)
    if options.web:
        _state(place)  # checks that it runs, and accepts the token
        print(f"http://{place.address}/?token={place.token}")
        return 0
    console = Console(no_color=options.no_color or None, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    if options.json:
        print(json.dumps(_state(place)))
    elif options.once:
        console.print(_shown(_state(place), console.width))
    else:
        try:
            return _watch(place, console)
        except KeyboardInterrupt:
            pass
    return 0


class _Place(NamedTuple):
    """The address of a job's monitoring.

    Attributes:
        address: Its address, as host:port.
        token: The secret for access to it.
    """

    address: str
    token: str


def _placed(job: str | None) -> _Place:
    """Returns the address of a job's monitoring.

    Raises:
        CommandError: There is no job, or there are several and none is specified.
    """
    if job is not None and "://" in job:
        url = urllib.parse.urlsplit(job)
        token = urllib.parse.parse_qs(url.query).get("token")
        if url.scheme != "http" or not url.netloc or token is None:
            raise CommandError(
                "Expected a URL as `unison top --web` prints it: http://127.0.0.1:PORT/?token=... "
                f"Received: {job!r}"
            )
        return _Place(url.netloc, token[0])
    try:
        known = running_jobs()
    except OSError as error:
        raise CommandError(f"Cannot look for running jobs: {error}") from error
    wanted = known if job is None else [each for each in known if str(each.process) == job]
    if len(wanted) == 1:
        return _Place(wanted[0].address, wanted[0].token)
    if not known:
        raise CommandError(
            "No job of this user can be watched here (there is none in "
            f"{runtime_folder()}): none of `unison run` or launch(..., monitor=True), and no first "
            f"worker with {VARIABLE}=1. Elsewhere: pass the "
            "URL that `unison top --web` prints there."
        )
    several = "Several jobs run" if job is None else f"There is no job {job!r}"
    raise CommandError(f"{several}: pass the number of one, {_listed(known)}.")


def _listed(jobs: list[RunningJob]) -> str:
    return ", ".join(f"{job.process} ({job.program})" for job in jobs)


def _state(place: _Place) -> dict[str, Any]:
    """Requests the state of a job.

    Raises:
        CommandError: The job does not answer, or rejects the token.
    """
    try:
        connection = http.client.HTTPConnection(place.address, timeout=_PATIENCE)
        try:
            connection.request(
                "GET", "/state.json", headers={"Authorization": f"Bearer {place.token}"}
            )
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise _GoneError(
            f"Nobody answers at {place.address}: {error}. The job has "
            "ended, or runs on another machine: then forward its port (ssh -L)."
        ) from error
    if answer.status == 403:
        raise CommandError(
            f"The job at {place.address} does not let this token see it: "
            f"{body.decode(errors='replace').strip()} Give the whole URL."
        )
    if answer.status != 200:
        raise CommandError(f"No Unison job answers at {place.address}: status {answer.status}.")
    try:
        state: dict[str, Any] = json.loads(body)
        if "workers" not in state:
            raise ValueError("there are no workers")
    except (ValueError, TypeError) as error:
        raise CommandError(f"No Unison job answers at {place.address}: {error}.") from error
    return state


class _GoneError(CommandError):
    """The job does not answer."""


def _watch(place: _Place, console: Console) -> int:
    """Shows the state of a job until it has ended."""
    state = _state(place)
    with Live(_shown(state, console.width), console=console, auto_refresh=False) as live:
        while state["ended"] is None:
            time.sleep(_EVERY)
            try:
                state = _state(place)
            except _GoneError:
                state = {**state, "ended": "nothing reports about it any more"}
            live.update(_shown(state, console.width), refresh=True)
    return 0


def _shown(state: Mapping[str, Any], width: int) -> RenderableType:
    """Returns the view of a job's state for a terminal of this width."""
    about = f"{workers_running(state)}, {_seconds(state['seconds'])}"
    if state["ended"] is not None:
        about = f"The job has ended: {state['ended']}"
    parts: list[RenderableType] = [
        Text.assemble((state["program"], "bold"), "\n", about),
        Text(", ".join(facts_of(state))),
        _workers(state["workers"], width),
    ]
    parts += [Text(straggler, style="yellow") for straggler in state["stragglers"]]
    for name, points in (("loss", state["losses"]), ("examples/s", state["rates"])):
        if len(points) > 1:
            parts.append(Text(f"{name:>10} {_curve([value for _, value in points])}"))
    for event in state["events"][-_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        parts.append(Text(f"{at} {event['text']}", style="dim"))
    return Group(*parts)


def _workers(workers: list[Mapping[str, Any]], width: int) -> Table:
    """Returns the table of workers, without columns of unknown values."""
    cells: dict[str, list[str]] = {}
    for worker in workers:
        times, phases = worker["step_seconds"] or {}, worker["phases"] or {}
        row = {
            "worker": worker["name"],
            "": worker["state"],
            "step": str(worker["step"]),
            "median": _seconds(times.get("p50")),
            "90%": _seconds(times.get("p90")),
            "99%": _seconds(times.get("p99")),
            "input": _share(phases.get("input")),
            "others": _share(phases.get("others")),
            "sent": _size(worker["sent_bytes"]),
            "memory": _size(worker["memory_bytes"]),
            "on devices": _size(worker["device_bytes"]),
        }
        for name, cell in row.items():
            cells.setdefault(name, []).append(cell)
    table = Table(box=None, pad_edge=False, header_style="dim")
    left_out = _LEFT_OUT if width < _WIDE else ()
    known = {n: column for n, column in cells.items() if any(column) and n not in left_out}
    for name in known:
        is_word = name in ("worker", "")
        table.add_column(name, justify="left" if is_word else "right", no_wrap=True)
    for worker, *row in zip(workers, *known.values(), strict=True):
        is_away = worker["state"] not in ("running", "ended")
        table.add_row(*row, style="yellow" if worker["straggles"] else "dim" if is_away else None)
    return table


def _curve(values: list[float]) -> str:
    """Returns a one-line curve, followed by its last value.

    Examples:
        >>> _curve([4.0, 3.0, 2.0, 1.0])
        '█▅▃▁ 1'
    """
    if len(values) > _WIDTH:
        values = [values[round(i * (len(values) - 1) / (_WIDTH - 1))] for i in range(_WIDTH)]
    low, high = min(values), max(values)
    steps = (len(_COLUMNS) - 1) / (high - low or 1.0)
    columns = "".join(_COLUMNS[int((value - low) * steps)] for value in values)
    return f"{columns} {values[-1]:.4g}"


def _seconds(value: float | None) -> str:
    """Formats a time.

    Examples:
        >>> [_seconds(value) for value in (None, 0.00025, 0.0123, 2.5, 100.0)]
        ['', '250 µs', '12.3 ms', '2.50 s', '100 s']
    """
    if value is None:
        return ""
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _size(value: int | None) -> str:
    return "" if value is None else in_units(value)
