"""The position of a stream: values that can be saved, and from which another process resumes.

`state_of` and `restored` handle the state of a stream's values; `encode` converts it to JSON
text and one array of bytes, which any kind of file can hold, and `decode` returns the same
state, bit for bit. Nothing is pickled.
"""

from __future__ import annotations

import base64
import collections
import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from unison.data.leaves import NestedDataset
from unison.data.ragged import RaggedArray
from unison.errors import OpError
from unison.storage.decoding import (
    bytes_of,
    corrupt,
    decoding,
    dtype_named,
    is_jaxs_own,
    name_of_dtype,
    parsed_json,
    plain_dict,
    plain_list,
    plain_text,
    raised_by,
    shape_of,
    whole_number,
)

#: The types that can be saved: None, numbers, text, elements (NumPy arrays and scalars, `bytes`,
#: arrays of `bytes`, windows), and lists, tuples and dictionaries (of text keys) of these.
State = Any

_POSITION = "The position of an iterator"
_REMEDY = "Begin a new epoch, or take another checkpoint."


@runtime_checkable
class HasState(Protocol):
    """An object with a position."""

    def state(self) -> State:
        """Returns its position; later reading does not change the result."""
        ...

    def restore(self, state: State) -> None:
        """Resumes at the position of another one."""
        ...


def state_of(value: Any) -> State:
    """Returns the state of a value that changes with reading."""
    if isinstance(value, int | float | str | bytes | np.ndarray | np.generic):
        return value  # checked first: a buffer has many of them
    if isinstance(value, HasState):
        return value.state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, collections.deque | list):
        return [state_of(item) for item in value]
    if isinstance(value, tuple):
        return tuple(state_of(item) for item in value)
    return value


def restored(value: Any, state: State) -> Any:
    """Returns a value with a state.

    Args:
        value: The current value, of the same kind.
        state: The result of `state_of`.
    """
    if isinstance(value, HasState):
        value.restore(state)
        return value
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
        return value
    if isinstance(value, collections.deque):
        return collections.deque(state)
    if isinstance(value, list | tuple) and any(isinstance(item, HasState) for item in value):
        pairs = zip(value, state, strict=True)
        return type(value)(restored(item, kept) for item, kept in pairs)
    return list(state) if isinstance(state, list) else state


# -- as JSON and bytes -------------------------------------------------------------------------

_Kind = TypeVar("_Kind")

#: By the name of a class of leaves that are not arrays: the class, the function that returns
#: a leaf's state, and the function that restores it.
_kinds: dict[str, tuple[type, Callable[[Any], State], Callable[[State], Any]]] = {}


def keep_kind(
    kind: type[_Kind], to_state: Callable[[_Kind], State], from_state: Callable[[State], _Kind]
) -> None:
    """Allows elements with leaves of class `kind` to be saved.

    Args:
        kind: The class.
        to_state: Returns the state of a leaf.
        from_state: Returns the leaf with a state.
    """
    _kinds[kind.__name__] = kind, to_state, from_state


def encode(state: State) -> tuple[str, np.ndarray]:
    """Returns a state as JSON text and an array of bytes, which the text references.

    Raises:
        TypeError: A part of it cannot be saved.

    Examples:
        >>> text, data = encode({"position": 3, "buffer": [np.float32(1.5), np.float32(2.5)]})
        >>> text
        '{"position": 3, "buffer": {"scalars": ["<f4", [2], 0]}}'
        >>> data.size
        8
    """
    encoder = _Encoder()
    text = json.dumps(encoder.encode(state))
    return text, np.frombuffer(b"".join(encoder.parts), np.uint8)


def decode(text: str, data: np.ndarray) -> State:
    """Returns the state that `encode` has converted to `text` and `data`.

    Raises:
        DataLossError: They are not a result of `encode`.
    """
    with decoding(_POSITION, _REMEDY):
        decoder = _Decoder(np.ascontiguousarray(data, np.uint8))
        return decoder.decode(parsed_json(text))


def check_like(state: State, own: State) -> None:
    """Checks that numbers in a state are numbers, and text is text, as in another state.

    Args:
        state: The decoded state.
        own: The state of the stream that restores it, which may be in another phase of a pass.

    Raises:
        ValueError: A part has another type.
    """
    is_container = isinstance(own, dict | list | tuple)
    if own is None or (state is None and is_container):  # not opened yet, or closed
        return
    if _type_of(state) is not _type_of(own):
        raise ValueError(f"expected {type(own).__name__}, received {str(state)[:80]!r}")
    if isinstance(own, dict):
        for key in own.keys() & state.keys():
            check_like(state[key], own[key])
    elif isinstance(own, list | tuple) and len(own) == len(state):
        for given, part in zip(state, own, strict=True):
            check_like(given, part)


