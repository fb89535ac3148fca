"""Stacked elements in files: one a leaf, and one that says what they are.

`NAME.index.json` is written last, so that elements are there as a whole or not at all; a pass that
was interrupted leaves nothing that a later one would take. Numbers are read where they lie
(memory-mapped). Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from unison.data.structure import Leaves
from unison.errors import DataLossError


def write_columns(path: str, columns: Leaves) -> None:
    """Writes the leaves of stacked elements, text or numbers, beside `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    described = []
    for number, column in enumerate(columns):
        described.append({"dtype": column.dtype.name, "shape": column.shape})
        if column.dtype.kind == "O":
            texts = column.ravel().tolist()
            _write(_leaf(path, number), np.frombuffer(b"".join(texts), np.uint8))
            _write(_leaf(path, number, ".lengths"), np.array(list(map(len, texts)), np.int64))
        else:
            _write(_leaf(path, number), column.view(_as_bytes(column.dtype)))
    index = Path(_index(path) + ".new")
    index.write_text(json.dumps(described), "utf-8")
    os.replace(index, _index(path))


def read_columns(path: str) -> Leaves | None:
    """Returns what `write_columns` wrote; None where it has not.

    Raises:
        DataLossError: The files are not what it writes.
    """
    try:
        described = json.loads(Path(_index(path)).read_text("utf-8"))
    except FileNotFoundError:
        return None
    try:
        return tuple(_read(path, number, leaf) for number, leaf in enumerate(described))
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise DataLossError(
            message=f"The elements kept in {path}.* cannot be read ({error}). Remove these files."
        ) from error


def _read(path: str, number: int, described: dict[str, Any]) -> np.ndarray:
    shape = described["shape"]
    is_text = described["dtype"] == "object"
    # There is no memory map of nothing.
    is_mapped = not is_text and 0 not in shape
    column = np.load(_leaf(path, number), "r" if is_mapped else None, allow_pickle=False)
    if not is_text:
        return column.view(np.dtype(described["dtype"])).reshape(shape)
    ends = np.cumsum(np.load(_leaf(path, number, ".lengths"), allow_pickle=False))
    whole = column.tobytes()
    texts = np.empty(len(ends), object)
    starts = [0, *ends[:-1].tolist()]
    texts[:] = [whole[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]
    return texts.reshape(shape)


def _write(path: str, array: np.ndarray) -> None:
    with open(path + ".new", "wb") as file:
        np.save(file, array, allow_pickle=False)
    os.replace(path + ".new", path)


def _as_bytes(dtype: np.dtype) -> np.dtype:
    """Returns a dtype of NumPy's own and of the same size, for what `np.save` does not know."""
    return dtype if dtype.kind in "biufc" else np.dtype(f"u{dtype.itemsize}")


def _leaf(path: str, number: int, what: str = "") -> str:
    return f"{path}.leaf{number}{what}.npy"


def _index(path: str) -> str:
    return f"{path}.index.json"
