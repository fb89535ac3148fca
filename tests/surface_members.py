"""The public members of TensorFlow's classes.

`surface_members.txt` lists them, one class a line, so that the tests need no TensorFlow; of a class
below another one, those that it adds. To record them again, run this file in an environment that
has it: `python surface_members.py tensorflow`.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MEMBERS = Path(__file__).with_suffix(".txt")
NAMES = Path(__file__).parents[1] / "src" / "unison" / "tf" / "names.txt"

#: Modules with classes of other libraries (NumPy, Keras), or that Unison does not have.
ELSEWHERE = (
    *("tf.compat", "tf.experimental.dtensor", "tf.experimental.numpy", "tf.initializers"),
    *("tf.keras", "tf.linalg", "tf.lite", "tf.losses", "tf.metrics", "tf.nn", "tf.optimizers"),
    *("tf.quantization", "tf.queue", "tf.raw_ops", "tf.test", "tf.tpu.experimental.embedding"),
    "tf.types",
)


def recorded() -> dict[str, list[str]]:
    """The public members that each class adds to those of its bases, by its shortest name."""
    lines = (line.split(": ", 1) for line in MEMBERS.read_text("utf-8").splitlines())
    return {path: names.split() for path, names in lines}


def found(path: str, tf: Any) -> Any:
    """The object of a dotted name; None if a part of it does not exist."""
    value = tf
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
    return value


def _classes(tf: Any) -> Iterator[tuple[str, type]]:
    for line in NAMES.read_text("utf-8").splitlines():
        module, names = line.split(": ", 1)
        if not module.startswith(ELSEWHERE):
            for name in names.split():
                value = found(f"{module}.{name}", tf)
                if inspect.isclass(value):
                    yield f"{module}.{name}", value


def record(module: str) -> None:
    """Writes the members of the classes of `module` into the file."""
    paths: dict[type, str] = {}
    for path, value in sorted(_classes(importlib.import_module(module)), key=_length_and_name):
        paths.setdefault(value, path)
    lines = []
    for value, path in paths.items():
        bases = [b for b in value.__mro__[1:] if b in paths or b.__module__ == builtins.__name__]
        added = {*dir(value)}.difference(*map(dir, bases))
        names = sorted(name for name in added if not name.startswith("_"))
        if names:
            lines.append(f"{path}: {' '.join(names)}")
    MEMBERS.write_text("\n".join(sorted(lines)) + "\n", "utf-8")


def _length_and_name(pair: tuple[str, type]) -> tuple[int, str]:
    return len(pair[0]), pair[0]


if __name__ == "__main__":
    record(sys.argv[1])
