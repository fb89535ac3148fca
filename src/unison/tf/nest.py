"""`tf.nest`: structures of lists, tuples, dictionaries, named tuples and attrs or data classes.

Dictionaries are walked in the order of their sorted keys. Sets, strings and tensors are leaves.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence
from typing import Any

from unison.tf.dispatch import CompositeTensor
from unison.tf.missing import names_missing_from
from unison.values import DistributedValues

__getattr__ = names_missing_from(__name__)


def is_nested(seq: Any) -> bool:
    """Whether `seq` is a structure, and no leaf.

    Examples:
        >>> is_nested([1]), is_nested({"a": 1}), is_nested("text")
        (True, True, False)

    TF: `tf.nest.is_nested`.
    """
    if isinstance(seq, Mapping) or _is_record(seq):
        return True
    is_text = isinstance(seq, str | bytes | bytearray)
    return isinstance(seq, Sequence | MappingView) and not is_text


def flatten(structure: Any, expand_composites: bool = False) -> list[Any]:
    """Returns the leaves, in order; of a leaf, a list with it alone.

    Args:
        structure: The structure.
        expand_composites: Whether the values of the replicas, and the parts of ragged tensors,
            count as leaves, too.

    Examples:
        >>> flatten({"b": 2, "a": [1, (3,)]})
        [1, 3, 2]

    TF: `tf.nest.flatten`.
    """
    return list(_leaves(structure, expand_composites))


def pack_sequence_as(
    structure: Any, flat_sequence: Sequence[Any], expand_composites: bool = False
) -> Any:
    """Returns the leaves put into the structure of another.

    Raises:
        ValueError: There are not as many leaves as places.
        TypeError: `flat_sequence` is not a sequence.

    TF: `tf.nest.pack_sequence_as`.
    """
    if not is_nested(flat_sequence):
        raise TypeError(
            f"Attempted to pack value:\n  {flat_sequence}\ninto a structure, but found "
            f"incompatible type `{type(flat_sequence)}` instead."
        )
    places = len(flatten(structure, expand_composites))
    if places != len(flat_sequence):
        raise ValueError(
            f"Could not pack sequence. The structure has {places} atoms, but flat_sequence has "
            f"{len(flat_sequence)} items. Structure: {structure}, flat_sequence: {flat_sequence}."
        )
    return _rebuilt(structure, iter(flat_sequence), expand_composites)


def map_structure(func: Callable[..., Any], *structure: Any, **kwargs: Any) -> Any:
    """Applies `func` to the leaves of one structure, or to those of several side by side.

    Args:
        func: Takes a leaf of each.
        structure: The structures, which must be alike.
        kwargs: `check_types` (default True) and `expand_composites` (default False).

    Raises:
        TypeError: `func` is not a function, or the structures differ in types.
        ValueError: They differ in size, or there are none.

    Examples:
        >>> map_structure(lambda x, y: x + y, {"a": 1}, {"a": 2})
        {'a': 3}

    TF: `tf.nest.map_structure`.
    """
    check_types = kwargs.pop("check_types", True)
    expand_composites = kwargs.pop("expand_composites", False)
    if kwargs:
        raise ValueError(
            "Only valid keyword arguments are `check_types` and `expand_composites`, not: "
            f"{', '.join(kwargs)}"
        )
    if not callable(func):
        raise TypeError(f"Argument `func` must be callable, got: {func}")
    if not structure:
        raise ValueError("Must provide at least one structure")
    for other in structure[1:]:
        assert_same_structure(structure[0], other, check_types, expand_composites)
    rows = zip(*(flatten(each, expand_composites) for each in structure), strict=True)
    return pack_sequence_as(structure[0], [func(*row) for row in rows], expand_composites)


def assert_same_structure(
    nest1: Any, nest2: Any, check_types: bool = True, expand_composites: bool = False
) -> None:
    """Raises unless the two are nested alike.

    Raises:
        ValueError: They differ in size, keys, or in where there is a leaf.
        TypeError: With `check_types`, they differ in the type of a sequence.

    TF: `tf.nest.assert_same_structure`.
    """
    problem = _difference(nest1, nest2, check_types)
    if problem is None:
        return
    kind, text = problem
    raise kind(
        f"The two structures don't have the same nested structure: {text}\n"
        f"First structure: {nest1!r}\nSecond structure: {nest2!r}"
    )


def _difference(one: Any, two: Any, check_types: bool) -> tuple[type[Exception], str] | None:
    if is_nested(one) != is_nested(two):
        return ValueError, f"{one!r} and {two!r} are not both structures, or both leaves."
    if not is_nested(one):
        return None
    if check_types and not _are_of_one_type(one, two):
        return TypeError, f"their types are {type(one).__name__} and {type(two).__name__}."
    if isinstance(one, Mapping) and isinstance(two, Mapping) and set(one) != set(two):
        return ValueError, f"their keys are {sorted(one, key=repr)} and {sorted(two, key=repr)}."
    pairs = _children(one), _children(two)
    if len(pairs[0]) != len(pairs[1]):
        return ValueError, f"their lengths are {len(pairs[0])} and {len(pairs[1])}."
    problems = (_difference(a, b, check_types) for a, b in zip(*pairs, strict=True))
    return next(filter(None, problems), None)


def _are_of_one_type(one: Any, two: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return True
    if _is_namedtuple(one) and _is_namedtuple(two):
        return type(one).__name__ == type(two).__name__ and one._fields == two._fields
    return type(one) is type(two)


def _leaves(structure: Any, expand_composites: bool) -> Iterator[Any]:
    if not is_nested(structure) and not _is_composite(structure, expand_composites):
        yield structure
        return
    for child in _children(structure):
        yield from _leaves(child, expand_composites)


def _is_composite(value: Any, expand_composites: bool) -> bool:
    return expand_composites and isinstance(value, DistributedValues | CompositeTensor)


def _children(structure: Any) -> list[Any]:
    if isinstance(structure, Mapping):
        return [structure[key] for key in _sorted(structure)]
    if isinstance(structure, DistributedValues):
        return list(structure.values)
    if isinstance(structure, CompositeTensor):
        return list(structure.parts())
    if _is_record(structure):
        return [getattr(structure, name) for name in _fields(structure)]
    return list(structure)


def _rebuilt(structure: Any, leaves: Iterator[Any], expand_composites: bool) -> Any:
    if not is_nested(structure) and not _is_composite(structure, expand_composites):
        return next(leaves)
    children = [_rebuilt(child, leaves, expand_composites) for child in _children(structure)]
    if isinstance(structure, Mapping):
        by_key = dict(zip(_sorted(structure), children, strict=True))
        in_order = {key: by_key[key] for key in structure}
        if isinstance(structure, collections.defaultdict):
            return _made(type(structure), structure.default_factory, in_order)
        return in_order if type(structure) is dict else _made(type(structure), in_order)
    if _is_record(structure):
        return type(structure)(**dict(zip(_fields(structure), children, strict=True)))
    if _is_namedtuple(structure):
        return type(structure)(*children)
    if isinstance(structure, DistributedValues):
        return type(structure)(children)
    if isinstance(structure, CompositeTensor):
        return structure.of_parts(children)
    # A range, or the view of a dictionary's values, cannot hold just any leaves.
    return tuple(children) if isinstance(structure, tuple) else children


def _made(kind: Any, *arguments: Any) -> Any:
    return kind(*arguments)


def _sorted(mapping: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError as error:
        raise TypeError(f"nest only supports dicts with sortable keys. Error: {error}") from error


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_record(value: Any) -> bool:
    """Whether `value` is of an attrs class, or of a data class that is declared a structure."""
    if isinstance(value, type):
        return False
    return hasattr(type(value), "__attrs_attrs__") or (
        dataclasses.is_dataclass(value) and hasattr(type(value), "__tf_flatten__")
    )


def _fields(record: Any) -> list[str]:
    if hasattr(type(record), "__attrs_attrs__"):
        return [attribute.name for attribute in type(record).__attrs_attrs__]
    return [field.name for field in dataclasses.fields(record)]
