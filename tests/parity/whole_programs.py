"""Loads and runs the whole programs of `tests/programs`, with TensorFlow or with `unison.tf`.

    python -m parity.whole_programs MODULE [NAME ...]

prints what they return, with MODULE where they import `unison.tf`, on one device, or on the two
replicas of a MirroredStrategy for those that say so. TensorFlow's Python runs this file, so it
imports nothing but NumPy.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import re
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from parity.answers import plain, use_logical_devices

ROOM = pathlib.Path(__file__).parents[1] / "programs"
_OURS = "unison.tf"
_IMPORT = re.compile(rf"^(import|from) {re.escape(_OURS)}\b", re.MULTILINE)
#: The losses and weights of a training may differ by this, relatively: round-off grows over steps.
GROWN_ROUND_OFF = 5e-4


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of `tests/programs`.

    Attributes:
        name: The name of its file.
        title: The first line of its docstring.
        task: Which of the tasks of Keras' examples it solves.
        train: Called with a strategy and, if other than by default, a number of epochs; returns
            numbers.
        tolerance: How much the numbers may differ from TensorFlow's, relatively.
        replicas: With which of TensorFlow's trainings it is compared: on one device, or, where the
            replicas are meant to give something else, on two replicas.
        because: Why, and why `tolerance` is not `GROWN_ROUND_OFF`.
        chance: What is drawn by chance, so that properties of the training are compared; else "".
    """

    name: str
    title: str
    task: str
    train: Callable[..., dict[str, Any]]
    tolerance: float
    replicas: int
    because: str
    chance: str


def names() -> list[str]:
    """The names of the programs."""
    return sorted(path.stem for path in ROOM.glob("*.py") if path.stem != "__init__")


def load(name: str, module: str = _OURS) -> Program:
    """Loads a program with `module` in the place of `unison.tf`."""
    path = ROOM / f"{name}.py"
    source, replaced = _IMPORT.subn(rf"\1 {module}", path.read_text())
    if not replaced:
        raise ValueError(f"{path} does not import {_OURS}")
    loaded = types.ModuleType(f"programs.{name}")
    loaded.__file__ = str(path)
    sys.modules[loaded.__name__] = loaded  # where Keras and pickle look for its classes
    exec(compile(source, path, "exec"), vars(loaded))
    given = {
        "tolerance": getattr(loaded, "TOLERANCE", GROWN_ROUND_OFF),
        "replicas": getattr(loaded, "REPLICAS", 1),
        "because": getattr(loaded, "BECAUSE", ""),
        "chance": getattr(loaded, "CHANCE", ""),
    }
    if not given["because"] and (given["tolerance"], given["replicas"]) != (GROWN_ROUND_OFF, 1):
        raise ValueError(f"BECAUSE of {path} must say why it is compared in its own way")
    title = (loaded.__doc__ or "").partition("\n")[0].rstrip(".")
    return Program(name, title, loaded.TASK, loaded.train, **given)


def strategy_of(tf: Any, replicas: int) -> Any:
    """The default strategy, or one on that many logical CPU devices."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def numbers(tf: Any, program: Program, strategy: Any) -> Any:
    """Trains a program by default; returns what it returns, as plain data."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(1)
    return plain(program.train(strategy))


def main(module: str, *chosen: str) -> None:
    tf = importlib.import_module(module)
    use_logical_devices(tf)
    # One of each: TensorFlow's collectives take those of another for their own.
    strategies = {replicas: strategy_of(tf, replicas) for replicas in (1, 2)}
    for name in chosen or names():
        program = load(name, module)
        begin = time.perf_counter()
        answer: dict[str, Any] = {"name": name}
        try:
            answer["numbers"] = numbers(tf, program, strategies[program.replicas])
        except Exception as error:
            traceback.print_exc()
            answer["failed"] = f"{type(error).__name__}: {error}"
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        print(json.dumps(answer), flush=True)
    print(json.dumps({"tensorflow": tf.__version__, "keras": tf.keras.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