def _type_of(state: State) -> type:
    is_element = isinstance(state, np.ndarray | np.generic | bytes)
    return np.ndarray if is_element else type(state)


def restore_checked(
    stream: HasState, position: State, errors: tuple[type[Exception], ...] = ()
) -> None:
    """Resumes a stream at a decoded position.

    Args:
        stream: The stream.
        position: The position.
        errors: Other errors that Unison's and NumPy's code raises for positions that do not fit.

    Raises:
        DataLossError: It is not a position of such a stream.
    """
    with decoding(_POSITION, _REMEDY):
        check_like(position, stream.state())
    of_code = (LookupError, TypeError, AttributeError, OverflowError)
    try:
        stream.restore(position)
    except of_code + errors as error:
        # A user's function may fail as well, if elements are read again.
        if isinstance(error, OpError) or not raised_by(error, "unison", "numpy"):
            raise
        raise corrupt(_POSITION, f"{type(error).__name__}: {error}", _REMEDY) from error


def is_same(one: State, other: State) -> bool:
    """Whether two states are equal, bit for bit."""
    (text, data), (other_text, other_data) = encode(one), encode(other)
    return text == other_text and np.array_equal(data, other_data)


def cannot_keep(value: Any) -> TypeError:
    """Returns the error for a part of a state that cannot be saved."""
    what = f"{value!r} of type {type(value).__name__}"
    if isinstance(value, NestedDataset):
        what = "an element that holds a dataset, and no window of arrays"
    return TypeError(
        "An iterator's state may contain only numbers, text, arrays of these, windows, "
        f"lists, tuples and dictionaries of text keys. Received: {what}. Map it to arrays, or save "
        "between epochs."
    )


class _Encoder:
    """Converts values to JSON. Other types are dictionaries of one key that begins with a kind."""

    def __init__(self) -> None:
        #: The bytes, in consecutive pieces.
        self.parts: list[bytes] = []
        self._size = 0

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, list):
            return self._list(value)
        if isinstance(value, tuple):
            return {"tuple": [self.encode(item) for item in value]}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value))}
        if isinstance(value, np.ndarray):
            is_text = value.dtype == object
            return {"texts": self._texts(value)} if is_text else {"array": self._array(value)}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            encoded = {key: self.encode(item) for key, item in value.items()}
            return encoded if len(encoded) != 1 else {"dict": encoded}
        return self._leaf(value)

    def _list(self, items: list[Any]) -> Any:
        """Encodes a list; one of similar elements leaf by leaf, since a buffer has thousands."""
        kinds = {_kind_of(item) for item in items}
        if len(kinds) != 1 or None in kinds:
            return [self.encode(item) for item in items]
        first = items[0]
        if isinstance(first, tuple):
            columns = [self.encode(list(column)) for column in zip(*items, strict=True)]
            return {"rows": columns}
        if isinstance(first, bytes):
            texts = np.empty(len(items), object)
            texts[:] = items
            return {"list of bytes": self._texts(texts)}
        kind = "scalars" if isinstance(first, np.generic) else "arrays"
        return {kind: self._array(np.stack(items))}

    def _array(self, array: np.ndarray) -> Any:
        name = _name_of(array.dtype)
        return [name, list(array.shape), self._put(np.ascontiguousarray(array).tobytes())]

    def _texts(self, array: np.ndarray) -> Any:
        texts = array.ravel().tolist()
        if not all(isinstance(text, bytes) for text in texts):
            raise cannot_keep(array)
        place = self._put(b"".join(texts))
        return [list(array.shape), self._array(np.array(list(map(len, texts)), np.int64)), place]

    def _put(self, data: bytes) -> int:
        """Adds a piece, and returns its offset."""
        self.parts.append(data)
        self._size += len(data)
        return self._size - len(data)

    def _leaf(self, value: Any) -> Any:
        name = type(value).__name__
        if name not in _kinds or _kinds[name][0] is not type(value):
            raise cannot_keep(value)
        return {"leaf": [name, self.encode(_kinds[name][1](value))]}


