"""Orbax's checkpoint format: a tree of arrays in Zarr chunks, in an OCDBT database of TensorStore.

Each process writes its chunks into a database of its own, `ocdbt.process_N`. Then one process
has Orbax write the tree's description, `_METADATA`, and a database that refers to all of them.
TensorStore writes the chunks: they are NumPy arrays, of which Orbax writes one process's only.

Sources: `orbax.checkpoint.PyTreeCheckpointHandler`; TensorStore's drivers `zarr` and `ocdbt`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np

from unison.storage.decoding import dtype_named, plain_dict, plain_text, shape_of
from unison.storage.file_systems import named_errors
from unison.train.archive import ArrayDescription
from unison.train.chunk_plan import ChunkGrid, Region, slices_of

#: The file with the description of a tree of arrays.
METADATA = "_METADATA"

#: The dtypes that TensorStore writes in Zarr 2. Without asking it: importing it takes long.
DTYPES = frozenset(
    "bool int4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 float4_e2m1fn float8_e3m4 "
    "float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 float8_e5m2fnuz bfloat16 "
    "float16 float32 float64 complex64 complex128".split()
)

#: In the description of what Unison has written, which is no checkpoint without its index.
_MADE_BY_UNISON = {"writer": "unison"}

#: Of values that are not arrays: text, None and empty containers.
_NO_ARRAYS = {"string", "None", "Dict", "List", "Tuple", "NamedTuple", "empty_node"}

#: The bytes up to which a chunk is inside of a node of the database, which is compressed.
INLINE_BYTES = 1024

#: The settings that Orbax's databases must agree on.
_DATABASE = {
    "max_inline_value_bytes": INLINE_BYTES,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}


#: The names from a tree's root to an array.
TreePath = tuple[str, ...]


class OwnChunks(NamedTuple):
    """The chunks of an array that a process writes.

    Attributes:
        grid: All chunks of the array.
        chunks: Those of the process, by number.
    """

    grid: ChunkGrid
    chunks: Mapping[int, np.ndarray]


def is_orbax_installed() -> bool:
    """Whether checkpoints can be written in this format."""
    return importlib.util.find_spec("orbax") is not None and (
        importlib.util.find_spec("orbax.checkpoint") is not None
    )


def require_orbax() -> ModuleType:
    """Returns Orbax.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "Checkpoints in Orbax's format need Orbax: pip install 'unison[orbax]'. "
            'Checkpoint(format="archive", ...) does without.'
        ) from error
    return orbax.checkpoint


class TreeWriter:
    """Writes a tree of arrays into a folder.

    Args:
        folder: The folder, which all processes that write have in common.
        process: The number of this process among JAX's.

    Raises:
        ImportError: Orbax is not installed.
    """

    def __init__(self, folder: str, process: int):
        orbax = require_orbax()
        self._folder = os.path.abspath(folder)
        self._process = process
        self._database = os.path.join(self._folder, f"ocdbt.process_{process}", "")
        self._context = orbax.type_handlers.get_ts_context(use_ocdbt=True)

    def write(self, arrays: Mapping[TreePath, OwnChunks]) -> None:
        """Writes this process's chunks.

        Args:
            arrays: The arrays' chunks, by the arrays' paths in the tree. No array is empty.

        Raises:
            OpError: They cannot be written.
        """
        import tensorstore

        own = {name_of(path): value for path, value in arrays.items() if value.chunks}
        with named_errors(self._folder):
            opening = {
                name: tensorstore.open(self._spec(name, value.grid), context=self._context)
                for name, value in own.items()
            }
            writing = [
                opening[name]
                .result()[slices_of(value.grid.region(number))]
                .write(chunk, can_reference_source_data_indefinitely=True)
                for name, value in own.items()
                for number, chunk in value.chunks.items()
            ]
            for written in writing:
                written.result()

    def _spec(self, name: str, grid: ChunkGrid) -> dict[str, Any]:
        place = {
            "driver": "ocdbt",
            # Nobody reads these files before they are complete, except for the manifest.
            "base": {
                "driver": "file",
                "path": self._database,
                "file_io_locking": {"mode": "non_atomic"},
            },
            "manifest": {"driver": "file", "path": self._database},
            "path": name,
            "config": _DATABASE,
            "assume_config": True,
            "cache_pool": "cache_pool#ocdbt",
        }
        return {
            **zarr_spec(grid, **place),
            "open": True,
            "recheck_cached_metadata": False,
            "recheck_cached_data": False,
            "store_data_equal_to_fill_value": True,
        }

    def complete(self, grids: Mapping[TreePath, ChunkGrid]) -> None:
        """Describes the tree and joins the databases, after all processes have written theirs.

        Args:
            grids: The chunks of each array in the tree.
        """
        describe_tree(self._folder, grids, self._process, is_database=True)


def zarr_spec(grid: ChunkGrid, **place: Any) -> dict[str, Any]:
    """Returns TensorStore's specification of a new array.

    Args:
        grid: Its chunks.
        place: The store that it is in.
    """
    return {
        "driver": "zarr",
        "kvstore": place,
        "metadata": {"shape": grid.shape, "chunks": grid.chunk, "compressor": None},
        "dtype": grid.dtype.name,
        "create": True,
    }


