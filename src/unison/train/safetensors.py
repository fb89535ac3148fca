"""Files of Hugging Face's format safetensors: arrays by name, for other programs.

A file is the length of a header, the header as JSON, and the bytes of the arrays. It has no
checksums: training is resumed from a `Checkpoint`.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from unison.errors import InvalidArgumentError
from unison.storage import atomic, files
from unison.storage.decoding import (
    bytes_of,
    decoding,
    parsed_json,
    plain_dict,
    plain_list,
    plain_text,
    shape_of,
    whole_number,
)
from unison.storage.names import path_inside
from unison.train.archive import ArrayDescription, Node, no_such_array, node_at
from unison.train.graph import cells_of, parts_of, values_of
from unison.train.shared_path import begin_writing

SUFFIX = ".safetensors"

#: The suffix of the list of the files that a large model is in.
INDEX_SUFFIX = ".safetensors.index.json"

_METADATA = "__metadata__"

#: The most bytes of a header, as in Hugging Face's own library.
_MOST_OF_HEADER = 100_000_000

_ALIGNMENT = 8

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_CODES = {name: code for code, name in _DTYPES.items()}


def save_safetensors(
    root: Any, path: str | os.PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the variables of an object into a safetensors file, atomically.

    An array's name is the path to its variable: attributes and keys, joined by dots. Only variables
    are written, and not the states of other objects. Workers with the same path write it once; see
    `docs/saving.md`. `Checkpoint.read` and `load_checkpoint` read such files, too.

    Args:
        root: A model, a module, or a dictionary or list of objects.
        path: The file; its name ends with `.safetensors`.
        metadata: Text to be kept in the header.

    Raises:
        ValueError: The path ends otherwise, or the name of a part has a dot or is empty.
        InvalidArgumentError: A variable has a dtype that the format does not have.

    Examples:
        >>> import tempfile, unison
        >>> path = f"{tempfile.mkdtemp()}/model.safetensors"
        >>> save_safetensors({"dense": {"kernel": unison.Variable([1.0, 2.0])}}, path)
        >>> unison.train.load_checkpoint(path).get_tensor("dense.kernel")
        array([1., 2.], dtype=float32)
    """
    path = os.fspath(path)
    if not path.endswith(SUFFIX):
        raise ValueError(f"The name of the file must end with {SUFFIX}. Received: {path}")
    writing = begin_writing(path, path, cells_of(root, parts_of))
    with writing.reading():
        values = values_of(root, parts_of)
        named = {_name_of(names): array for names, array in values.items()}
        header, order = _header_of(named, metadata or {})

    def write() -> None:
        with atomic.replacing(path) as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for name in order:
                file.write(np.asarray(named[name], order="C").tobytes())

    writing.finish(write)


def _name_of(path: Sequence[str]) -> str:
    """Returns the name of the array of the variable at a path."""
    for part in path or [""]:
        if "." in part or not part:
            raise ValueError(
                "In a safetensors file, the names of parts are joined by dots: they can have none, "
                f"and cannot be empty. Received: {part!r}"
            )
    return ".".join(path)


def _header_of(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """Returns the header, and the names of the arrays in the order of their bytes."""
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        array = arrays[name]
        if array.dtype.name not in _CODES:
            raise InvalidArgumentError(
                message=f"A safetensors file holds no array of dtype {array.dtype}. "
                f"Received: {name}. Cast it, or save a Checkpoint."
            )
        place = [offset, offset + array.nbytes]
        header[name] = {
            "dtype": _CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": place,
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    return text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT), order


def _read_header(file: IO[bytes], size: int) -> tuple[dict[str, Any], int]:
    """Returns the header of a file of a given size, and the offset of the arrays' bytes."""
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(_MOST_OF_HEADER, size - 8):
        raise ValueError(f"a header of {length} bytes is not in a file of {size}")
    return plain_dict(parsed_json(file.read(length))), 8 + length


class _Place(NamedTuple):
    """The position of an array's bytes in a file."""

    path: str
    offset: int


class SafetensorsArchive:
    """A safetensors file, or all of a large model's, with the interface of `Archive`.

    The arrays keep their names as keys. Names joined by dots are the path to a variable:
    `Checkpoint(dense={"kernel": kernel})` restores `dense.kernel`.

    Args:
        prefix: The path of a file, or of the list of a large model's files.

    Raises:
        NotFoundError: There is no such file.
        DataLossError: It is corrupt.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.nodes = [Node()]
        self.arrays: dict[str, ArrayDescription] = {}
        self._places: dict[str, _Place] = {}
        for path in self._paths():
            self._add(path)

    def _paths(self) -> list[str]:
        """Returns the paths of the files with arrays."""
        if not self.prefix.endswith(INDEX_SUFFIX):
            return [self.prefix]
        with files.open_to_read(self.prefix) as file, self._decoding():
            names = plain_dict(plain_dict(parsed_json(file.read()))["weight_map"]).values()
            folder = os.path.dirname(self.prefix) or os.curdir
            return [path_inside(folder, plain_text(name)) for name in dict.fromkeys(names)]

    def _add(self, path: str) -> None:
        """Adds the arrays of a file."""
        with files.open_to_read(path) as file, self._decoding():
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            header, start = _read_header(file, size)
            for name, described in header.items():
                if name == _METADATA:
                    continue
                given = plain_dict(described)
                code = plain_text(given["dtype"])
                if code not in _DTYPES:
                    raise ValueError(f"array {name!r} has the unknown dtype {code!r:.80}")
                dtype = np.dtype(getattr(ml_dtypes, _DTYPES[code], _DTYPES[code]))
                shape = shape_of(given["shape"])
                begin, end = map(whole_number, plain_list(given["data_offsets"], 2))
                if end - begin != bytes_of(shape, dtype) or start + end > size:
                    raise ValueError(f"array {name!r} of shape {shape} is not at {begin} to {end}")
                if name in self.arrays:
                    raise ValueError(f"array {name!r} is there twice")
                self.arrays[name] = ArrayDescription(shape, dtype)
                self._places[name] = _Place(path, start + begin)
                node_at(self.nodes, name.split(".")).variable = name

    def read(self, key: str) -> np.ndarray:
        """Returns an array; see `Archive.read`."""
        if key not in self.arrays:
            raise no_such_array(self.prefix, key, self.arrays)
        (shape, dtype), place = self.arrays[key], self._places[key]
        with files.open_to_read(place.path) as file, self._decoding():
            file.seek(place.offset)
            content = file.read(bytes_of(shape, dtype))
            return np.frombuffer(bytearray(content), dtype).reshape(shape)

    def verify(self) -> None:
        """Does nothing more: there are no checksums."""

    def _decoding(self) -> contextlib.AbstractContextManager[None]:
        return decoding(f"Checkpoint {self.prefix}", "Download or save it again.")
