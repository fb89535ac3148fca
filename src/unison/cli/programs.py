"""The program that a command starts: how it is named there, and what it is started with."""

from __future__ import annotations

import argparse
import os
import pathlib

from unison.storage.decoding import parsed_json

#: The variable that names the backend of Keras.
KERAS_BACKEND = "KERAS_BACKEND"

#: The backend that Keras writes into its configuration by itself, when it is first imported.
_UNCHOSEN = "tensorflow"


def add_arguments(
    parser: argparse.ArgumentParser,
    name: str = "script",
    metavar: str = "SCRIPT",
    help: str = "the program",
    is_optional: bool = False,
) -> None:
    """Adds the program, which ends the command's own arguments, and how its output looks.

    Args:
        parser: The command's.
        name: What the program is called among the options.
        metavar: What it is called in the help.
        help: What the help says of it.
        is_optional: Whether the command may be given without it.
    """
    parser.add_argument("--no-color", action="store_true", help="print without colours")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(name, nargs="?" if is_optional else None, metavar=metavar, help=help)
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


def choose_keras_backend() -> None:
    """Has the programs that this process starts run Keras on JAX, unless the user says otherwise.

    The user does by `KERAS_BACKEND`, or by another backend in Keras' configuration file than the
    one that stands there without anybody's doing.
    """
    if not os.environ.get(KERAS_BACKEND) and _configured_backend() in (None, _UNCHOSEN):
        os.environ[KERAS_BACKEND] = "jax"


def _configured_backend() -> str | None:
    """Returns the backend that Keras' configuration file names; None if it names none."""
    folder = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    try:
        configured = parsed_json(pathlib.Path(folder, "keras.json").read_bytes())
        return str(configured["backend"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
