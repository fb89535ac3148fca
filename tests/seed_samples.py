"""Reads the code samples of the seeds (`../shared/seeds`), which have lost their indentation.

The seeds are articles as they were found; their text is not part of this project. What indentation
said is found again by these rules:

* a line that ends with a colon opens a block, and the next line is in it;
* `return` is the last line of its block;
* a comment or a decorator starts at the margin, unless it is a block's first line;
* lines inside brackets belong to the line that opened them;
* text between two pieces of code ends all blocks.
"""

from __future__ import annotations

import io
import pathlib
import tokenize
from collections.abc import Iterator, Sequence

#: Where the seeds lie beside a checkout of the project.
SEEDS = pathlib.Path(__file__).resolve().parents[2] / "shared" / "seeds"

_IMPORT = "import tensorflow as tf"
_INDENT = "    "


def read_sample(name: str, *pieces: tuple[int, int]) -> str:
    """Returns a sample as a program that imports `unison.tf`.

    Args:
        name: What the seed's file name begins with, such as `000`.
        pieces: The first and last line of every piece of code of the sample, counted from 1.
    """
    (path,) = SEEDS.glob(f"{name}_*.txt")
    lines = path.read_text().splitlines()
    code = "".join(reindent(lines[first - 1 : last]) for first, last in pieces)
    assert _IMPORT in code, f"{path.name} {pieces} is no whole sample"
    return code.replace(_IMPORT, "import unison.tf as tf")


def reindent(lines: Sequence[str]) -> str:
    """Returns the code of `lines`, which have no indentation, with what the rules above find."""
    level = 0
    opens_block = False
    indented = []
    for statement in _statements(lines):
        begins_block, opens_block = opens_block, statement[-1].endswith(":")
        if statement[0].startswith(("#", "@")) and not begins_block:
            level = 0
        first, *continued = statement
        indented.append(_INDENT * level + first)
        indented += [_INDENT * (level + 1) + line for line in continued]
        if opens_block:
            level += 1
        elif first.split(" ")[0] == "return":
            level -= 1
    return "".join(f"{line}\n" for line in indented)


def _statements(lines: Sequence[str]) -> Iterator[list[str]]:
    """Puts the lines of one statement together."""
    statement: list[str] = []
    for line in lines:
        statement.append(line.strip())
        if not _has_open_bracket(statement):
            yield statement
            statement = []
    if statement:
        yield statement


def _has_open_bracket(lines: Sequence[str]) -> bool:
    source = io.StringIO("\n".join(lines)).readline
    depth = 0
    try:
        for token in tokenize.generate_tokens(source):
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
    except tokenize.TokenError:  # the text ends inside a bracket
        return True
    return depth > 0
