"""`from_source`: data of Python, Grain, PyTorch, Hugging Face or Ray objects, as datasets.

None of these packages is imported: an object can be theirs only if the program has imported it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unison.data.leaves import as_leaf, read_only, stack
from unison.data.plan import INFINITE, UNKNOWN, Plan, Rows, Stream
from unison.data.sources.arrow import columns_of, signature_of
from unison.data.sources.in_memory import Slices
from unison.data.sources.memory_maps import MappedRows
from unison.data.specs import ArraySpec, Signature
from unison.data.state import State
from unison.data.structure import LEAF, Leaves, Structure, flatten
from unison.data.transformations.batching import Unbatch
from unison.errors import InvalidArgumentError


def plan_of_source(source: Any) -> Plan:
    """Returns the plan of the elements of a source; see `Dataset.from_source`.

    Raises:
        TypeError: It is not a supported source.
    """
    if _is(source, "datasets", "Dataset"):
        return _hugging_face_plan(source)
    if _is(source, "datasets", "IterableDataset"):
        return Iterated(source, _signature_of_features(source.features))
    if _is(source, "ray.data", "DataIterator") or _is(source, "ray.data", "Dataset"):
        return Unbatch(Iterated(_RayBlocks(source), None))
    if _is(source, "grain", "MapDataset") and len(source) == sys.maxsize:
        return Iterated(source.to_iter_dataset(), _spec_of_grain(source), INFINITE)
    if arrays := _arrays_in(source):
        return arrays
    if _has_index(source):
        return Indexed(source, _spec_of_grain(source))
    if isinstance(source, Iterator):
        raise TypeError(
            "An iterator yields its elements only once, but a dataset is iterated several times. "
            "Pass what makes it: a function that returns it, or an object with __iter__. "
            f"Received: {source!r}"
        )
    # The order of a set differs between processes.
    is_ordered = not isinstance(source, str | bytes | Mapping | set | frozenset)
    if isinstance(source, Iterable) and is_ordered:
        length = len(source) if isinstance(source, Sized) and _has_length(source) else UNKNOWN
        return Iterated(source, _spec_of_grain(source), length)
    if callable(source):
        return Iterated(_Called(source), None)
    raise TypeError(
        "Expected a source of elements: an iterable, a function that returns one, an object with "
        "__len__ and __getitem__, a dataset of Grain, PyTorch, Hugging Face or Ray, or a structure "
        f"of arrays. Received: {source!r} of type {type(source).__name__}"
    )


class ElementReader:
    """Converts the elements of a source to leaves, all with the structure of the first.

    Lists that hold tensors or arrays are parts of the structure, as those of a PyTorch DataLoader.

    Args:
        signature: The signature of the elements; None for that of the first one.
    """

    def __init__(self, signature: Signature | None):
        self._signature = signature
        #: The structure of the elements; None before the first one.
        self.structure: Structure | None = None if signature is None else signature.structure

    def leaves_of(self, value: Any, index: int) -> Leaves:
        """Returns the leaves of element `index`.

        Raises:
            InvalidArgumentError: Its structure differs from that of the others, or it is not an
                element.
        """
        try:
            value = _with_arrays(value)
            if self.structure is None:
                leaves, self.structure = flatten(value)
            else:
                leaves = self.structure.flatten(value)
            if self._signature is None:
                return tuple(map(as_leaf, leaves))
            pairs = zip(leaves, self._signature.specs, strict=True)
            return tuple(_leaf_like(leaf, spec) for leaf, spec in pairs)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                message=f"Element {index} of the source cannot be used: {error}"
            ) from error


def _leaf_like(value: Any, spec: ArraySpec) -> Any:
    """Returns a value as a leaf of the dtype that the source has declared."""
    leaf = as_leaf(value)
    if spec.dtype.kind != "O" and not isinstance(leaf, bytes) and leaf.dtype != spec.dtype:
        leaf = leaf.astype(spec.dtype)
    if not spec.describes(leaf):
        raise ValueError(f"Expected {spec}. Received: {leaf!r}")
    return leaf


class _SourcePlan(Plan):
    def __init__(self, signature: Signature | None):
        self._signature = signature
        self._reader = ElementReader(signature)

    def signature_from(self, inputs: Sequence[Signature]) -> Signature | None:
        return self._signature

    @property
    def structure(self) -> Structure:
        return self._reader.structure or self.signature.structure


class Indexed(_SourcePlan):
    """The elements of an object with `__len__` and `__getitem__`."""

    identity = ("_length",)

    def __init__(self, source: Any, signature: Signature | None):
        super().__init__(signature)
        self._length = len(source)
        self._rows = _IndexedRows(source, self._length, self._reader)

    def cardinality(self) -> int:
        return self._length

    def rows(self) -> Rows:
        return self._rows


class _IndexedRows(Rows):
    def __init__(self, source: Any, length: int, reader: ElementReader):
        self._source = source
        self._length = length
        self._reader = reader
        # The method of PyTorch and Grain for several elements at a time.
        self._many = getattr(source, "__getitems__", None)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Leaves:
        numbers = indices.tolist()
        if self._many is None:
            return stack([self.element(number) for number in numbers])
        pairs = zip(self._many(numbers), numbers, strict=True)
        return stack([self._reader.leaves_of(value, number) for value, number in pairs])

    def element(self, index: int) -> Leaves:
        try:
            value = self._source[index]
        except Exception as error:
            error.add_note(f"In element {index} of the source {type(self._source).__name__}.")
            raise
        if value is None:
            raise InvalidArgumentError(
                message=f"The source has no element {index}: it gives None. Of a Grain MapDataset "
                "with a filter, pass to_iter_dataset(), which leaves such elements out."
            )
        return self._reader.leaves_of(value, index)


@runtime_checkable
class _HasGrainState(Protocol):
    """An iterator that can be saved, as Grain's and Unison's."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class Iterated(_SourcePlan):
    """The elements of an iterable, from its beginning in every pass.

    Args:
        source: The iterable.
        signature: The signature of the elements; None if only the first one determines it.
        length: Their number.
    """

    identity = ("_length",)

    def __init__(self, source: Iterable[Any], signature: Signature | None, length: int = UNKNOWN):
        super().__init__(signature)
        self._source = source
        self._length = length

    def cardinality(self) -> int:
        return self._length

    def _stream(self) -> Stream:
        return _IteratedStream(self._source, self._reader)


