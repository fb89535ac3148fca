"""The folder of a saved model: its files, and how they are replaced atomically.

| file | holds |
| --- | --- |
| `saved_model.json` | the objects, their functions and signatures |
| `variables/variables.index` | the variables, as a checkpoint (see `unison.train.archive`) |
| `functions/*.jaxexport` | the programs: StableHLO, as `jax.export` serializes it |
| `model.keras` | of a Keras model: Keras' own archive, from which the model is rebuilt |

TensorFlow cannot read it; `unison.saving.tensorflow_format` writes what it reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

from unison.errors import InvalidArgumentError, NotFoundError
from unison.storage import files
from unison.storage.decoding import corrupt, decoding, parsed_json, plain_dict
from unison.storage.file_systems import is_remote
from unison.storage.names import checked_name, path_inside
from unison.storage.temporary_folders import temporary_folder
from unison.train.archive import SUFFIX

INDEX = "saved_model.json"
#: The file of a SavedModel of TensorFlow.
TENSORFLOW_INDEX = "saved_model.pb"
FUNCTIONS = "functions"
VARIABLES = os.path.join("variables", "variables")
KERAS_MODEL = "model.keras"

_FORMAT = "unison saved model"
_VERSION = 1

#: The names of programs: a number, and a suffix for the program of an empty batch.
_PROGRAM = re.compile(r"\d{1,9}(-none)?")

_REMEDY = "Save the model again."


def write_program(path: str, name: str, data: bytes | None) -> dict[str, Any] | None:
    """Writes a program into the saved model at `path`; returns the argument of `read_program`."""
    if data is None:
        return None
    with open(os.path.join(path, FUNCTIONS, f"{name}.jaxexport"), "wb") as file:
        file.write(data)
    return {"name": name, "crc32": zlib.crc32(data)}


def read_program(path: str, described: dict[str, Any] | None) -> bytes | None:
    """Returns the program that `write_program` has written.

    Raises:
        NotFoundError: The file does not exist.
        DataLossError: It is corrupt.
    """
    if described is None:
        return None
    name = program_path(path, described)
    with files.open_to_read(name) as file:
        data = file.read()
    if zlib.crc32(data) != described["crc32"]:
        raise corrupt(name, "checksum mismatch", _REMEDY)
    return data


def program_path(path: str, described: dict[str, Any]) -> str:
    """Returns the path of a program of the saved model at `path`.

    Raises:
        DataLossError: Its name would be a path outside of the folder.
    """
    name = checked_name(described["name"], _PROGRAM, os.path.join(path, INDEX))
    return path_inside(path, FUNCTIONS, f"{name}.jaxexport")


def variables_path(path: str) -> str:
    """Returns the path of the checkpoint of the saved model at `path`, without `.index`.

    Raises:
        DataLossError: A symbolic link leads out of the folder.
    """
    name = path_inside(path, *f"{VARIABLES}{SUFFIX}".split(os.sep))
    return name.removesuffix(SUFFIX)


def write_index(path: str, model: dict[str, Any]) -> None:
    """Writes the description of the objects of a saved model."""
    described = {"format": _FORMAT, "version": _VERSION, "crc32": _checksum(model), "model": model}
    with open(os.path.join(path, INDEX), "w") as file:
        json.dump(described, file, indent=1)


def read_index(path: str) -> dict[str, Any]:
    """Returns the description that `write_index` has written.

    Raises:
        DataLossError: It is corrupt.
        InvalidArgumentError: Another release wrote it, in another format.
    """
    name = path_inside(path, INDEX)
    with files.open_to_read(name) as file:
        content = file.read()
    with decoding(name, _REMEDY):
        described = plain_dict(parsed_json(content))
        kind, version, model = (described[key] for key in ("format", "version", "model"))
        if (kind, version) != (_FORMAT, _VERSION):
            raise InvalidArgumentError(
                message=f"{name} is a {str(kind)[:80]!r} of version {str(version)[:80]!r}; this "
                f"release reads {_FORMAT!r}, version {_VERSION}."
            )
        if described["crc32"] != _checksum(model):
            raise ValueError("checksum mismatch")
        return plain_dict(model)


def _checksum(model: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(model, sort_keys=True).encode())


@contextlib.contextmanager
def local_copy(directory: str) -> Iterator[str]:
    """Yields a local folder with the content of `directory`.

    Raises:
        NotFoundError: There is no saved model.
    """
    if not files.exists(os.path.join(directory, INDEX)):
        instead = ""
        if files.exists(os.path.join(directory, TENSORFLOW_INDEX)):
            instead = (
                " It holds a model that TensorFlow saved, whose functions only TensorFlow runs."
            )
        raise NotFoundError(
            message=f"There is no saved model in {directory} (no file {INDEX}).{instead}"
        )
    if not is_remote(directory):
        yield directory
        return
    with temporary_folder("model") as copy:
        files.download(directory, copy)
        yield copy
