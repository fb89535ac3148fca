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
from keras_features import callbacks, loops, models, saving, servers
from keras_features.program import DEVICES, FEATURES, Program
from keras_forms import scope_with_keras
from parameter_server_threads import clusters


def _features_of(module: ModuleType) -> list[str]:
    return [name for name, each in FEATURES.items() if each.__module__ == module.__name__]


#: The features of each program on replicas.
GROUPS = {
    module.__name__.rpartition(".")[2]: _features_of(module)
    for module in (loops, callbacks, models, saving)
}
#: Those that parameter servers have, too, of which `make soak` runs all.
ON_SERVERS = [*_features_of(servers), "a_step_of_ones_own", "class_weights"]
#: Those that they do not have.
NOT_ON_SERVERS = {
    "backups": "an epoch that was interrupted begins again, with the weights that it had reached",
    "callbacks_that_lead_the_training": "the losses of batches are not there while workers train",
    "generators": "workers' datasets are to have no end",
    # Arrays are repeated, so that no batch is shorter.
    **dict.fromkeys(
        ("fit_evaluate_and_predict", "sample_weights", "metrics_of_a_loss_of_ones_own"),
        "the last batch of an epoch is filled with rows of the next one",
    ),
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


def main_on_servers() -> None:
    """Runs features on parameter servers, in a program of a form; prints results as JSON."""
    form, folder, *names = sys.argv[1:]
    with clusters() as start:
        strategy, _ = start(servers=2)
        results = results_of(
            names,
            pathlib.Path(folder),
            scope_with_keras(strategy, form),
            face=_face(form),
            strategy=strategy,
            other=unison.OneDeviceStrategy("CPU:0"),
        )
    print(json.dumps(results))


def _face(form: str) -> ModuleType:
    return importlib.import_module({"keras": "unison", "tf": "unison.tf"}[form])


def main() -> None:
    """Runs a group of features on two replicas, in a program of a form; prints results as JSON."""
    form, group, folder = sys.argv[1:]
    devices = [f"CPU:{index}" for index in range(DEVICES)]
    strategy = unison.MirroredStrategy(devices[:2])
    results = results_of(
        GROUPS[group],
        pathlib.Path(folder),
        scope_with_keras(strategy, form),
        face=_face(form),
        strategy=strategy,
        other=unison.MirroredStrategy(devices),
    )
    print(json.dumps(results))