def _kind_of(item: Any) -> Any:
    """Returns the common properties of a list's items that are stored together; None if not."""
    if isinstance(item, np.generic):
        return "scalar", item.dtype
    if isinstance(item, np.ndarray):
        return (item.shape, item.dtype) if item.ndim and item.dtype != object else None
    if type(item) is tuple:
        return ("tuple", len(item)) if item else None
    return bytes if type(item) is bytes else None


class _Decoder:
    """Converts results of `_Encoder` back to values."""

    def __init__(self, data: np.ndarray):
        self._data = data

    def decode(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        if len(encoded) != 1:
            return self._dict(encoded)
        ((kind, content),) = encoded.items()
        decoders: dict[str, Callable[[Any], Any]] = {
            "tuple": lambda items: tuple(map(self.decode, plain_list(items))),
            "dict": self._dict,
            "bytes": lambda text: base64.b64decode(plain_text(text), validate=True),
            "scalar": lambda content: self._array(content)[()],
            "scalars": lambda content: list(self._array(content)),
            "array": self._array,
            "arrays": lambda content: list(self._array(content)),
            "texts": self._texts,
            "list of bytes": lambda content: self._texts(content).tolist(),
            "rows": lambda columns: list(zip(*map(self.decode, plain_list(columns)), strict=True)),
            "leaf": self._leaf,
        }
        return decoders[kind](content)

    def _dict(self, items: dict[str, Any]) -> dict[str, Any]:
        return {key: self.decode(item) for key, item in plain_dict(items).items()}

    def _array(self, content: Any) -> np.ndarray:
        name, sizes, place = plain_list(content, 3)
        dtype, shape = dtype_named(name, "biufcmM"), shape_of(sizes)
        # A copy: aligned, and without a reference to all the bytes.
        piece = self._piece(place, bytes_of(shape, dtype))
        return np.frombuffer(piece, dtype).reshape(shape).copy()

    def _piece(self, place: Any, size: int) -> bytes:
        """Returns a number of bytes from an offset. Raises: ValueError: there are fewer."""
        begin = whole_number(place, most=self._data.size)
        if size > self._data.size - begin:
            raise ValueError(f"{size} bytes were expected, {self._data.size - begin} are left")
        return self._data[begin : begin + size].tobytes()

    def _texts(self, content: Any) -> np.ndarray:
        shape, described, place = plain_list(content, 3)
        shape = shape_of(shape)
        lengths = self._array(described)
        if lengths.dtype != np.int64 or lengths.ndim != 1 or (lengths < 0).any():
            raise ValueError("the lengths of texts are invalid")
        whole = self._piece(place, sum(lengths.tolist()))
        ends = np.cumsum(lengths)
        texts = np.empty(len(ends), object)
        starts = [0, *ends[:-1].tolist()]
        texts[:] = [whole[start:end] for start, end in zip(starts, ends.tolist(), strict=False)]
        return texts.reshape(shape)

    def _leaf(self, content: Any) -> Any:
        name, state = plain_list(content, 2)
        return _kinds[name][2](self.decode(state))


def _name_of(dtype: np.dtype) -> str:
    """Returns the name of a dtype of numbers or times."""
    if dtype.kind in "biufcmM" or is_jaxs_own(dtype):
        return name_of_dtype(dtype)
    raise cannot_keep(dtype)


def _state_of_ragged(leaf: RaggedArray) -> State:
    return [leaf.flat, list(leaf.splits), np.zeros(0, leaf.splits_dtype)]


def _ragged_of(state: State) -> RaggedArray:
    flat, splits, nothing = state
    is_valid = isinstance(flat, np.ndarray) and isinstance(nothing, np.ndarray)
    if not is_valid or not isinstance(splits, list):
        raise ValueError(f"expected the state of a ragged array, received {str(state)[:80]!r}")
    count = None
    for own in splits:
        is_row = isinstance(own, np.ndarray) and own.ndim == 1 and own.dtype in (np.int32, np.int64)
        if not is_row or not len(own) or own[0] != 0 or (np.diff(own) < 0).any():
            raise ValueError("the splits of a ragged array are invalid")
        if count not in (None, len(own) - 1):
            raise ValueError("the splits of a ragged array do not fit")
        count = int(own[-1])
    if flat.ndim == 0 or count not in (None, len(flat)):
        raise ValueError("the values of a ragged array do not fit its splits")
    return RaggedArray(flat, splits, nothing.dtype)


keep_kind(RaggedArray, _state_of_ragged, _ragged_of)
