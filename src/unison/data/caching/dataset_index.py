"""`dataset.json`: the index of a folder with a dataset, which is checked before it is used.

It has the format of `unison.storage.checksummed`, without bytes after its header.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from unison.data.caching.table_index import TableIndex, dtype_of_leaf
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import LEAF, Structure
from unison.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from unison.storage import atomic, checksummed
from unison.storage.decoding import (
    decoding,
    named_tuple,
    plain_dict,
    plain_list,
    plain_text,
    whole_number,
)
from unison.storage.names import checked_name, path_inside

_INDEX = "dataset.json"

_FORMAT = "unison.data 1"

#: The names of the folders of passes, the only ones that are ever deleted; and of their shards.
RUN = re.compile(r"run-[0-9a-f]{12}")
_SHARD = re.compile(r"shard-\d{5,9}")

_NOT_COMPRESSED = (None, "", "NONE")


class DatasetIndex(NamedTuple):
    """The content of a folder.

    Attributes:
        run: The name of the folder of the pass that wrote it.
        compression: See `codec_of`.
        signature: The signature of the elements.
        shards: The folders of the shards inside the pass's folder, and their tables.
    """

    run: str
    compression: str | None
    signature: Signature
    shards: list[tuple[str, TableIndex]]


def read_index(folder: str) -> DatasetIndex | None:
    """Returns the content of a folder; None if it has no dataset.

    Raises:
        DataLossError: The index is corrupt, or names something outside the folder.
        InvalidArgumentError: Another release wrote it, in another format.
    """
    path, remedy = path_inside(folder, _INDEX), f"Remove {folder}, and write it again."
    try:
        described, _ = checksummed.read_headed(path, remedy)
    except (NotFoundError, FailedPreconditionError):
        return None
    with decoding(path, remedy):
        found = plain_text(plain_dict(described)["format"])
        if found != _FORMAT:
            raise InvalidArgumentError(
                message=f"{path} is of another version. Expected the format {_FORMAT!r}. Received: "
                f"{found[:80]!r}"
            )
        return _index_of(described, path)


def _index_of(described: dict[str, Any], path: str) -> DatasetIndex:
    compression = described["compression"]
    if compression not in (*_NOT_COMPRESSED, "GZIP", "SNAPPY"):
        raise ValueError(f"there is no compression {compression!r}")
    compression = None if compression in _NOT_COMPRESSED else compression
    specs = tuple(_spec_of(spec) for spec in plain_list(described["specs"]))
    signature = Signature(structure_of(described["structure"]), specs)
    if signature.structure.num_leaves != len(specs):
        raise ValueError(f"expected {signature.structure.num_leaves} specs, received {len(specs)}")
    shards = []
    for shard in plain_list(described["shards"]):
        table = TableIndex.of(shard, compression)
        _check_table(table, signature)
        shards.append((checked_name(shard["folder"], _SHARD, path), table))
    if not shards:
        raise ValueError("it has no shards")
    return DatasetIndex(checked_name(described["run"], RUN, path), compression, signature, shards)


def _spec_of(described: Any) -> ArraySpec:
    sizes = plain_dict(described)["shape"]
    shape = None
    if sizes is not None:
        shape = tuple(s if s is None else whole_number(s) for s in plain_list(sizes))
    return ArraySpec(shape, dtype_of_leaf(described["dtype"]))


def _check_table(table: TableIndex, signature: Signature) -> None:
    """Checks that a table holds the leaves of a signature. Raises: ValueError."""
    is_text = [spec.dtype.kind == "O" for spec in signature.specs]
    if table.blocks and [dtype.kind == "O" for dtype in table.dtypes] != is_text:
        raise ValueError(f"expected leaves of {list(signature.specs)}, received {table.dtypes}")


def write_index(
    folder: str,
    run: str,
    compression: str | None,
    signature: Signature,
    shards: Mapping[str, dict[str, Any]],
) -> None:
    """Makes a pass the dataset of a folder, atomically.

    Args:
        folder: The folder.
        run: The name of the folder of the pass.
        compression: See `codec_of`.
        signature: What the elements are.
        shards: The results of `TableWriter.finish`, by the folder of the shard.
    """
    described = {
        "format": _FORMAT,
        "run": run,
        "compression": compression,
        "structure": as_json(signature.structure),
        "specs": [{"shape": s.shape, "dtype": s.dtype.name} for s in signature.specs],
        "shards": [{"folder": name, **shard} for name, shard in shards.items()],
    }
    with atomic.replacing(f"{folder}/{_INDEX}") as file:
        checksummed.write(file, [checksummed.header_line(described)])


# -- structures as JSON ------------------------------------------------------------------------


def as_json(structure: Structure) -> Any:
    """Returns a structure as JSON.

    Raises:
        TypeError: A dictionary has keys that are neither text nor whole numbers.
    """
    if structure.kind is None:
        return "leaf"
    children = [as_json(child) for child in structure.children]
    if structure.kind is type(None):
        return None
    if structure.kind is tuple:
        return {"tuple": children}
    if issubclass(structure.kind, tuple):
        fields = list(structure.kind._fields)  # type: ignore[attr-defined]
        return {"named_tuple": structure.kind.__name__, "fields": fields, "children": children}
    if not all(isinstance(key, str | int) for key in structure.keys):
        raise TypeError(
            "The keys of dictionaries in elements that are kept in files must be texts or whole "
            f"numbers. Received: {list(structure.order)}"
        )
    kind = "dict" if structure.kind is dict else "ordered_dict"
    return {kind: children, "keys": [*structure.keys], "order": [*structure.order]}


def structure_of(described: Any) -> Structure:
    """Returns the structure that `as_json` has converted to JSON.

    Raises:
        ValueError, KeyError: It is not a result of `as_json`.
    """
    if described == "leaf":
        return LEAF
    if described is None:
        return Structure(type(None))
    if "tuple" in plain_dict(described):
        return Structure(tuple, _structures_of(described["tuple"]))
    if "named_tuple" in described:
        named = named_tuple(described["named_tuple"], described["fields"])
        children = plain_list(described["children"], len(described["fields"]))
        return Structure(named, _structures_of(children))
    kind = dict if "dict" in described else collections.OrderedDict
    children = plain_list(described["dict" if kind is dict else "ordered_dict"])
    keys, order = (tuple(map(_key, plain_list(described[name]))) for name in ("keys", "order"))
    if len({*keys}) != len(children) or sorted(map(repr, keys)) != sorted(map(repr, order)):
        raise ValueError(f"expected {len(children)} keys, received {list(keys)} and {list(order)}")
    return Structure(kind, _structures_of(children), keys, order)


def _structures_of(described: Any) -> tuple[Structure, ...]:
    return tuple(map(structure_of, plain_list(described)))


def _key(value: Any) -> str | int:
    if not isinstance(value, str | int):
        raise ValueError(f"expected a key that is text or a whole number, received {value!r}")
    return value
