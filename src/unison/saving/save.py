"""`save`: writes an object with its variables and functions, to be used without its code.

A `SavedObject` gathers them; the two formats write it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from unison.cells import has_cell
from unison.runtime.elastic.lifecycle import happened
from unison.saving import directory as folder
from unison.saving.functions import (
    DEFAULT_SIGNATURE,
    concrete_functions_of,
    functions_of,
    input_signature_of,
    is_concrete,
    is_function,
)
from unison.saving.saved_object import SavedObject
from unison.saving.stablehlo_format import write_stablehlo
from unison.saving.tensorflow_format import require_tensorflow, write_tensorflow
from unison.storage import atomic
from unison.strategies.default import default_strategy
from unison.train.graph import cells_of, is_tracked, is_variable, parts_of, reachable
from unison.train.shared_path import begin_writing

_STABLEHLO = "stablehlo"
_TENSORFLOW = "tensorflow"

#: The functions that write an object in each format, and the files without which readers ignore
#: the folder.
_WRITERS = {
    _STABLEHLO: (write_stablehlo, folder.INDEX),
    _TENSORFLOW: (write_tensorflow, folder.TENSORFLOW_INDEX),
}


def save(
    obj: Any, export_dir: str | os.PathLike, signatures: Any = None, format: str = _STABLEHLO
) -> None:
    """Saves an object with its variables and functions.

    Its functions are the `tf.function`s in its attributes and in those of the objects it
    references, for each of their known signatures: the `input_signature`, or those of
    `concrete_functions`.
    They are saved as programs of one replica, for CPUs, GPUs and TPUs, with their gradients; sizes
    that are unknown in the signature (None) stay unknown.

    Args:
        obj: A module, a Keras model, or another object that a checkpoint can follow.
        export_dir: The folder. Its previous content is replaced. Several workers with the same
            folder write it once. A worker that calls this alone saves its own copies, with a
            warning.
        signatures: A function of one signature, or a dictionary of them: functions that are called
            by name with named arrays. Default: the object's one function with an
            `input_signature`, or a Keras model's inference, as "serving_default".
        format: `"stablehlo"`, which `load` reads; or `"tensorflow"`, a SavedModel, which
            TensorFlow, TensorFlow Serving and their like run. The latter needs TensorFlow in
            this environment.

    Raises:
        ValueError: A function has no known signature, or cannot be exported for it; or there is no
            such format.
        AssertionError: A function uses a variable that is not reachable from `obj`.
        ImportError: The format needs TensorFlow, which is not installed.

    Examples:
        >>> import tempfile, jax.numpy as jnp, unison, unison.tf as tf
        >>> class Scale(unison.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.factor = unison.Variable(2.0)
        ...
        ...     @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        ...     def __call__(self, x):
        ...         return x * self.factor
        >>> folder = tempfile.mkdtemp()
        >>> save(Scale(), folder)
        >>> scale = unison.saving.load(folder)
        >>> scale(jnp.array([1.0, 2.0])).tolist()
        [2.0, 4.0]
        >>> scale.signatures["serving_default"](x=jnp.array([3.0]))["output_0"].tolist()
        [6.0]

    TF: `tf.saved_model.save`.
    """
    if not is_tracked(obj) or isinstance(obj, list | tuple | dict) or is_variable(obj):
        raise ValueError(
            "What is saved must be a module, a Keras model, or an object like them. Received: "
            f"{obj!r} of type {type(obj).__name__}"
        )
    if format not in _WRITERS:
        formats = " or ".join(map(repr, _WRITERS))
        raise ValueError(f"A saved model's format is {formats}. Received: {format!r}")
    if format == _TENSORFLOW:
        require_tensorflow()
    keras_models = _keras_models_for(obj)

    def gather(saved: SavedObject) -> None:
        saved.add_own_functions()
        if signatures is None and keras_models is not None and obj.built:
            saved.add_signature(DEFAULT_SIGNATURE, *keras_models.inference_of(obj))
        for name, function in _wanted_signatures(obj, signatures).items():
            saved.add_known_signature(name, function)
        if keras_models is not None and format == _STABLEHLO:
            saved.also_write(keras_models.keras_archive_of(obj))

    write_object(obj, os.fspath(export_dir), gather, format)


def write_object(
    obj: Any, path: str, gather: Callable[[SavedObject], None], format: str = _STABLEHLO
) -> None:
    """Writes an object into a folder, atomically; with several workers, the first one does.

    Args:
        obj: The object.
        path: The folder.
        gather: Adds what is saved with the object.
        format: See `save`.
    """
    write_into, index = _WRITERS[format]
    _give_cells(obj)
    writing = begin_writing(path, os.path.join(path, index), cells_of(obj, parts_of))
    with writing.reading():
        saved = SavedObject(obj)
        gather(saved)

    def write() -> None:
        others = [other for _, other in _WRITERS.values() if other != index]
        with atomic.replacing_folder(path, index, others) as aside:
            write_into(saved, aside)
            happened("checkpoint")

    writing.finish(write)


def _keras_models_for(obj: Any) -> Any:
    """Returns the module for saving Keras models, if `obj` is one."""
    if "keras" in sys.modules and isinstance(obj, sys.modules["keras"].Model):
        from unison.saving import keras_models

        return keras_models
    return None


def _wanted_signatures(obj: Any, given: Any) -> dict[str, Any]:
    if given is None:
        own = [
            function
            for _, function in functions_of(obj)
            if is_concrete(function) or input_signature_of(function) is not None
        ]
        return {DEFAULT_SIGNATURE: own[0]} if len(own) == 1 else {}
    named = dict(given) if isinstance(given, Mapping) else {DEFAULT_SIGNATURE: given}
    for name, function in named.items():
        if not is_function(function) or len(concrete_functions_of(function)) != 1:
            raise ValueError(
                "A signature is a tf.function with an input_signature, or what "
                f"get_concrete_function returns. Received: {name}={function!r}"
            )
    return named


def _give_cells(root: Any) -> None:
    """Stores the values of Keras variables from outside of strategies in cells, too."""
    for _, owner in list(reachable(root, parts_of)):
        if is_variable(owner) and not has_cell(owner):
            from unison.keras.variables import adopt

            adopt(owner, default_strategy().placement)
