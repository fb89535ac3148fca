"""The command line: `python -m benchmarks.gpu`, or `make gpu`."""

from __future__ import annotations

import argparse
import pathlib
import shutil
import signal
import sys
from collections.abc import Sequence

from benchmarks import machine
from benchmarks.gpu import page
from benchmarks.gpu.findings import Setting
from benchmarks.gpu.plan import CHECKS, SECONDS
from benchmarks.gpu.record import Record
from benchmarks.gpu.running import run_all
from benchmarks.workloads import DEVICES, REPLICAS
from unison.storage.atomic import replacing


def main(arguments: Sequence[str] | None = None) -> int:
    # Through `finally` blocks, so that no process stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = _parser()
    options = parser.parse_args(arguments)
    by_name = {check.name: check for check in CHECKS}
    names = options.checks.split(",") if options.checks else list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        parser.error(f"--checks knows {', '.join(by_name)}. Received: {', '.join(unknown)}")
    if options.seconds <= 0:
        parser.error(f"--seconds: expected a positive number. Received: {options.seconds}")
    if options.torch_python and not shutil.which(options.torch_python):
        parser.error(f"--torch-python: there is no program {options.torch_python}")
    record = Record(machine.description(), options.device)
    checks = [check for check in CHECKS if check.name in names]
    devices = REPLICAS if options.device == "cpu" else 1
    setting = Setting(options.device, devices, options.seconds, options.torch_python)
    try:
        run_all(checks, setting, record, lambda: record.write(options.json), _say)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if options.page:
            with replacing(str(options.page)) as file:
                file.write(page.html(record).encode())
    print(*filter(None, (options.json, options.page)), sep="\n")
    return record.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Checks numbers, jobs and speed on this machine's GPUs.",
        epilog=(
            "Exit status: 0 if all is as expected, 1 if a result is wrong, 2 if there is no "
            "device, 3 if a check has failed or was out of time. A check that was left out is "
            "named, and is not a failure."
        ),
    )
    add = parser.add_argument
    names = ", ".join(check.name for check in CHECKS)
    add("--device", choices=DEVICES, default="gpu", help="cpu: shows that the checks work")
    add("--checks", metavar="NAME,NAME", help=f"only these, of {names}")
    add("--seconds", type=float, default=SECONDS, help="for everything (%(default)s)")
    add("--torch-python", metavar="PATH", help="an interpreter that has PyTorch")
    add("--json", type=pathlib.Path, default=pathlib.Path("build/gpu.json"), metavar="PATH")
    add("--page", type=pathlib.Path, metavar="PATH", help="an HTML page of the results")
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
