"""Changes at random: of bytes, and of the structure of values that JSON can say.

All of them are made by a `random.Random`: who knows its seed makes them again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bytes, changed in one way."""
    changed = bytearray(data)
    count = len(changed)
    place = rng.randrange(count + 1)
    size = rng.choice([1, 2, 4, 16, 64])
    how = rng.randrange(7)
    if how == 0:
        del changed[place:]
    elif how == 1:
        for _ in range(rng.choice([1, 1, 2, 8])):
            if count:
                changed[rng.randrange(count)] ^= 1 << rng.randrange(8)
    elif how == 2:
        changed[place : place + size] = rng.randbytes(min(size, count - place))
    elif how == 3:
        changed[place:place] = rng.randbytes(size)
    elif how == 4:
        del changed[place : place + size]
    elif how == 5:
        changed[place:place] = changed[place : place + 4 * size]
    else:
        changed[place : place + size] = rng.choice([b"\0", b"\xff"]) * min(size, count - place)
    return bytes(changed)


def odd_value(rng: random.Random) -> Any:
    """What a field of a message is not expected to hold."""
    deep: Any = 1
    for _ in range(rng.choice([3, 40, 500])):
        deep = [deep] if rng.random() < 0.5 else {"is": deep}
    return rng.choice(
        [
            None,
            True,
            -1,
            0,
            1.5,
            2**31,
            2**63,
            10**30,
            float("inf"),
            float("nan"),
            "",
            "x" * rng.choice([1, 1000, 100_000]),
            "\ud800",
            "\0\n\x1b[2J",
            [],
            {},
            [None] * 1000,
            deep,
        ]
    )


def mutated_structure(rng: random.Random, value: Any) -> Any:
    """A value of JSON with something in it changed: a part replaced, dropped, doubled or added."""
    changed = copy.deepcopy(value)
    parts = list(_parts(changed))
    if not parts or rng.random() < 0.05:
        return odd_value(rng)
    inside, place = rng.choice(parts)
    how = rng.randrange(4)
    if how == 0:
        del inside[place]
    elif how == 1 and isinstance(inside, dict):
        inside[rng.choice(["is", "index", "from", "x" * 1000, "\ud800"])] = odd_value(rng)
    elif how == 1:
        inside.append(odd_value(rng))
    else:
        inside[place] = odd_value(rng)
    return changed


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        places: list[Any] = list(value)
    elif isinstance(value, list):
        places = list(range(len(value)))
    else:
        return
    for place in places:
        yield value, place
        yield from _parts(value[place])
