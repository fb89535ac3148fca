"""`unison plan`: compiles a step for devices that are not present, and shows its cost there."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from unison.cli import programs
from unison.cli.errors import CommandError
from unison.planning import (
    Calibration,
    DoesNotFitError,
    NothingToPlanError,
    calibrate,
    plan_first_step,
    read_calibration,
    target,
)
from unison.planning.gpu_compiler import GPUCompilerError
from unison.planning.memory import in_units
from unison.planning.page import (
    COMPILED_FOR_CPUS,
    SCALING,
    WAYS,
    batch_that_fits,
    plans_page,
    rows_of_scaling,
    rows_of_ways,
)
from unison.planning.step import described_target
from unison.program.control_flow import ControlFlowError
from unison.runtime.tpu.slices import MissingTPULibraryError
from unison.storage.temporary_folders import temporary_folder

#: The variable with the result file of a process that plans one of several targets.
_RESULT = "UNISON_PLAN_RESULT"


def add_command(commands: Any) -> None:
    """Adds `plan` to the subcommands of a parser."""
    parser = commands.add_parser(
        "plan",
        help="say what a program's step takes on devices that are not here",
        description="Runs a program up to its first step, whichever strategy it makes, compiles "
        "that step for a target, and shows the memory on each device, the arithmetic, the "
        "collectives, the step's time on 1 to all devices, and what would make it faster or "
        "smaller. Nothing is trained. TPU slices need libtpu (pip install 'unison[tpu]'); with "
        "XLA's GPU compiler (pip install 'unison[plan-gpu]'), the programs of GPUs are real ones.",
    )
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="NAME",
        help="a TPU slice (v5e:2x4), GPUs (h100:8, or h100:4x8: 4 machines of 8), or processes on "
        "CPUs such as this one (cpu:4, with --calibration); given several times, a column each",
    )
    parser.add_argument(
        "--network",
        metavar="LINK",
        help="what connects machines, such as ethernet-25g-tcp (default: what they mostly have; "
        "machines of CPUs have none)",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="measure this machine for some seconds, and write what it can do there",
    )
    parser.add_argument("--calibration", metavar="FILE", help="what --calibrate wrote")
    parser.add_argument("--json", metavar="FILE", help="write the plan there as well")
    parser.add_argument(
        "--hlo", metavar="FILE", help="write the compiled program there, as XLA's text"
    )
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page, with plots")
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="compile as for a run: takes up to 20 times as long, for some percent of memory",
    )
    programs.add_arguments(parser, is_optional=True)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    programs.choose_keras_backend()
    console = Console(no_color=True if options.no_color else None, highlight=False)
    for path in (options.calibrate, options.json, options.html, options.hlo):
        _check_can_be_written(path)
    if options.calibrate is not None:
        try:
            measured = calibrate()
        except TimeoutError as error:
            raise CommandError(f"The machine could not be measured: {error}") from error
        measured.write(options.calibrate)
        console.print(_measured(measured))
        if options.script is None:
            return 0
    if options.script is None:
        raise CommandError("Expected a program to plan. Received: none. See `unison plan -h`")
    if not options.module and not pathlib.Path(options.script).is_file():
        raise CommandError(f"Expected a program to plan. Received: {options.script!r}, no file")
    if not options.target:
        raise CommandError(
            "Expected --target, such as v5e:2x4 or h100:4x8. Received: none. See `unison plan -h`"
        )
    if options.hlo is not None and len(options.target) > 1:
        raise CommandError(
            f"Expected one --target with --hlo, which writes one program. Received: "
            f"{', '.join(options.target)}"
        )
    jax.config.update("jax_platforms", "cpu")
    try:
        calibration = _calibration(options)
        for name in options.target:
            described_target(name, options.network, calibration)
    except (MissingTPULibraryError, GPUCompilerError, ValueError) as error:
        raise CommandError(str(error)) from error
    if len(options.target) == 1:
        plans = [_plan(options)]
    else:
        plans = [_plan_in_a_process(name, options) for name in options.target]
    if _RESULT in os.environ:
        pathlib.Path(os.environ[_RESULT]).write_text(json.dumps(plans[0]))
        return 0
    if options.json is not None:
        told = plans[0] if len(plans) == 1 else plans
        pathlib.Path(options.json).write_text(json.dumps(told, indent=2) + "\n")
    if options.html is not None:
        pathlib.Path(options.html).write_text(plans_page(plans), "utf-8")
    console.print(_table(plans))
    for plan in plans:
        if "scaling" in plan:
            console.print(_table_of_scaling(plan))
            console.print(_table_of_ways(plan))
            for line in _lines_below(plan):
                console.print(line, soft_wrap=True)
    return 0


def _check_can_be_written(path: str | None) -> None:
    """Rejects a file that cannot be written, before the work whose result it is for."""
    if path is None:
        return
    file = pathlib.Path(path)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise CommandError(f"Expected a file that can be written. Received: {path!r}")


def _calibration(options: argparse.Namespace) -> Calibration | None:
    path = options.calibration or options.calibrate
    return None if path is None else read_calibration(path)


def _measured(measured: Calibration) -> str:
    device, link = measured.device, measured.link
    return (
        f"{measured.cores} cores, each {device.flops / 1e9:.0f} GFLOP/s and "
        f"{device.memory_rate / 1e9:.1f} GB/s; between processes {link.latency * 1e6:.0f} us a "
        f"message and {link.rate / 1e9:.2f} GB/s"
    )


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the program in this process, up to its first step."""
    os.environ.pop("TF_CONFIG", None)  # the plan includes the devices of all workers
    (name,) = options.target
    arguments, path = sys.argv, sys.path.copy()
    sys.argv = [options.script, *options.arguments]
    folder = pathlib.Path() if options.module else pathlib.Path(options.script).parent
    sys.path.insert(0, str(folder.resolve()))
    try:
        with target(name, options.network, _calibration(options)):
            plan = plan_first_step(lambda: _call(options), options.thorough)
            if options.hlo is not None:
                pathlib.Path(options.hlo).write_text(plan.hlo, "utf-8")
            return plan.as_dict()
    except (DoesNotFitError, NothingToPlanError, ControlFlowError) as error:
        raise CommandError(str(error)) from error
    finally:
        sys.argv, sys.path[:] = arguments, path


