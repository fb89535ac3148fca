"""The public API is what it is meant to be (see `tests/public_api.py`)."""

import difflib
import inspect
import typing

import pytest

import public_api


def test_the_public_api_is_the_recorded_one():
    recorded = public_api.FILE.read_text("utf-8").splitlines()
    found = public_api.description().splitlines()
    changes = list(difflib.unified_diff(recorded, found, "recorded", "found", n=0, lineterm=""))
    if changes:
        pytest.fail(
            "The public API has changed:\n"
            + "\n".join(changes)
            + f"\nIf that is meant, say so in CHANGELOG.md and run `{public_api.COMMAND}`.",
            pytrace=False,
        )


def test_it_holds_every_public_name():
    recorded = public_api.FILE.read_text("utf-8").splitlines()
    described = {line.partition(": ")[0] for line in recorded}
    assert len(described) > 1000
    assert [name for name in public_api.public_names() if name not in described] == []


NOTHING = object()


class Field(typing.NamedTuple):
    size: int = 3


class Example:
    def __init__(self, first, /, second: "int" = 1, *rest, third=Field, **others): ...

    def method(self, *, only: "str | None" = None) -> "int": ...

    @classmethod
    def made(cls) -> "Example": ...

    @property
    def size(self): ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (Example.method, "(self, *, only: str | None = None) -> int"),
        (Example.made, "() -> Example"),
        (Example.__init__, "(self, first, /, second: int = 1, *rest, third = Field, **others)"),
        (Field.__new__, "(_cls, size: int = 3)"),
        (lambda callback=NOTHING: None, "(callback = <object>)"),
        (lambda kind=inspect.Parameter.empty: None, "(kind)"),
    ],
    ids="method class-method constructor named-tuple object nothing".split(),
)
def test_a_signature_is_the_same_text_with_every_python(function, text):
    assert public_api._signature(function) == text
