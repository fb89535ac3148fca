"""Makes a failing program small, greedily: each choice is simplified while the program fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from generated_programs.choices import Program


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 150) -> Program:
    """Returns a smaller program that fails.

    Args:
        program: A program that fails.
        fails: Whether a program fails.
        most: How many programs may be tried.
    """
    tried = {program}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _simpler(program):
            if candidate in tried:
                continue
            if len(tried) > most:
                return program
            tried.add(candidate)
            if fails(candidate):
                program, is_smaller = candidate, True
                break
    return program


def _simpler(value: Any) -> Iterator[Any]:
    """Yields values that are simpler by one choice, the boldest first."""
    if isinstance(value, tuple):
        if len(value) > 2:
            yield value[: len(value) // 2]
            yield value[len(value) // 2 :]
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]
        for index, part in enumerate(value):
            for simpler in _simpler(part):
                yield (*value[:index], simpler, *value[index + 1 :])
    elif dataclasses.is_dataclass(value):
        default = type(value)()
        fields = [field.name for field in dataclasses.fields(value)]
        for name in fields:
            if getattr(value, name) != getattr(default, name):
                yield dataclasses.replace(value, **{name: getattr(default, name)})
        for name in fields:
            part = getattr(value, name)
            if isinstance(part, tuple) or dataclasses.is_dataclass(part):
                for simpler in _simpler(part):
                    if simpler != () or name not in _NEEDED:
                        yield dataclasses.replace(value, **{name: simpler})


#: Of these there must be one.
_NEEDED = ("inputs", "outputs", "actions")