def _call(options: argparse.Namespace) -> None:
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _plan_in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the plan for one of several targets, computed in a fresh process."""
    with temporary_folder("plan") as folder:
        result = pathlib.Path(folder, "plan.json")
        command = [sys.executable, "-m", "unison", "plan", "--target", name]
        command += ["--thorough"] * options.thorough
        command += ["--network", options.network] * (options.network is not None)
        calibration = options.calibration or options.calibrate
        command += ["--calibration", calibration] * (calibration is not None)
        status = subprocess.run(
            [*command, *programs.program_of(options)],
            env=os.environ | {_RESULT: str(result)},
            check=False,
        ).returncode
        if not result.is_file():
            raise CommandError(f"The plan for {name} ended with status {status}; see above")
        return json.loads(result.read_text())


def _table(plans: list[dict[str, Any]]) -> Table:
    table = Table(title=plans[0]["step"], title_justify="left")
    table.add_column("on each device")
    for plan in plans:
        table.add_column(plan["target"], justify="right")
    rows = [_rows(plan) for plan in plans]
    longest = max(rows, key=len)  # its order of names is used
    for name in dict.fromkeys([*longest, *(name for of_plan in rows for name in of_plan)]):
        table.add_row(name, *(of_plan.get(name, "") for of_plan in rows))
    return table


def _rows(plan: dict[str, Any]) -> dict[str, str]:
    """Returns the rows of a plan's column."""
    memory = plan["memory"]
    rows = {
        "chips, replicas": f"{plan['num_chips']}, {plan['num_replicas']}",
        **{name.replace("_", " "): in_units(size) for name, size in memory["state"].items()},
        "batch": in_units(memory["batch"]),
        "temporaries": in_units(memory["temporaries"]),
        "  of them gradients": in_units(memory["temporaries"] - memory["activations"]),
        "  activations, buffers": in_units(memory["activations"]),
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
    if plan["hidden_share"] is not None:
        rows["  with kernels meanwhile"] = f"{plan['hidden_share']:.0%}"
    for name, seconds in plan["peak_seconds"].items():
        rows[f"{name} at peak rate"] = f"{seconds * 1e3:.3g} ms"
    if "scaling" in plan:
        whole = plan["scaling"][-1]
        rows["step, estimated"] = f"{whole['seconds'] * 1e3:.3g} ms"
        rows["efficiency, estimated"] = f"{whole['efficiency']:.0%}"
    rows["compiled in"] = f"{plan['compile_seconds']:.1f} s"
    return rows


def _table_of_scaling(plan: dict[str, Any]) -> Table:
    table = Table(title=f"{plan['target']}: estimated", title_justify="left")
    for name in SCALING:
        table.add_column(name, justify="right")
    for row in rows_of_scaling(plan):
        table.add_row(*row)
    return table


def _table_of_ways(plan: dict[str, Any]) -> Table:
    title = f"{plan['target']}: ways to run it (*: preferred; on the wire: not exact)"
    table = Table(title=title, title_justify="left")
    for name in WAYS[:-1]:
        table.add_column(name, justify="left" if name == "way" else "right")
    for *row, _ in rows_of_ways(plan):
        table.add_row(*row)
    return table


def _lines_below(plan: dict[str, Any]) -> Iterator[str]:
    for way in plan["choices"]:
        if way["name"] == plan["preferred"] and way["how"]:
            yield f"{way['name']}: {way['how']}"
    if plan["largest_batch"] is not None:
        yield batch_that_fits(plan)
    if plan["is_estimate"]:
        yield COMPILED_FOR_CPUS.format(plan["target"])
