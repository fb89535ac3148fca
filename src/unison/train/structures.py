"""Nested Python structures as JSON, with leaves of the caller's choice. Nothing is pickled."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from unison.storage.decoding import named_tuple, plain_dict, plain_list


def encode_structure(structure: Any, encode_leaf: Callable[[Any], Any]) -> Any:
    """Returns `structure` as JSON.

    Args:
        structure: Dictionaries with text as keys, lists, tuples and named tuples, of numbers,
            text, bytes, None and leaves, in any nesting.
        encode_leaf: Returns the JSON for a leaf; called for everything else.

    Examples:
        >>> encode_structure({"position": 3, "order": (2, 1)}, repr)
        {'dict': {'position': 3, 'order': {'tuple': [2, 1]}}}
    """

    def encode(value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": {key: encode(item) for key, item in value.items()}}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = [encode(item) for item in value]
            return {"named": [type(value).__name__, list(value._fields), items]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [encode(item) for item in value]}
        return {"leaf": encode_leaf(value)}

    return encode(structure)


def decode_structure(encoded: Any, decode_leaf: Callable[[Any], Any]) -> Any:
    """Returns the structure that `encode_structure` encoded.

    Args:
        encoded: Its result.
        decode_leaf: Returns the leaf for a result of `encode_leaf`.

    Raises:
        ValueError, TypeError: It is not a result of `encode_structure`.
        RecursionError: It is nested too deeply.
    """

    def decode(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "leaf":
            return decode_leaf(content)
        if kind == "bytes":
            return base64.b64decode(content, validate=True)
        if kind == "dict":
            return {key: decode(item) for key, item in plain_dict(content).items()}
        if kind == "named":
            name, fields, items = plain_list(content, 3)
            return named_tuple(name, fields)(*map(decode, plain_list(items)))
        if kind not in ("list", "tuple"):
            raise ValueError(f"expected a structure, received {kind!r}")
        return (list if kind == "list" else tuple)(map(decode, plain_list(content)))

    return decode(encoded)