def describe_tree(
    folder: str, paths: Iterable[TreePath], process: int, *, is_database: bool
) -> None:
    """Has Orbax describe a tree whose arrays are written, and join the processes' databases.

    Args:
        folder: The local folder with the arrays, in which the description is written.
        paths: The paths of the arrays in the tree.
        process: The number of this process among JAX's.
        is_database: Whether the arrays are in databases of OCDBT, or each in a folder.
    """
    from etils import epath  # of which Orbax takes paths

    orbax = require_orbax()
    handlers = orbax.type_handlers
    handler = orbax.PyTreeCheckpointHandler(
        use_ocdbt=is_database,
        type_handler_registry=handlers.create_type_handler_registry(
            (_Written, _handler_of_written(orbax)),
            # Of this one Orbax only asks which files it writes beside the arrays: none.
            (jax.Array, handlers.ArrayHandler(array_metadata_store=None)),
        ),
        multiprocessing_options=orbax.options.MultiprocessingOptions(primary_host=process),
    )
    with named_errors(folder):
        saved = orbax.args.PyTreeSave(_nested(paths), custom_metadata=_MADE_BY_UNISON)
        handler.save(epath.Path(folder), args=saved)
        if is_database:
            handler.finalize(epath.Path(folder))


def name_of(path: TreePath) -> str:
    """Returns the name under which Orbax stores the array at a path.

    Examples:
        >>> name_of(("model", "layers[0]", "kernel"))
        'model.layers[0].kernel'
    """
    return ".".join(path)


class _Written:
    """An array that is written already: a leaf of a tree."""


def _handler_of_written(orbax: Any) -> Any:
    """Returns Orbax's handler of such arrays, which others read as NumPy arrays by default."""

    class Handler(orbax.type_handlers.TypeHandler):
        def typestr(self) -> str:
            return "np.ndarray"

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Sequence[Any]:
            return []

        async def metadata(self, infos: Any) -> Sequence[Any]:
            raise NotImplementedError  # abstract in Orbax, which calls this and the next to read

        async def deserialize(self, infos: Any, args: Any = None) -> Sequence[Any]:
            raise NotImplementedError

    return Handler()


def _nested(paths: Iterable[TreePath]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path in paths:
        folder = tree
        for name in path[:-1]:
            folder = folder.setdefault(name, {})
        folder[path[-1]] = _Written()
    return tree


class TreeReader:
    """The arrays of a tree in a local folder, of Unison's or of other programs' that use Orbax.

    Args:
        folder: The folder, none of whose links leads out of it: TensorStore follows them.

    Attributes:
        arrays: The description of every array, by its path in the tree.
        is_foreign: Whether another program has written it.
        may_lack_zeros: Whether chunks of zeros may have been left out.

    Raises:
        ImportError: Orbax is not installed.
        ValueError: The folder is not in this format.
    """

    def __init__(self, folder: str):
        orbax = require_orbax()
        self._folder = os.path.abspath(folder)
        with open(os.path.join(folder, METADATA), "rb") as file:
            metadata = plain_dict(json.load(file))
        self.is_foreign = metadata.get("custom_metadata") != _MADE_BY_UNISON
        is_database = metadata.get("use_ocdbt")
        if is_database is None:  # an early release has written it
            is_database = os.path.exists(os.path.join(folder, "manifest.ocdbt"))
        self._is_database = bool(is_database)
        self._driver = "zarr3" if metadata.get("use_zarr3", False) else "zarr"
        # A chunk that is missing is lost, unless zeros were left out.
        self.may_lack_zeros = not metadata.get("store_array_data_equal_to_fill_value", False)
        self._context = orbax.type_handlers.get_ts_context(use_ocdbt=self._is_database)
        paths = list(_paths_of_arrays(metadata))
        opened = [(path, self._open(name_of(path))) for path in paths]
        self._stores = {path: store.result() for path, store in opened}
        self.arrays = {
            path: ArrayDescription(
                shape_of(list(store.shape)), dtype_named(store.dtype.numpy_dtype.name)
            )
            for path, store in self._stores.items()
        }

    def _open(self, name: str) -> Any:
        """Returns the future of the array with a name in the folder."""
        import tensorstore

        base: dict[str, Any] = {"driver": "file", "path": f"{self._folder}/"}
        if self._is_database:
            place = {
                "driver": "ocdbt", "base": base, "path": name, "cache_pool": "cache_pool#ocdbt"
            }  # fmt: skip
        elif os.sep in name or name in ("", os.curdir, os.pardir):
            raise ValueError(f"{name!r} is not the name of an array")
        else:
            place = {**base, "path": f"{self._folder}/{name}/"}
        return tensorstore.open(
            {
                "driver": self._driver,
                "kvstore": place,
                "fill_missing_data_reads": self.may_lack_zeros,
            },
            open=True,
            read=True,
            context=self._context,
        )

    def start_reading(self, path: TreePath, region: Region) -> Any:
        """Returns the future of a region of an array."""
        return self._stores[path][slices_of(region)].read(order="C")


def _paths_of_arrays(metadata: dict[str, Any]) -> Iterator[TreePath]:
    """Yields the paths of a tree's arrays.

    Raises:
        ValueError: The description is invalid.
    """
    for entry in plain_dict(metadata["tree_metadata"]).values():
        value = plain_dict(plain_dict(entry)["value_metadata"])
        if plain_text(value["value_type"]) in _NO_ARRAYS or value.get("skip_deserialize"):
            continue
        yield tuple(str(plain_dict(key)["key"]) for key in entry["key_metadata"])
