"""Protocol buffers without their descriptors: varints, and the fields of a message.

Source: Protocol Buffers, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: The maximum number of bytes of a varint of 64 bits.
_LONGEST = 10


def read_varint(content: bytes, position: int) -> tuple[int, int]:
    """Returns the number at an offset, and the offset after it.

    Raises:
        ValueError: There is no valid number: the bytes end, or it has more than 64 bits.
    """
    value = 0
    for index, byte in enumerate(content[position : position + _LONGEST]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            if value >> 64:
                break
            return value, position + index + 1
    raise ValueError("a number ends early, or has more than 64 bits")


def varint(number: int) -> bytes:
    """Returns a number as it is written.

    Examples:
        >>> read_varint(varint(300), 0)
        (300, 2)
    """
    content = bytearray()
    while number > 127:
        content.append(number & 127 | 128)
        number >>= 7
    return bytes([*content, number])


class Fixed32(int):
    """A number that is written in 4 bytes, and not as a varint."""


def message_of(fields: Iterable[tuple[int, Any]]) -> bytes:
    """Returns a message of fields.

    Args:
        fields: The fields' numbers and values: numbers, bytes, and the fields of messages.
    """
    content = bytearray()
    for number, value in fields:
        if isinstance(value, Fixed32):
            content += varint(number << 3 | 5) + value.to_bytes(4, "little")
        elif isinstance(value, int):
            content += varint(number << 3) + varint(value % 2**64)
        else:
            value = value if isinstance(value, bytes) else message_of(value)
            content += varint(number << 3 | 2) + varint(len(value)) + value
    return bytes(content)


def cut(content: bytes, position: int, length: int) -> bytes:
    """Returns a number of bytes from an offset.

    Raises:
        ValueError: There are fewer.
    """
    if length > len(content) - position:
        raise ValueError(f"{length} bytes were expected, and {len(content) - position} are left")
    return content[position : position + length]


def fields_of(message: bytes) -> dict[int, list[Any]]:
    """Returns the values of a message's fields, by number: integers, and bytes.

    Raises:
        ValueError: It is not a valid message.
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
