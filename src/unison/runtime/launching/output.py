"""A worker's output, as lines."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Iterator

#: Longer lines are split, so that they do not fill the memory.
_MOST_CHARACTERS = 1 << 16

#: Seconds between two displayed states of a progress bar.
_BAR_EVERY = 1.0


def printed_lines(output: int) -> Iterator[str]:
    """Yields the lines written to a pipe, without line terminators, until it is closed.

    For a line that is overwritten with carriage returns and backspaces, as by progress bars, the
    last state is yielded; until the line is complete, its current state is yielded once per second.

    Args:
        output: The file descriptor of the pipe.
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
    """Returns the last complete state of an unfinished line, and the text after it."""
    # A trailing carriage return may be part of the line terminator.
    older, _, newest = line.rstrip("\r").rpartition("\r")
    return _last_state(older), newest + "\r" * (len(line) - len(line.rstrip("\r")))


def _last_state(line: str) -> str:
    if "\r" not in line:
        return line.strip("\b")
    states = (state.strip("\b") for state in reversed(line.split("\r")))
    return next((state for state in states if state.strip()), "")
