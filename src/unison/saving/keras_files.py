"""Keras' files of models with a strategy: they are written atomically, by one of several workers.

`model.save`, `save_weights` and `ModelCheckpoint` all call a few functions of Keras. For a model
that was created in a strategy's scope, these write to a temporary file and rename it; if several
workers have the same path, the first one writes it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import unison.keras  # noqa: F401  (before Keras: it chooses the JAX backend)
from unison.cells import Cell, Layout
from unison.keras.trainer import trainer_of
from unison.keras.variables import ReplicatedVariable
from unison.runtime.elastic.lifecycle import happened
from unison.storage import atomic
from unison.train.graph import parts_of, reachable
from unison.train.shared_path import begin_writing

import keras  # isort: skip
from keras.src.legacy.saving import legacy_h5_format  # isort: skip
from keras.src.saving import saving_lib  # isort: skip

#: The functions of Keras that write a model to a path.
_WRITERS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
)

#: A file of a model that is saved as a folder.
_CONFIG = "config.json"


def _teach_saving() -> None:
    """Lets Keras write the files of models with a strategy in this way; others are unchanged."""
    for module, name in _WRITERS:
        setattr(module, name, _writing_whole_files(getattr(module, name)))


def _writing_whole_files(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(model: keras.Model, filepath: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(filepath, str | os.PathLike) or trainer_of(model) is None:
            original(model, filepath, *args, **kwargs)
            return
        path = os.fspath(filepath)
        is_weights = original.__name__ == "save_weights_only"
        is_in_shards = is_weights and bool(next(iter(args), kwargs.get("max_shard_size")))
        # Those of the Hugging Face Hub are uploaded by Keras.
        has_many_files = is_in_shards or path.endswith(".weights.json") or path.startswith("hf://")
        is_folder = kwargs.get("zipped") is False

        def write() -> None:
            if has_many_files:
                original(model, filepath, *args, **kwargs)
                return
            aside = atomic.replacing_folder(path, _CONFIG) if is_folder else None
            with aside or atomic.replacing_path(path) as local:
                original(model, local, *args, **kwargs)
                happened("checkpoint")

        model.jax_state_sync()
        cells = cells_of_model(model)
        writing = begin_writing(path, os.path.join(path, _CONFIG) if is_folder else path, cells)
        with writing.reading():
            held = held_values(model)
        with held():
            writing.finish(write)

    return save


def _variables_of(model: keras.Model) -> list[ReplicatedVariable]:
    """Returns the variables of a model, its optimizer and its metrics that have copies."""
    found = [owner for _, owner in reachable(model, parts_of)] + model.metrics_variables
    unique = {id(variable): variable for variable in found}.values()
    return [variable for variable in unique if isinstance(variable, ReplicatedVariable)]


def cells_of_model(model: keras.Model) -> list[Cell]:
    """Returns the cells of a model, its optimizer and its metrics."""
    return [variable.cell for variable in _variables_of(model)]


class _Gathered:
    """Replaces a cell: its value outside of replicas, without requests to other processes."""

    layout = Layout.MIRRORED
    needs_all_processes = False

    def __init__(self, cell: Cell):
        self.placement = cell.placement
        self._value = jnp.asarray(cell.numpy())

    def value_outside(self) -> jax.Array:
        return self._value


def _gathered(variables: list[ReplicatedVariable]) -> list[tuple[ReplicatedVariable, _Gathered]]:
    """Returns the values of variables with a part in each process; all must call this."""
    return [
        (variable, _Gathered(variable.cell))
        for variable in variables
        if variable.cell.needs_all_processes
    ]


def held_values(model: keras.Model) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context in which a process alone reads the present values of a model.

    All processes that have parts of the values must call this.
    """
    if trainer_of(model) is None:
        return contextlib.nullcontext
    model.jax_state_sync()
    return functools.partial(_in_place_of_cells, _gathered(_variables_of(model)))


@contextlib.contextmanager
def _in_place_of_cells(gathered: list[tuple[ReplicatedVariable, _Gathered]]) -> Iterator[None]:
    """Inside, a process reads these variables without the others."""
    cells = [variable.cell for variable, _ in gathered]
    try:
        for variable, value in gathered:
            variable.__dict__["_unison_cell"] = value
        yield
    finally:
        for (variable, _), cell in zip(gathered, cells, strict=True):
            variable.__dict__["_unison_cell"] = cell


_teach_saving()
