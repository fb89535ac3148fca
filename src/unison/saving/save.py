"""`save`: writes an object with its variables and functions, to be used without its code."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unison.cells import has_cell
from unison.runtime.elastic.lifecycle import happened
from unison.saving import directory as folder
from unison.saving.calling import SavedFunction, SavedSignature
from unison.saving.functions import (
    DEFAULT_SIGNATURE,
    as_signature,
    concrete_functions_of,
    functions_of,
    input_signature_of,
    inputs_of,
    is_concrete,
    is_function,
    parameters_of,
)
from unison.saving.program import SavedProgram, export_program
from unison.saving.specs import ArraySpec
from unison.storage import atomic
from unison.strategies.default import default_strategy
from unison.train.archive import write_archive
from unison.train.graph import cells_of, describe, is_tracked, is_variable, parts_of, reachable
from unison.train.shared_path import begin_writing
from unison.train.structures import encode_structure

logger = logging.getLogger("unison")


def save(obj: Any, export_dir: str | os.PathLike, signatures: Any = None) -> None:
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

    Raises:
        ValueError: A function has no known signature, or cannot be exported for it.
        AssertionError: A function uses a variable that is not reachable from `obj`.

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
    keras_models = _keras_models_for(obj)

    def gather(saved: SavedObject) -> None:
        saved.add_own_functions()
        if signatures is None and keras_models is not None and obj.built:
            saved.add_signature(DEFAULT_SIGNATURE, *keras_models.inference_of(obj))
        for name, function in _wanted_signatures(obj, signatures).items():
            saved.add_known_signature(name, function)
        if keras_models is not None:
            saved.also_write(keras_models.keras_archive_of(obj))

    write_object(obj, os.fspath(export_dir), gather)


def write_object(obj: Any, path: str, gather: Callable[[SavedObject], None]) -> None:
    """Writes an object into a folder, atomically; with several workers, the first one does.

    Args:
        obj: The object.
        path: The folder.
        gather: Adds what is saved with the object.
    """
    _give_cells(obj)
    writing = begin_writing(path, os.path.join(path, folder.INDEX), cells_of(obj, parts_of))
    with writing.reading():
        saved = SavedObject(obj)
        gather(saved)

    def write() -> None:
        with atomic.replacing_folder(path, last=folder.INDEX) as aside:
            saved.write(aside)
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


class SavedObject:
    """An object to be written: its parts, variables, functions and signatures.

    Args:
        root: The object.
    """

    def __init__(self, root: Any):
        self._nodes, self._arrays = describe(root, parts_of)
        self._objects = [owner for _, owner in reachable(root, parts_of)]
        self._number = {id(owner): number for number, owner in enumerate(self._objects)}
        self._variables = [owner for owner in self._objects if is_variable(owner)]
        self._programs: list[SavedProgram] = []
        #: The functions of each object, by the object's index and by name.
        self._functions: dict[int, dict[str, Any]] = {}
        #: The program of each signature.
        self._signatures: dict[str, int] = {}
        #: Functions that write additional files into the folder.
        self._writers: list[Callable[[str], None]] = []

    def add_own_functions(self) -> None:
        """Adds the functions in the attributes of all objects."""
        for number, owner in enumerate(self._objects):
            if not is_variable(owner):
                for name, function in functions_of(owner):
                    self._functions.setdefault(number, {})[name] = self._described(function)

    def add_function(self, name: str, function: Callable[..., Any], inputs: Any) -> None:
        """Adds a function of the root for one signature.

        Args:
            name: Its attribute in the loaded object.
            function: The function.
            inputs: Its `(args, kwargs)`, with an `ArraySpec` for every array.
        """
        program = self._export(function, inputs)
        described = _function_index(name, inspect.signature(function), [program], True)
        self._functions.setdefault(0, {})[name] = described

    def add_signature(self, name: str, function: Callable[..., Any], inputs: Any) -> None:
        """Adds a function to be called by name with named arrays; see `add_function`."""
        self._signatures[name] = self._export(*as_signature(function, inputs))

    def add_known_signature(self, name: str, function: Any) -> None:
        """Adds a function that has one signature, or a signature that was loaded."""
        if isinstance(function, SavedSignature):
            self._signatures[name] = self._add(function.program)
        else:
            (concrete,) = concrete_functions_of(function)
            self.add_signature(name, concrete.python_function, inputs_of(concrete))

    def also_write(self, write: Callable[[str], None]) -> None:
        """Adds a function that writes additional files into the folder, given its path."""
        self._writers.append(write)

    def _described(self, function: Any) -> dict[str, Any]:
        if isinstance(function, SavedSignature):
            return {"signature": self._add(function.program)}
        if isinstance(function, SavedFunction):
            numbers = [self._add(program) for program in function.programs]
            name, asks = function.__name__, function.has_input_signature
            return _function_index(name, function.parameters, numbers, asks)
        numbers = [
            self._export(concrete.python_function, inputs_of(concrete))
            for concrete in concrete_functions_of(function)
        ]
        name = getattr(function.python_function, "__name__", "function")
        asks = is_concrete(function) or input_signature_of(function) is not None
        return _function_index(name, parameters_of(function), numbers, asks)

    def _export(self, function: Callable[..., Any], inputs: Any) -> int:
        return self._add(export_program(function, inputs, self._variables))

    def _add(self, program: SavedProgram) -> int:
        self._programs.append(program)
        return len(self._programs) - 1

    def write(self, path: str) -> None:
        """Writes everything into a folder."""
        write_archive(os.path.join(path, folder.VARIABLES), self._nodes, self._arrays)
        os.makedirs(os.path.join(path, folder.FUNCTIONS))
        model = {
            "objects": [self._object(number) for number in range(len(self._objects))],
            "programs": [self._program(path, number) for number in range(len(self._programs))],
            "signatures": self._signatures,
        }
        for write in self._writers:
            write(path)
        folder.write_index(path, model)

    def _object(self, number: int) -> dict[str, Any]:
        owner = self._objects[number]
        if is_variable(owner):
            return {"kind": "variable"} | _annotations(owner)
        kinds = ((dict, "dict"), (tuple, "tuple"), (list, "list"))
        kind = next((name for cls, name in kinds if isinstance(owner, cls)), "object")
        return {"kind": kind, "functions": self._functions.get(number, {})}

    def _program(self, path: str, number: int) -> dict[str, Any]:
        program = self._programs[number]
        return {
            "inputs": encode_structure(program.inputs, _encode_spec),
            "outputs": encode_structure(program.outputs, _encode_spec),
            "variables": [self._number[id(variable)] for variable in program.variables],
            "assigned": [self._number[id(variable)] for variable in program.assigned],
            "data": folder.write_program(path, f"{number}", program.data),
            "data_for_none": folder.write_program(path, f"{number}-none", program.data_for_none),
        }


def _give_cells(root: Any) -> None:
    """Stores the values of Keras variables from outside of strategies in cells, too."""
    for _, owner in list(reachable(root, parts_of)):
        if is_variable(owner) and not has_cell(owner):
            from unison.keras.variables import adopt

            adopt(owner, default_strategy().placement)


def _function_index(
    name: str, parameters: Any, programs: Sequence[int], has_input_signature: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": [_encode_parameter(each) for each in parameters.parameters.values()],
        "programs": list(programs),
        "has_input_signature": has_input_signature,
    }


def _encode_parameter(parameter: Any) -> dict[str, Any]:
    encoded = {"name": parameter.name, "kind": parameter.kind.name}
    if parameter.default is not parameter.empty:
        try:
            encoded["default"] = encode_structure(parameter.default, _encode_spec)
        except TypeError:
            logger.info("Parameter %s is saved without its default.", parameter)
    return encoded


def _annotations(variable: Any) -> dict[str, Any]:
    cell = variable.cell
    return {
        "name": cell.name,
        "trainable": bool(variable.trainable),
        "synchronization": cell.synchronization.name,
        "aggregation": cell.aggregation.name,
    }


def _encode_spec(spec: Any) -> Any:
    if not isinstance(spec, ArraySpec):
        raise TypeError(
            "The arguments and results of a saved function must be arrays, numbers, text, None, "
            f"and dictionaries, lists and tuples of them. Received: {spec!r}"
        )
    return dataclasses.asdict(spec) | {"dtype": spec.dtype.name}
