"""`load`: a saved object, with its variables and functions, without its code."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from unison.cells import VariableAggregation, VariableSynchronization, has_cell
from unison.module import WAITING, Module
from unison.saving import directory as folder
from unison.saving.calling import SavedFunction, SavedSignature
from unison.saving.module_decoder import ModuleDecoder
from unison.saving.program import SavedProgram
from unison.saving.specs import ArraySpec
from unison.storage import files
from unison.storage.decoding import (
    decoding,
    dtype_named,
    plain_dict,
    plain_list,
    plain_text,
    shape_of,
    whole_number,
)
from unison.train.archive import Archive
from unison.train.structures import decode_structure
from unison.variables import Variable

#: The maximum total number of items of lists, including unsaved ones: the highest indices.
_MOST_ITEMS = 1 << 22
_PLACE = re.compile(r"[0-9]{1,12}")

#: TensorFlow's tag of a model for inference, which all of these have.
SERVING = "serve"


class LoadedObject(Module):
    """An object of a saved model: its parts and functions are attributes.

    Attributes:
        signatures: The signatures by name; on the root object.
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
    """Returns an object that `save` has saved.

    Its variables are new, and belong to the strategy in whose scope this is called. They can be
    trained and assigned. Its functions can be called with their saved signatures, also
    inside `strategy.run`.

    Args:
        export_dir: The folder.
        tags: TensorFlow's names for purposes of a model; all are saved for "serve".
        make_variable: Creates a variable; has the arguments of `unison.Variable`.

    Raises:
        NotFoundError: There is no saved model.
        DataLossError: It is corrupt.
        InvalidArgumentError: A program in it calls what no program from a file may call:
            a callback to the host, its own kernel. Nothing has been compiled then.
        ValueError: `tags` has another name than "serve".

    TF: `tf.saved_model.load`.
    """
    path = os.fspath(export_dir)
    wanted = [tags] if isinstance(tags, str) else list(tags or [SERVING])
    if wanted != [SERVING]:
        raise ValueError(f"A saved model has the tags {[SERVING]}. Received: tags={tags!r}")
    with folder.local_copy(path) as copy, ModuleDecoder() as decoder:
        reader = _Reader(copy, make_variable, decoder)
        with decoding(path, "Save the model again."):
            return reader.root()


def contains_saved_model(export_dir: str | os.PathLike) -> bool:
    """Whether a folder has the content that `save` writes.

    TF: `tf.saved_model.contains_saved_model`.
    """
    return files.exists(os.path.join(os.fspath(export_dir), folder.INDEX))


class _Reader:
    """Creates the objects of a saved model.

    Args:
        path: The folder.
        make_variable: Creates a variable.
        decoder: Decodes the programs' modules first, with limits of time and memory.
    """

    def __init__(self, path: str, make_variable: Callable[..., Variable], decoder: ModuleDecoder):
        self._path = path
        self._decoder = decoder
        self._make_variable = make_variable
        self._index = folder.read_index(path)
        self._archive = Archive(folder.variables_path(path))
        self._archive.verify()
        self._made: dict[int, Any] = {}
        self._programs: dict[int, SavedProgram] = {}
        self._items_left = _MOST_ITEMS

    def root(self) -> Any:
        """Returns the root object.

        Raises:
            ValueError, LookupError, TypeError: The content is invalid.
        """
        objects = plain_list(self._index["objects"], len(self._archive.nodes))
        # The variables first: programs reference them.
        for number, described in enumerate(objects):
            if described["kind"] == "variable":
                self._made[number] = self._variable(number, described)
        root = self._object(0)
        vars(root)["signatures"] = {
            name: SavedSignature(name, self._program(number))
            for name, number in self._index["signatures"].items()
        }
        return root

    def _variable(self, number: int, described: dict[str, Any]) -> Variable:
        value = self._archive.read(plain_text(self._archive.nodes[number].variable))
        synchronization = VariableSynchronization[described["synchronization"]]
        if synchronization is VariableSynchronization.NONE:
            synchronization = VariableSynchronization.AUTO  # the strategy may have several replicas
        variable = self._make_variable(
            value,
            trainable=bool(described["trainable"]),
            name=plain_text(described["name"]),
            dtype=value.dtype,
            synchronization=synchronization,
            aggregation=VariableAggregation[described["aggregation"]],
        )
        variable.cell.restore(value)  # for a sum, each copy was initialized to all of it
        return variable

    def _object(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        described = self._index["objects"][number]
        children = self._archive.nodes[number].children
        if described["kind"] in ("list", "tuple"):
            places = {name: _place_of(name) for name in children}
            items = [None] * self._taken(max(places.values(), default=-1) + 1)
            self._made[number] = items
            for name, child in children.items():
                items[places[name]] = self._object(child)
            return items if described["kind"] == "list" else tuple(items)
        if described["kind"] == "dict":
            made: dict[str, Any] = {}
            self._made[number] = made
            made.update({name: self._object(child) for name, child in children.items()})
            return made
        if described["kind"] != "object":
            raise ValueError(f"there is no object of the kind {described['kind']!r}")
        if WAITING in children.keys() | described["functions"].keys():
            raise ValueError(f"an object has an attribute {WAITING!r}")
        functions = plain_dict(described["functions"])
        loaded = LoadedFunctionObject() if "__call__" in functions else LoadedObject()
        self._made[number] = loaded
        for name, child in children.items():
            vars(loaded)[name] = self._object(child)
        for name, function in functions.items():
            vars(loaded)[name] = self._function(name, function)
        return loaded

    def _taken(self, count: int) -> int:
        """Returns the number of items of a list, within the limit for the model."""
        self._items_left -= count
        if self._items_left < 0:
            raise ValueError(f"a list has {count} items, and hardly any in the file")
        return count

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
            plain_text(described["name"]),
            inspect.Signature(parameters),
            [self._program(number) for number in plain_list(described["programs"])],
            bool(described["has_input_signature"]),
        )

    def _program(self, number: int) -> SavedProgram:
        if number not in self._programs:
            described = self._index["programs"][whole_number(number)]
            data = folder.read_program(self._path, plain_dict(described["data"]))
            assert data is not None
            program = SavedProgram(
                data,
                folder.read_program(self._path, described["data_for_none"]),
                decode_structure(described["inputs"], _decode_spec),
                decode_structure(described["outputs"], _decode_spec),
                [self._variable_of(variable) for variable in described["variables"]],
                [self._variable_of(variable) for variable in described["assigned"]],
            )
            program.check(folder.program_path(self._path, described["data"]), self._decoder)
            self._programs[number] = program
        return self._programs[number]

    def _variable_of(self, number: int) -> Any:
        variable = self._made[number]
        if not has_cell(variable):
            raise ValueError(f"expected a variable, received {variable!r}")
        return variable


def _decode_spec(encoded: dict[str, Any]) -> ArraySpec:
    given = plain_dict(encoded)
    sizes = plain_list(given["shape"])
    shape_of([0 if size is None else size for size in sizes])  # as far as it is known
    name = given["name"] if given["name"] is None else plain_text(given["name"])
    return ArraySpec(tuple(sizes), dtype_named(given["dtype"]), name)


def _place_of(name: str) -> int:
    if not _PLACE.fullmatch(name):
        raise ValueError(f"expected the place of an item in a list, received {name[:80]!r}")
    return int(name)
