"""`unison plan`: compiles a program's step for a TPU that is not here, and says what it takes."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from unison.cli.errors import CommandError
from unison.planning import DoesNotFitError, NothingToPlanError, plan_first_step
from unison.planning.memory import in_units
from unison.runtime import devices
from unison.runtime.tpu.slices import MissingTPULibraryError, UnknownSliceError, describe_slice

#: Told to the process that plans one of several targets: where to write what it finds.
_RESULT = "UNISON_PLAN_RESULT"


def add_command(commands: Any) -> None:
    """Adds `plan` to the subcommands of a parser."""
    parser = commands.add_parser(
        "plan",
        help="say what a program's step takes on a TPU, without one",
        description="Runs a program up to its first step, whichever strategy it makes, compiles "
        "that step for a TPU slice with libtpu (pip install 'unison[tpu]'), and shows the memory "
        "on each device, the arithmetic, and the collectives. Nothing is trained.",
    )
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="SLICE",
        help="a TPU slice, such as v5e:2x4; given several times, a column each",
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan there as well")
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="compile as for a run: takes up to 20 times as long, for some percent of memory",
    )
    parser.add_argument("--no-color", action="store_true", help="print without colours")
    parser.add_argument("script", metavar="SCRIPT", help="the program")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's arguments"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if not pathlib.Path(options.script).is_file():
        raise CommandError(f"Expected a program to plan. Received: {options.script!r}, no file")
    try:
        for target in options.target:
            describe_slice(target)
    except (UnknownSliceError, MissingTPULibraryError) as error:
        raise CommandError(str(error)) from error
    if len(options.target) == 1:
        plans = [_plan(options)]
    else:
        plans = [_plan_in_a_process(target, options) for target in options.target]
    if options.json is not None:
        told = plans[0] if len(plans) == 1 else plans
        pathlib.Path(options.json).write_text(json.dumps(told, indent=2) + "\n")
    if _RESULT in os.environ:
        pathlib.Path(os.environ[_RESULT]).write_text(json.dumps(plans[0]))
    else:
        Console(no_color=options.no_color, highlight=False).print(_table(plans))
    return 0


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the program in this process, up to its first step."""
    os.environ.pop("TF_CONFIG", None)  # the plan's devices are those of all workers
    os.environ.setdefault("KERAS_BACKEND", "jax")
    jax.config.update("jax_platforms", "cpu")
    (target,) = options.target
    arguments, path = sys.argv, sys.path.copy()
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(pathlib.Path(options.script).resolve().parent))
    try:
        with devices.planned_for(describe_slice(target).devices):
            return plan_first_step(lambda: _call(options.script), options.thorough).as_dict()
    except (DoesNotFitError, NothingToPlanError) as error:
        raise CommandError(str(error)) from error
    finally:
        sys.argv, sys.path[:] = arguments, path


def _call(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _plan_in_a_process(target: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the plan for one of several targets: each starts from a fresh program."""
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "plan.json")
        command = [sys.executable, "-m", "unison", "plan", "--target", target]
        command += ["--thorough"] * options.thorough
        status = subprocess.run(
            [*command, options.script, *options.arguments],
            env=os.environ | {_RESULT: str(result)},
            check=False,
        ).returncode
        if not result.is_file():
            raise CommandError(f"The plan for {target} ended with status {status}; see above")
        return json.loads(result.read_text())


def _table(plans: list[dict[str, Any]]) -> Table:
    table = Table(title=plans[0]["step"], title_justify="left")
    table.add_column("on each device")
    for plan in plans:
        table.add_column(plan["target"], justify="right")
    rows = [_rows(plan) for plan in plans]
    longest = max(rows, key=len)  # the others have no names between
    for name in dict.fromkeys([*longest, *(name for of_plan in rows for name in of_plan)]):
        table.add_row(name, *(of_plan.get(name, "") for of_plan in rows))
    return table


def _rows(plan: dict[str, Any]) -> dict[str, str]:
    """Returns the lines of a plan's column."""
    memory = plan["memory"]
    rows = {
        "chips, replicas": f"{plan['num_chips']}, {plan['num_replicas']}",
        **{name.replace("_", " "): in_units(size) for name, size in memory["state"].items()},
        "batch": in_units(memory["batch"]),
        "temporaries": in_units(memory["temporaries"]),
        "  of them gradients": in_units(memory["gradients"]),
        "program": in_units(memory["code"]),
        "memory": in_units(memory["total"]),
        "floating-point operations": f"{plan['flops']:.3g}",
        "bytes read and written": in_units(plan["bytes_accessed"]),
    }
    for one in plan["collectives"]:
        told = f"{one['runs']} × {in_units(one['bytes'])}"
        before = rows.get(one["kind"])
        rows[one["kind"]] = told if before is None else f"{before}, {told}"
    rows["sent to others"] = in_units(sum(one["sent_bytes"] for one in plan["collectives"]))
    for name, seconds in plan["peak_seconds"].items():
        rows[f"{name} at peak rate"] = f"{seconds * 1e3:.3g} ms"
    rows["compiled in"] = f"{plan['compile_seconds']:.1f} s"
    return rows