class _IteratedStream(Stream):
    """The elements of an iterator.

    Its state is that of the iterator, if it has one (`get_state`); otherwise the number of
    elements that were read, which are read again.
    """

    def __init__(self, source: Iterable[Any], reader: ElementReader):
        self._source = source
        self._reader = reader
        self._iterator = iter(source)
        self._position = 0

    def state(self) -> State:
        has_state = isinstance(self._iterator, _HasGrainState)
        inner = self._iterator.get_state() if has_state else None  # type: ignore[attr-defined]
        return {"position": self._position, "iterator": copy.deepcopy(inner)}

    def restore(self, state: State) -> None:
        self._iterator = iter(self._source)
        if state["iterator"] is None:
            self._position = 0
            self.skip(state["position"])
        else:
            self._iterator.set_state(state["iterator"])  # type: ignore[attr-defined]
            self._position = state["position"]

    def next(self) -> Leaves | None:
        try:
            value = next(self._iterator)
        except StopIteration:
            return None
        self._position += 1
        return self._reader.leaves_of(value, self._position - 1)

    def skip(self, count: int) -> int:
        for skipped in range(count):
            if next(self._iterator, self) is self:
                return skipped
            self._position += 1
        return count


class _RayBlocks(Iterable[Any]):
    """The blocks of a Ray dataset, or of a worker's split of it: dictionaries of columns."""

    def __init__(self, source: Any):
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source.iter_batches(batch_size=None, batch_format="numpy"))


class _Called(Iterable[Any]):
    """The elements of the iterable that a function returns, a new one in every pass."""

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


# -- arrays ------------------------------------------------------------------------------------


def _arrays_in(source: Any) -> Plan | None:
    """Returns the plan of the rows of arrays; None if `source` is something else.

    Several memory maps in a list are the parts of one array.
    """
    if isinstance(source, list) and source and all(isinstance(p, np.memmap) for p in source):
        rows = _PartsRows(source)
        spec = ArraySpec(source[0].shape[1:], source[0].dtype)
        return RowsOf(rows, Signature(LEAF, (spec,)))
    leaves, structure = flatten(source)
    arrays = [_with_arrays(leaf) for leaf in leaves if _is_array(leaf)]
    if not arrays or len(arrays) < len(leaves):
        return None
    return Slices(tuple(map(as_leaf, arrays)), structure)


def _is_array(value: Any) -> bool:
    """Whether a value is an array in memory or memory-mapped: NumPy's, JAX's or PyTorch's."""
    is_known = _is(value, "jax", "Array") or _is(value, "torch", "Tensor")
    return is_known or isinstance(value, np.ndarray)


class _PartsRows(Rows):
    """The concatenated rows of several arrays."""

    def __init__(self, parts: Sequence[np.ndarray]):
        kinds = {(part.shape[1:], part.dtype.name) for part in parts}
        if len(kinds) > 1 or () in {part.shape for part in parts}:
            raise ValueError(
                "Memory maps in a list are parts of one array: their rows must have the same "
                f"shape and dtype. Received: {sorted(kinds)}. Put them in a tuple or a dictionary "
                "if they are columns."
            )
        self._parts = [read_only(np.asarray(part)) for part in parts]
        self._starts = np.cumsum([0, *map(len, parts)])
        self._mapped = MappedRows(parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, indices: np.ndarray) -> Leaves:
        self._mapped.expect(is_random=True)
        first = self._parts[0]
        rows = np.empty((len(indices), *first.shape[1:]), first.dtype)
        part_of = np.searchsorted(self._starts, indices, "right") - 1
        for number in np.unique(part_of).tolist():
            places = np.flatnonzero(part_of == number)
            rows[places] = self._parts[number][indices[places] - self._starts[number]]
        return (rows,)

    def slice(self, start: int, stop: int) -> Leaves:
        self._mapped.expect(is_random=False)
        pairs = zip(self._parts, self._starts.tolist(), strict=False)
        inside = [part[max(start - begin, 0) : max(stop - begin, 0)] for part, begin in pairs]
        inside = [rows for rows in inside if len(rows)]
        return (inside[0] if len(inside) == 1 else np.concatenate(inside),)


