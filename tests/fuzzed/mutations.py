"""Changes of files, by random numbers: of bytes, and of what JSON holds."""

import json

#: Numbers that lengths are replaced by.
LENGTHS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**45, 2**63 - 1, 2**64 - 1)

#: How deep lists lie in each other where that is the mutation; JSON itself bears some hundred.
DEEP = 400


def flip(data, chance):
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def overwrite(data, chance):
    for _ in range(chance.randint(1, 16)):
        if data:
            data[chance.randrange(len(data))] = chance.choice([0, 127, 128, 255, 13, 34, 44, 91])


def truncate(data, chance):
    del data[chance.randrange(len(data) + 1) :]


def insert(data, chance):
    place = chance.randrange(len(data) + 1)
    data[place:place] = chance.randbytes(chance.randint(1, 64))


def delete(data, chance):
    place = chance.randrange(len(data) + 1)
    del data[place : place + chance.randint(1, 64)]


def zero(data, chance):
    place = chance.randrange(len(data) + 1)
    size = min(chance.randint(1, 512), len(data) - place)
    data[place : place + size] = bytes(size)


def splice(data, chance):
    """Puts a piece of the file over another place."""
    if data:
        size = chance.randint(1, min(256, len(data)))
        source, target = (chance.randrange(len(data) - size + 1) for _ in range(2))
        data[target : target + size] = data[source : source + size]


def repeat(data, chance):
    place = chance.randrange(len(data) + 1)
    data[place:place] = data[place : place + chance.randint(1, 128)] * chance.choice([1, 1, 9, 99])


def exchange(data, chance):
    """Exchanges the two parts of the file."""
    place = chance.randrange(len(data) + 1)
    data[:] = data[place:] + data[:place]


def lengthen(data, chance):
    """Writes a length that nothing has where one may be."""
    size = chance.choice([1, 2, 4, 8])
    if len(data) >= size:
        place = chance.randrange(len(data) - size + 1)
        number = chance.choice([*LENGTHS, len(data) - 1, len(data), len(data) + 1]) % 2 ** (
            8 * size
        )
        data[place : place + size] = number.to_bytes(size, chance.choice(["little", "big"]))


def replace(data, chance):
    data[:] = chance.randbytes(chance.randint(0, 2 * len(data) + 10))


OF_BYTES = (
    flip, flip, flip, overwrite, truncate, insert, delete, zero, splice, repeat, exchange, lengthen,
    lengthen, replace,
)  # fmt: skip


def changed_bytes(data, chance):
    """Returns bytes with one change, and its name."""
    change = chance.choice(OF_BYTES)
    changed = bytearray(data)
    change(changed, chance)
    return bytes(changed), change.__name__


def nested(depth, inner=1):
    for _ in range(depth):
        inner = [inner]
    return inner


def hostile(chance, outside):
    """A value that somebody might hope nobody has thought of.

    Args:
        chance: Random numbers.
        outside: The path of a folder that is none of the reader's.
    """
    return chance.choice(
        [
            -1, 0, 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 1e999, -1e999,
            float("nan"), 0.5, True, None, "", "x", "../outside", "..", ".", outside,
            f"{outside}/secret", "/etc/passwd", "a/../../outside", "a\0b", "\ud800", "7" * 5000,
            "x" * 100_000, [], {}, [[]], [1, 2, 3], {"a": 1}, [0] * 10_000, nested(DEEP),
            "object", "O,O", "<f4", "V8", "__class__", "_unison_waiting", "9" * 15, "-1",
        ]
    )  # fmt: skip


def changed_value(value, chance, outside):
    """Returns a JSON value in which one part is another one, and the name of the change.

    Args:
        value: What was decoded; it is left as it is.
        chance: Random numbers.
        outside: See `hostile`.
    """
    value = json.loads(json.dumps(value))
    places = [*_places(value)]
    if not places:
        return hostile(chance, outside), "root"
    owner, key = chance.choice(places)
    how = chance.choice(["hostile"] * 6 + ["remove", "near", "other", "add", "twice"])
    if how == "remove":
        del owner[key]
    elif how == "near" and isinstance(owner[key], int):
        owner[key] += chance.choice([-1, 1, 7])
    elif how == "other":
        other, place = chance.choice(places)
        owner[key] = json.loads(json.dumps(other[place]))
    elif how == "add" and isinstance(owner, dict):
        owner[chance.choice(["more", "../outside", "0", "a\0b"])] = hostile(chance, outside)
    elif how == "twice" and isinstance(owner, list):
        owner.insert(key, owner[key])
    else:
        owner[key] = hostile(chance, outside)
    return value, f"{how} {key!r}"


def _places(value):
    """Yields every part of a value, as its owner and its key there."""
    keys = [*value] if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])
