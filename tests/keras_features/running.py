"""Runs features in one program, which prints their results."""

from __future__ import annotations

import contextlib
import importlib
import json
import pathlib
import sys
import traceback
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import unison
from keras_features import callbacks, loops, models, saving
from keras_features.program import DEVICES, FEATURES, Program
from keras_forms import scope_with_keras

#: The features of each program.
GROUPS = {
    module.__name__.rpartition(".")[2]: [
        name for name, function in FEATURES.items() if function.__module__ == module.__name__
    ]
    for module in (loops, callbacks, models, saving)
}


def results_of(
    names: Iterable[str],
    folder: pathlib.Path,
    scope: contextlib.AbstractContextManager[ModuleType],
    **more: Any,
) -> dict[str, Any]:
    """Runs features one after the other, behind the scope in which all of them are built.

    Args:
        names: Their names.
        folder: A folder for their files.
        scope: The first scope of the program, which gives Keras.
        more: The other fields of `Program`.
    """
    begun = {}
    with scope as keras:
        for name in names:
            (folder / name).mkdir()
            keras.utils.set_random_seed(0)
            begun[name] = FEATURES[name](Program(keras, folder / name, **more))
            next(begun[name])
    results = {}
    for name, rest in begun.items():
        try:
            next(rest)
        except StopIteration as end:
            results[name] = end.value
        except Exception:  # the result of this feature only
            results[name] = traceback.format_exc()
    return results


def main() -> None:
    """Runs a group of features on two replicas, in a program of a form; prints results as JSON."""
    form, group, folder = sys.argv[1:]
    devices = [f"CPU:{index}" for index in range(DEVICES)]
    strategy = unison.MirroredStrategy(devices[:2])
    results = results_of(
        GROUPS[group],
        pathlib.Path(folder),
        scope_with_keras(strategy, form),
        face=importlib.import_module({"keras": "unison", "tf": "unison.tf"}[form]),
        strategy=strategy,
        other=unison.MirroredStrategy(devices),
    )
    print(json.dumps(results))