def _with_arrays(value: Any) -> Any:
    """Returns an element with arrays for PyTorch's tensors, which share their memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _array_of_tensor(value, torch)
    if isinstance(value, Mapping):
        return {key: _with_arrays(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_with_arrays(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list) and any(_is_part(item, torch) for item in value):
        return tuple(_with_arrays(item) for item in value)
    return value


def _is_part(item: Any, torch: Any) -> bool:
    """Whether a list with such an item is not an array, but a part of an element's structure."""
    is_tensor = torch is not None and isinstance(item, torch.Tensor)
    return is_tensor or isinstance(item, np.ndarray | Mapping | tuple)


def _array_of_tensor(tensor: Any, torch: Any) -> np.ndarray:
    tensor = tensor.detach().cpu().resolve_conj()
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


# -- the packages' names for their classes -----------------------------------------------------


def _is(source: Any, package: str, name: str) -> bool:
    """Whether an object is of a class of a package; the package is not imported for this."""
    module = sys.modules.get(package)
    kind = getattr(module, name, None)
    return isinstance(kind, type) and isinstance(source, kind)


def _has_length(source: Any) -> bool:
    try:
        len(source)
    except TypeError:  # a DataLoader of an iterable dataset shows it in this way
        return False
    return True


def _has_index(source: Any) -> bool:
    is_sequence = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    is_plain = isinstance(source, str | bytes | Mapping | type)
    return is_sequence and not is_plain and _has_length(source)


def _spec_of_grain(source: Any) -> Signature | None:
    """Returns the signature of the elements, if the source is Grain's and declares it."""
    if not _is(source, "grain", "MapDataset") and not _is(source, "grain", "IterDataset"):
        return None
    import grain

    try:
        return signature_like(grain.experimental.get_element_spec(source))
    except (NotImplementedError, TypeError, ValueError):
        return None


def signature_like(spec: Any) -> Signature:
    """Returns the signature of specs in the structure of elements."""
    specs, structure = flatten(spec, lists_are_tuples=True)
    return Signature(structure, tuple(map(ArraySpec.like, specs)))


# -- Hugging Face ------------------------------------------------------------------------------


def _hugging_face_plan(source: Any) -> Plan:
    kind, columns = source.format["type"], source.format["columns"]
    if kind not in (None, "numpy", "arrow"):
        return Indexed(source, None)
    if _signature_of_features(source.features) is None:
        # Images, sounds and lists of lists are decoded one by one.
        return Indexed(source.with_format("numpy", columns=columns), None)
    return _HuggingFaceRows(source.with_format("arrow", columns=columns), len(source)).plan


def _signature_of_features(features: Any) -> Signature | None:
    """Returns the signature of the rows of Hugging Face features; None if Arrow has none."""
    if features is None or any(hasattr(f, "decode_example") for f in features.values()):
        return None
    try:
        return signature_of(features.arrow_schema)
    except InvalidArgumentError:
        return None


class _HuggingFaceRows(Rows):
    """The rows of a Hugging Face dataset, read column by column from Arrow's memory."""

    def __init__(self, source: Any, length: int):
        self._source = source
        self._length = length

    @property
    def plan(self) -> Plan:
        """The plan of these rows."""
        schema = self._source[:0].schema
        return RowsOf(self, signature_of(schema))

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> Leaves:
        return self._stacked(self._source[indices.tolist()], int(indices[0]))

    def slice(self, start: int, stop: int) -> Leaves:
        return self._stacked(self._source[start:stop], start)

    def element(self, index: int) -> Leaves:
        columns = columns_of(self._source[index : index + 1], index)
        return tuple(read_only(column.element(0)) for column in columns)

    def _stacked(self, table: Any, first: int) -> Leaves:
        return tuple(column.slice(0, len(table)) for column in columns_of(table, first))


class RowsOf(Plan):
    """Rows of elements with a known signature."""

    identity = ("_length",)

    def __init__(self, rows: Rows, signature: Signature):
        self._rows = rows
        self._length = len(rows)
        self._signature = signature

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return self._signature

    def cardinality(self) -> int:
        return self._length

    def rows(self) -> Rows:
        return self._rows
