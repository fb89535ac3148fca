"""The lines of what a worker prints."""

import os
import threading
import time

import pytest

from unison.runtime.launching.output import printed_lines


def lines_of(*pieces: bytes, pause: float = 0.0) -> list[str]:
    """What is read of pieces that are written one after the other."""
    output, into = os.pipe()

    def write():
        for piece in pieces:
            os.write(into, piece)
            time.sleep(pause)
        os.close(into)

    writer = threading.Thread(target=write)
    writer.start()
    lines = list(printed_lines(output))
    writer.join()
    os.close(output)
    return lines


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\n\r\ntwo", ["one", "", "two"]),
        (b"\n\n", ["", ""]),
        (b"no end", ["no end"]),
        (b"", []),
        (b"1%\r50%\r100%\n", ["100%"]),
        (b"\b\b\b\r100%\n", ["100%"]),
        (b"100%\r    \r\n", ["100%"]),
        ("漢字 \x1b[31mred".encode(), ["漢字 \x1b[31mred"]),
        (b"\xff\n", ["\ufffd"]),
    ],
)
def test_lines_end_where_they_should(written, lines):
    assert lines_of(written) == lines


def test_characters_and_line_ends_may_come_in_pieces():
    assert lines_of(b"\xe6", b"\xbc", b"\xa2\r", b"\nnext", pause=0.02) == ["漢", "next"]


def test_a_progress_bar_is_seen_before_it_ends():
    first, last = lines_of(b"1%\r", b"2%\r", b"3%\r100%\n", pause=0.05)
    assert first in ("1%", "2%")
    assert last == "100%"


def test_a_line_without_end_does_not_fill_the_memory():
    lines = lines_of(*[b"x" * 60_000] * 5)
    assert "".join(lines) == "x" * 300_000
    assert max(map(len, lines)) < 150_000
