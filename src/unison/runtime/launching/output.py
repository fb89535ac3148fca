"""What a worker prints, as lines."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Iterator

#: A longer line is cut in pieces, so that it does not fill the memory.
_MOST_CHARACTERS = 1 << 16

#: Seconds between two states of a progress bar that are shown.
_BAR_EVERY = 1.0


def printed_lines(output: int) -> Iterator[str]:
    """Yields the lines that are written to a pipe, without their ends, until it is closed.

    A line that is drawn over, by carriage returns and backspaces as progress bars do it, is its
    last state; until that is known, it is yielded once a second as it is.

    Args:
        output: The open pipe, by number.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pending = ""
    last_shown = 0.0
    has_ended = False
    while not has_ended:
        written = os.read(output, 1 << 16)
        has_ended = not written
        pending += decoder.decode(written, final=has_ended)
        *lines, pending = pending.split("\n")
        for line in lines:
            yield _last_state(line)
        drawn_over, pending = _without_older_states(pending)
        if drawn_over and time.monotonic() - last_shown > _BAR_EVERY:
            last_shown = time.monotonic()
            yield drawn_over
        if len(pending) > _MOST_CHARACTERS:
            yield pending
            pending = ""
    if last := _last_state(pending):
        yield last


def _without_older_states(line: str) -> tuple[str, str]:
    """Returns the last complete state of a line that has not ended, and what follows it."""
    # A carriage return that was read last may belong to the line's end.
    older, _, newest = line.rstrip("\r").rpartition("\r")
    return _last_state(older), newest + "\r" * (len(line) - len(line.rstrip("\r")))


def _last_state(line: str) -> str:
    if "\r" not in line:
        return line.strip("\b")
    states = (state.strip("\b") for state in reversed(line.split("\r")))
    return next((state for state in states if state.strip()), "")
