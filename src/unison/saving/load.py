"""`load`: an object that was saved, with its variables and functions, without its code."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from unison.cells import VariableAggregation, VariableSynchronization
from unison.module import Module
from unison.saving import directory as folder
from unison.saving.calling import SavedFunction, SavedSignature
from unison.saving.program import SavedProgram
from unison.saving.specs import ArraySpec
from unison.storage import files
from unison.train.archive import Archive
from unison.train.structures import decode_structure
from unison.variables import Variable

#: What TensorFlow calls a model that is saved for inference, as all of these are.
SERVING = "serve"


class LoadedObject(Module):
    """An object of a saved model: its parts and functions are attributes.

    Attributes:
        signatures: The signatures by name; of the object that was saved.
    """

    signatures: dict[str, SavedSignature]


class LoadedFunctionObject(LoadedObject):
    """An object of a saved model that can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["__call__"](*args, **kwargs)


def load(
    export_dir: str | os.PathLike,
    tags: str | Sequence[str] | None = None,
    make_variable: Callable[..., Variable] = Variable,
) -> Any:
    """Returns an object that `save` saved.

    Its variables are new ones, of the strategy in whose scope this is called. They can be trained
    and assigned. Its functions can be called with the signatures that they were saved with, also
    inside `strategy.run`.

    Args:
        export_dir: The folder.
        tags: TensorFlow's names for what a model is for; all are saved to serve.
        make_variable: Makes the variables; takes what `unison.Variable` takes.

    Raises:
        NotFoundError: There is no saved model.
        DataLossError: It is damaged.
        ValueError: `tags` names something else than "serve".

    TF: `tf.saved_model.load`.
    """
    path = os.fspath(export_dir)
    wanted = [tags] if isinstance(tags, str) else list(tags or [SERVING])
    if wanted != [SERVING]:
        raise ValueError(f"A saved model has the tags {[SERVING]}. Received: tags={tags!r}")
    with folder.local_copy(path) as copy:
        return _Reader(copy, make_variable).root()


def contains_saved_model(export_dir: str | os.PathLike) -> bool:
    """Whether a folder holds what `save` writes.

    TF: `tf.saved_model.contains_saved_model`.
    """
    return files.exists(os.path.join(os.fspath(export_dir), folder.INDEX))


class _Reader:
    """Makes the objects of a saved model.

    Args:
        path: The folder.
        make_variable: Makes the variables.
    """

    def __init__(self, path: str, make_variable: Callable[..., Variable]):
        self._path = path
        self._make_variable = make_variable
        self._index = folder.read_index(path)
        self._archive = Archive(os.path.join(path, folder.VARIABLES))
        self._archive.verify()
        self._made: dict[int, Any] = {}
        self._programs: dict[int, SavedProgram] = {}

    def root(self) -> Any:
        """Returns the object that was saved."""
        # The variables first: programs refer to them.
        for number, described in enumerate(self._index["objects"]):
            if described["kind"] == "variable":
                self._made[number] = self._variable(number, described)
        root = self._object(0)
        vars(root)["signatures"] = {
            name: SavedSignature(name, self._program(number))
            for name, number in self._index["signatures"].items()
        }
        return root

    def _variable(self, number: int, described: dict[str, Any]) -> Variable:
        key = self._archive.nodes[number].variable
        assert key is not None
        value = self._archive.read(key)
        synchronization = VariableSynchronization[described["synchronization"]]
        if synchronization is VariableSynchronization.NONE:
            synchronization = VariableSynchronization.AUTO  # the strategy may have several replicas
        variable = self._make_variable(
            value,
            trainable=described["trainable"],
            name=described["name"],
            dtype=value.dtype,
            synchronization=synchronization,
            aggregation=VariableAggregation[described["aggregation"]],
        )
        variable.cell.restore(value)  # of a sum, each copy has begun with all of it
        return variable

    def _object(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        described = self._index["objects"][number]
        children = self._archive.nodes[number].children
        if described["kind"] in ("list", "tuple"):
            items = [None] * (max(map(int, children), default=-1) + 1)
            self._made[number] = items
            for name, child in children.items():
                items[int(name)] = self._object(child)
            return items if described["kind"] == "list" else tuple(items)
        if described["kind"] == "dict":
            made: dict[str, Any] = {}
            self._made[number] = made
            made.update({name: self._object(child) for name, child in children.items()})
            return made
        functions = described["functions"]
        loaded = LoadedFunctionObject() if "__call__" in functions else LoadedObject()
        self._made[number] = loaded
        for name, child in children.items():
            vars(loaded)[name] = self._object(child)
        for name, function in functions.items():
            vars(loaded)[name] = self._function(name, function)
        return loaded

    def _function(self, name: str, described: dict[str, Any]) -> SavedFunction | SavedSignature:
        if "signature" in described:
            return SavedSignature(name, self._program(described["signature"]))
        parameters = [
            inspect.Parameter(
                each["name"],
                inspect._ParameterKind[each["kind"]],
                default=decode_structure(each["default"], _decode_spec)
                if "default" in each
                else inspect.Parameter.empty,
            )
            for each in described["parameters"]
        ]
        return SavedFunction(
            described["name"],
            inspect.Signature(parameters),
            [self._program(number) for number in described["programs"]],
            described["has_input_signature"],
        )

    def _program(self, number: int) -> SavedProgram:
        if number not in self._programs:
            described = self._index["programs"][number]
            data = folder.read_program(self._path, described["data"])
            assert data is not None
            self._programs[number] = SavedProgram(
                data,
                folder.read_program(self._path, described["data_for_none"]),
                decode_structure(described["inputs"], _decode_spec),
                decode_structure(described["outputs"], _decode_spec),
                [self._made[variable] for variable in described["variables"]],
                [self._made[variable] for variable in described["assigned"]],
            )
        return self._programs[number]


def _decode_spec(encoded: dict[str, Any]) -> ArraySpec:
    return ArraySpec(tuple(encoded["shape"]), jnp.dtype(encoded["dtype"]), encoded["name"])
