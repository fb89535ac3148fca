"""Elements, errors and signatures as messages: JSON fields, and arrays that are sent as they are.

Text is sent as its bytes, one after the other, with their lengths. Nothing is pickled.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from unison import errors
from unison.data.caching.dataset_index import as_json, structure_of
from unison.data.chunks import Chunk
from unison.data.leaves import NestedDataset, is_text
from unison.data.specs import ArraySpec, Signature
from unison.data.structure import Leaves
from unison.errors import InvalidArgumentError, OpError, UnknownError
from unison.storage.decoding import decoding, dtype_named, plain_list

_WHERE = "A message of an input worker"

#: The most characters of an error's message that are sent.
_MOST_SAID = 20_000


# -- chunks ------------------------------------------------------------------------------------


def packed(chunk: Chunk) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns the fields and arrays of a message with a chunk.

    Raises:
        InvalidArgumentError: An element holds a dataset.
    """
    rows: Sequence[Leaves] = [chunk.stacked()] if chunk.is_stacked else list(chunk)
    kinds, arrays = [], []
    for leaf in (leaf for row in rows for leaf in row):
        kind, parts = _packed_leaf(leaf)
        kinds.append(kind)
        arrays += parts
    leaves = len(rows[0])
    # Elements of one kind are described once.
    if all(kind == "array" for kind in kinds):
        kinds = []
    return {"count": len(chunk), "stacked": chunk.is_stacked, "leaves": leaves, "of": kinds}, arrays


def _packed_leaf(leaf: Any) -> tuple[Any, list[np.ndarray]]:
    if isinstance(leaf, NestedDataset):
        raise InvalidArgumentError(
            message="Elements that are datasets, such as windows, cannot be sent by an input "
            "worker. Map them to arrays first: dataset.flat_map(lambda window: window.batch(n))."
        )
    if not is_text(leaf):
        return "array", [np.asarray(leaf)]
    if isinstance(leaf, bytes):
        return "bytes", [np.frombuffer(leaf, np.uint8)]
    texts = leaf.ravel().tolist()
    lengths = np.array([len(text) for text in texts], np.int64)
    return list(leaf.shape), [lengths, np.frombuffer(b"".join(texts), np.uint8)]


def unpacked(fields: dict[str, Any], arrays: list[np.ndarray]) -> Chunk:
    """Returns the chunk that `packed` has converted.

    Raises:
        DataLossError: They are not a result of `packed`.
    """
    with decoding(_WHERE):
        count, width, kinds = int(fields["count"]), int(fields["leaves"]), fields["of"]
        rows = 1 if fields["stacked"] else count
        if width < 1 or count < 1:
            raise ValueError(f"{count} elements of {width} leaves")
        leaves = _unpacked_leaves(kinds or ["array"] * (rows * width), iter(arrays))
        if fields["stacked"]:
            if len(leaves) != width or any(len(leaf) != count for leaf in leaves):
                raise ValueError(f"expected {count} stacked elements")
            return Chunk(0, tuple(leaves))
        if len(leaves) != rows * width:
            raise ValueError(f"expected {rows * width} leaves, received {len(leaves)}")
        # An array without axes is a scalar of NumPy's.
        leaves = [leaf[()] if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        starts = range(0, len(leaves), width)
        return Chunk(0, elements=[tuple(leaves[start : start + width]) for start in starts])


def _unpacked_leaves(kinds: Any, arrays: Iterator[np.ndarray]) -> list[Any]:
    leaves: list[Any] = []
    try:
        for kind in plain_list(kinds):
            if kind == "array":
                leaves.append(next(arrays))
            elif kind == "bytes":
                leaves.append(next(arrays).tobytes())
            else:
                leaves.append(_unpacked_texts(kind, next(arrays), next(arrays)))
    except StopIteration:
        raise ValueError("an array is missing") from None
    return leaves


def _unpacked_texts(shape: Any, lengths: np.ndarray, data: np.ndarray) -> np.ndarray:
    if lengths.dtype != np.int64 or (lengths < 0).any() or int(lengths.sum()) != data.nbytes:
        raise ValueError("the lengths of texts are invalid")
    whole, ends = data.tobytes(), np.cumsum(lengths).tolist()
    texts = np.empty(len(ends), object)
    texts[:] = [whole[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=False)]
    return texts.reshape([int(size) for size in plain_list(shape)])


# -- errors ------------------------------------------------------------------------------------


def described_error(error: BaseException, where: str) -> dict[str, Any]:
    """Returns the fields of a message with an error.

    Args:
        error: The error.
        where: The process that it was raised in.
    """
    lines = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    notes = [*getattr(error, "__notes__", ()), f"In {where}:\n{lines}"]
    text = error.message if isinstance(error, OpError) else str(error)
    return {
        "error": type(error).__name__,
        "text": text[:_MOST_SAID],
        "notes": [note[:_MOST_SAID] for note in notes],
    }


def error_of(fields: dict[str, Any]) -> Exception:
    """Returns the error that `described_error` has described.

    An error of a class that is neither Python's nor Unison's becomes an UnknownError.
    """
    name, text = str(fields.get("error")), str(fields.get("text"))
    of_ours = getattr(errors, name, None)
    of_python = getattr(builtins, name, None)
    error: Exception
    if isinstance(of_ours, type) and issubclass(of_ours, OpError) and of_ours is not OpError:
        error = of_ours(message=text)
    elif isinstance(of_python, type) and issubclass(of_python, Exception):
        try:
            error = of_python(text)
        except TypeError:  # UnicodeDecodeError takes other arguments
            error = UnknownError(message=f"{name}: {text}")
    else:
        error = UnknownError(message=f"{name}: {text}")
    for note in plain_list(fields.get("notes") or []):
        error.add_note(str(note))
    return error


# -- signatures --------------------------------------------------------------------------------


def described_signature(signature: Signature) -> dict[str, Any]:
    """Returns a signature as JSON.

    Raises:
        InvalidArgumentError: Elements hold datasets, or are ragged.
    """
    specs = signature.specs
    if not all(isinstance(spec, ArraySpec) for spec in specs):
        raise InvalidArgumentError(
            message="Elements that are datasets, such as windows, or ragged, cannot be sent by an "
            f"input service. Received elements of {signature.element_spec}. Map them to arrays "
            "before: flat_map for datasets, x.to_tensor() for ragged ones."
        )
    described = [[spec.shape, "object" if _is_text(spec) else spec.dtype.name] for spec in specs]
    return {"structure": as_json(signature.structure), "specs": described}


def signature_of(described: Any) -> Signature:
    """Returns the signature that `described_signature` has converted to JSON.

    Raises:
        DataLossError: It is not a result of that.
    """
    with decoding("The element_spec of a registered dataset"):
        structure = structure_of(described["structure"])
        specs = tuple(_spec_of(*plain_list(each, 2)) for each in plain_list(described["specs"]))
        if structure.num_leaves != len(specs):
            raise ValueError(f"expected {structure.num_leaves} specs, received {len(specs)}")
        return Signature(structure, specs)


def _spec_of(sizes: Any, name: Any) -> ArraySpec:
    dtype = np.dtype(object) if name == "object" else dtype_named(name)
    if sizes is None:
        return ArraySpec(None, dtype)
    return ArraySpec(tuple(None if size is None else int(size) for size in sizes), dtype)


def _is_text(spec: ArraySpec) -> bool:
    return spec.dtype.kind == "O"
