"""The program that a command starts: how it is named there, and what Python is started with."""

from __future__ import annotations

import argparse


def add_arguments(
    parser: argparse.ArgumentParser,
    name: str = "script",
    metavar: str = "SCRIPT",
    help: str = "the program",
) -> None:
    """Adds the program, which ends the command's own arguments, and how its output looks.

    Args:
        parser: The command's.
        name: What the program is called among the options.
        metavar: What it is called in the help.
        help: What the help says of it.
    """
    parser.add_argument("--no-color", action="store_true", help="print without colours")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(name, metavar=metavar, help=help)
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's arguments"
    )


def script_of(options: argparse.Namespace) -> list[str]:
    """Returns what Python is started with, without the program's arguments.

    Examples:
        >>> script_of(argparse.Namespace(module=True, script="package.train"))
        ['-m', 'package.train']
    """
    return ["-m", options.script] if options.module else [options.script]


def program_of(options: argparse.Namespace) -> list[str]:
    """Returns what Python is started with."""
    return [*script_of(options), *options.arguments]
