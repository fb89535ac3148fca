"""Runs the commands of the Dockerfile where there is no Docker: `python -m release.dockerfile`.

Each stage becomes a folder with an environment of its own: files are copied there, absolute paths
of the commands lie there, and `python` is a fresh one of the image's version. So every command is
executed and every file that it needs must be there; what the images themselves hold, such as their
C++ compiler, is taken from this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import NamedTuple

from release.constraints import ROOT
from release.interpreters import UV, interpreter

_KNOWN = ("ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR")

# An absolute path at the beginning of a word, or after what a shell may have before one.
_ABSOLUTE = re.compile(r"(?<![\w./$}*])/(?=\w)")


class Instruction(NamedTuple):
    """One instruction, `RUN echo` being `Instruction("RUN", "echo")`."""

    name: str
    text: str


def instructions(dockerfile: str) -> list[Instruction]:
    r"""Returns the instructions of a Dockerfile.

    Raises:
        ValueError: One is not among those that are executed here.

    Examples:
        >>> instructions("# An image.\nFROM python:3.13\nRUN echo \\\n  a\n")
        [Instruction(name='FROM', text='python:3.13'), Instruction(name='RUN', text='echo a')]
    """
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]
    for each in found:
        if each.name not in _KNOWN:
            raise ValueError(f"Expected one of {', '.join(_KNOWN)}. Received: {each.name}.")
    return found


@dataclass
class Stage:
    """A stage: the folder that stands for `/`, and what its commands see."""

    root: pathlib.Path
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"

    def inside(self, path: str) -> pathlib.Path:
        """Where a path of the image is on this machine."""
        return self.root / os.path.join(self.folder, path).lstrip("/")

    def run(self, command: list[str] | str) -> None:
        """Runs a command as the image would.

        Raises:
            subprocess.CalledProcessError: It failed, and has said why.
        """
        if isinstance(command, str):
            command = ["sh", "-c", _ABSOLUTE.sub(f"{self.root}/", command)]
        binaries = self.root / "environment" / "bin"
        variables = {
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            **{name: os.environ[name] for name in _OF_THE_MACHINE if name in os.environ},
            **{name: _ABSOLUTE.sub(f"{self.root}/", text) for name, text in self.variables.items()},
        }
        print(f"+ {shlex.join(command)}", flush=True)
        folder = self.inside(".")
        executable = shutil.which(command[0], path=variables["PATH"]) or command[0]
        subprocess.run(
            [executable, *command[1:]], cwd=folder, env=variables, check=True, timeout=3600
        )


#: How this machine reaches the package index, and where its temporary files are.
_OF_THE_MACHINE = tuple(
    name
    for name in os.environ
    if name.startswith(("PIP_", "UV_")) or name.upper().endswith("_PROXY") or name == "TMPDIR"
)


def execute(dockerfile: str, context: pathlib.Path, arguments: Mapping[str, str]) -> None:
    """Executes all instructions of a Dockerfile, and the command of the image, in new folders.

    Args:
        dockerfile: Its text.
        context: The folder from which files are copied, as `.dockerignore` there allows.
        arguments: Build arguments.

    Raises:
        ValueError: An argument, a Python or a file is not there, or an instruction is unknown.
        subprocess.CalledProcessError: A command failed, and has said why.
    """
    arguments = dict(arguments)
    unknown = set(arguments) - {
        each.text.partition("=")[0] for each in instructions(dockerfile) if each.name == "ARG"
    }
    if unknown:
        raise ValueError(f"The Dockerfile has no ARG {', '.join(sorted(unknown))}.")
    with tempfile.TemporaryDirectory() as folder:
        stages: dict[str, Stage] = {}
        stage: Stage | None = None
        for name, text in instructions(dockerfile):
            if name == "ARG":
                key, _, default = text.partition("=")
                arguments.setdefault(key, default)
                if stage is not None:
                    stage.variables[key] = arguments[key]
                continue
            if name == "FROM":
                image, _, label = _filled(text, arguments).partition(" AS ")
                stage = Stage(pathlib.Path(folder, label or "image"))
                stages[label or "image"] = stage
                _start(stage, image)
                continue
            assert stage is not None, "a Dockerfile begins with ARG and FROM"
            if name == "RUN":
                stage.run(text)
            elif name == "ENV":
                key, _, value = text.partition("=")
                stage.variables[key] = value
            elif name == "WORKDIR":
                stage.folder = text
                stage.inside(".").mkdir(parents=True, exist_ok=True)
            elif name == "COPY":
                _copy(stage, stages, context, shlex.split(_filled(text, arguments)))
            elif name == "CMD":
                stage.run(json.loads(text))


def _filled(text: str, arguments: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda name: arguments[name[1]], text)


def _start(stage: Stage, image: str) -> None:
    """Makes the environment of a stage that begins with an image of Python."""
    found = re.fullmatch(r"python:(\d+\.\d+)(-slim)?", image)
    if found is None:
        raise ValueError(f"Expected FROM python:VERSION or python:VERSION-slim. Received: {image}.")
    python = interpreter(found[1])
    if python is None:
        raise ValueError(f"There is no Python {found[1]} on this machine.")
    environment = str(stage.root / "environment")
    command = [*UV, "venv", "--quiet", "--seed", "--python", python, environment]
    subprocess.run(command, check=True)


def _copy(
    stage: Stage, stages: Mapping[str, Stage], context: pathlib.Path, words: list[str]
) -> None:
    """Executes `COPY [--from=STAGE] SOURCE TARGET`."""
    origin = words.pop(0).partition("=")[2] if words[0].startswith("--from=") else None
    source, target = words
    into = stage.inside(target)
    if origin is not None:
        shutil.copytree(stages[origin].inside(source), into, dirs_exist_ok=True)
        return
    files = [path for path in sent(context) if path.is_relative_to(source)]
    if not files:
        raise ValueError(f"COPY {source}: there is no such file, or .dockerignore leaves it out.")
    for path in files:
        place = into / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(context / path, place)


def sent(context: pathlib.Path) -> Iterator[pathlib.Path]:
    """The files of a folder that Docker would get: those that `.dockerignore` does not leave out.

    Of its language, `*`, names, `**/` before a name, and `!` are understood, as Docker does: the
    last line that a file or one of its folders matches decides.
    """
    lines = (context / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    for folder, folders, names in os.walk(context):
        folders[:] = sorted(set(folders) - {".git", ".venv"})
        for name in sorted(names):
            path = pathlib.Path(folder, name).relative_to(context)
            if not _is_left_out(path, patterns):
                yield path


def _is_left_out(path: pathlib.Path, patterns: list[str]) -> bool:
    is_left_out = False
    for pattern in patterns:
        words = pattern.removeprefix("!")
        if words.startswith("**/"):
            matches = any(fnmatch(part, words[3:]) for part in path.parts)
        else:
            depth = words.count("/") + 1
            matches = fnmatch("/".join(path.parts[:depth]), words)
        if matches:
            is_left_out = not pattern.startswith("!")
    return is_left_out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m release.dockerfile", description=__doc__)
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build has"
    )
    asked = parser.parse_args()
    arguments = dict(each.split("=", 1) for each in asked.build_arg)
    try:
        execute((ROOT / "Dockerfile").read_text(), ROOT, arguments)
    except (ValueError, subprocess.SubprocessError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
