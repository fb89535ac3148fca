"""Saved models in Unison's own format: see `unison.saving.directory`."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from unison.saving import directory as folder
from unison.saving.calling import SavedFunction, SavedSignature
from unison.saving.saved_object import SavedObject
from unison.saving.specs import ArraySpec
from unison.train.archive import write_archive
from unison.train.graph import is_variable
from unison.train.structures import encode_structure

logger = logging.getLogger("unison")


def write_stablehlo(saved: SavedObject, path: str) -> None:
    """Writes an object into a folder in the format of `unison.saving.directory`."""
    write_archive(os.path.join(path, folder.VARIABLES), saved.nodes, saved.arrays)
    os.makedirs(os.path.join(path, folder.FUNCTIONS))
    number = {id(owner): index for index, owner in enumerate(saved.objects)}
    programs = saved.programs()
    place = {id(program): index for index, program in enumerate(programs)}

    def program_at(index: int) -> dict[str, Any]:
        program = programs[index]
        return {
            "inputs": encode_structure(program.inputs, _encode_spec),
            "outputs": encode_structure(program.outputs, _encode_spec),
            "variables": [number[id(variable)] for variable in program.variables],
            "assigned": [number[id(variable)] for variable in program.assigned],
            "data": folder.write_program(path, f"{index}", program.data),
            "data_for_none": folder.write_program(path, f"{index}-none", program.data_for_none),
        }

    def function(kept: SavedFunction | SavedSignature) -> dict[str, Any]:
        if isinstance(kept, SavedSignature):
            return {"signature": place[id(kept.program)]}
        return {
            "name": kept.__name__,
            "parameters": list(map(_encode_parameter, kept.parameters.parameters.values())),
            "programs": [place[id(program)] for program in kept.programs],
            "has_input_signature": kept.has_input_signature,
        }

    def object_at(index: int) -> dict[str, Any]:
        owner = saved.objects[index]
        if is_variable(owner):
            return {"kind": "variable"} | _annotations(owner)
        kinds = ((dict, "dict"), (tuple, "tuple"), (list, "list"))
        kind = next((name for cls, name in kinds if isinstance(owner, cls)), "object")
        functions = saved.functions.get(index, {})
        return {"kind": kind, "functions": {name: function(f) for name, f in functions.items()}}

    model = {
        "objects": [object_at(index) for index in range(len(saved.objects))],
        "programs": [program_at(index) for index in range(len(programs))],
        "signatures": {name: place[id(each.program)] for name, each in saved.signatures.items()},
    }
    for write in saved.writers:
        write(path)
    folder.write_index(path, model)


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
