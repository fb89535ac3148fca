"""The `unison` command. Each subcommand has a file with its arguments and its implementation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import unison
from unison.cli import bench, data_service, demo, plan, run, top
from unison.cli.errors import CommandError
from unison.runtime import logs

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
        arguments: The arguments after `unison` on the command line. Default: this process's
            arguments.

    Returns:
        0; 2 if the request cannot be fulfilled; or the program's exit status from `run`.

    Raises:
        SystemExit: After `--help`, `--version` and arguments that cannot be parsed.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    try:
        _show_messages()
        return options.run(options) or 0
    except CommandError as error:
        message = " ".join(str(error).split())  # errors of other origin may have several lines
        print(f"{parser.prog} {options.command}: {message}", file=sys.stderr)
        return 2


def _show_messages() -> None:
    try:
        logs.show_what_is_asked_for()
    except ValueError as error:
        raise CommandError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="unison", description="Distributed training on JAX.")
    parser.add_argument("--version", action="version", version=f"unison {unison.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    bench.add_command(commands)
    data_service.add_command(commands)
    demo.add_command(commands)
    plan.add_command(commands)
    run.add_command(commands)
    top.add_command(commands)
    return parser
