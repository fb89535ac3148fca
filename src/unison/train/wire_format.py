"""Protocol buffers read without their descriptions: varints, and the fields of a message.

Source: Protocol Buffers, "Encoding".
"""

from __future__ import annotations

from typing import Any

#: A varint of 64 bits has so many bytes at most.
_LONGEST = 10


def read_varint(content: bytes, position: int) -> tuple[int, int]:
    """Returns the number that begins at a place, and the place behind it.

    Raises:
        ValueError: None does: the bytes end, or it has more than 64 bits.
    """
    value = 0
    for index, byte in enumerate(content[position : position + _LONGEST]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            if value >> 64:
                break
            return value, position + index + 1
    raise ValueError("a number ends early, or has more than 64 bits")


def cut(content: bytes, position: int, length: int) -> bytes:
    """Returns so many bytes from a place on.

    Raises:
        ValueError: There are fewer.
    """
    if length > len(content) - position:
        raise ValueError(f"{length} bytes were expected, and {len(content) - position} are left")
    return content[position : position + length]


def fields_of(message: bytes) -> dict[int, list[Any]]:
    """Returns the values of a message's fields, by number: integers, and bytes.

    Raises:
        ValueError: It is no message.
    """
    fields: dict[int, list[Any]] = {}
    value: Any
    position = 0
    while position < len(message):
        tag, position = read_varint(message, position)
        kind = tag & 7
        if kind == 0:
            value, position = read_varint(message, position)
        elif kind == 2:
            length, position = read_varint(message, position)
            value = cut(message, position, length)
            position += length
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
            value = int.from_bytes(cut(message, position, length), "little")
            position += length
        else:
            raise ValueError(f"a message has a field of the unknown kind {kind}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields
