"""The program that a command starts: its options, and its command line."""

from __future__ import annotations

import argparse
import os
import pathlib

from unison.storage.decoding import parsed_json

#: The variable that selects Keras' backend.
KERAS_BACKEND = "KERAS_BACKEND"

#: The backend that Keras writes into its configuration when it is first imported.
_UNCHOSEN = "tensorflow"


def add_arguments(
    parser: argparse.ArgumentParser,
    name: str = "script",
    metavar: str = "SCRIPT",
    help: str = "the program",
    is_optional: bool = False,
) -> None:
    """Adds the program, which ends the command's own arguments, and the options for its output.

    Args:
        parser: The command's parser.
        name: The program's name among the options.
        metavar: Its name in the help.
        help: Its description in the help.
        is_optional: Whether the command may be given without it.
    """
    parser.add_argument("--no-color", action="store_true", help="print without colours")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(name, nargs="?" if is_optional else None, metavar=metavar, help=help)
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's arguments"
    )


def script_of(options: argparse.Namespace) -> list[str]:
    """Returns the arguments of Python, without the program's arguments.

    Examples:
        >>> script_of(argparse.Namespace(module=True, script="package.train"))
        ['-m', 'package.train']
    """
    return ["-m", options.script] if options.module else [options.script]


def program_of(options: argparse.Namespace) -> list[str]:
    """Returns the arguments of Python."""
    return [*script_of(options), *options.arguments]


def choose_keras_backend() -> None:
    """Makes the programs that this process starts run Keras on JAX, unless configured otherwise.

    The user can set `KERAS_BACKEND`, or a backend in Keras' configuration file that differs from
    the one that Keras writes there itself.
    """
    if not os.environ.get(KERAS_BACKEND) and _configured_backend() in (None, _UNCHOSEN):
        os.environ[KERAS_BACKEND] = "jax"


def _configured_backend() -> str | None:
    """Returns the backend in Keras' configuration file; None if there is none."""
    folder = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    try:
        configured = parsed_json(pathlib.Path(folder, "keras.json").read_bytes())
        return str(configured["backend"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
