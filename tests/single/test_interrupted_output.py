"""What a job shows of its workers after Ctrl-C."""

import pytest

from unison.cli.interrupted_output import InterruptedOutput

TRACEBACK = "Traceback (most recent call last):"


def shown_after_an_interrupt(*lines):
    shown = []
    output = InterruptedOutput(lambda worker, line: shown.append(line))
    output.interrupt()
    for line in lines:
        output(0, line)
    output.end()
    return shown


@pytest.mark.parametrize(
    "lines",
    [
        (TRACEBACK, '  File "train.py", line 3, in <module>', "KeyboardInterrupt"),
        ("Exception ignored in: <function callback at 0x7f>", TRACEBACK, "KeyboardInterrupt: "),
        # A compiled module that was being imported.
        (TRACEBACK, "  import numpy", "ImportError: numpy._core.multiarray failed to import"),
    ],
)
def test_what_the_interrupt_has_caused_is_not_shown(lines):
    assert shown_after_an_interrupt("step 1", *lines, "saved") == ["step 1", "saved"]


def test_an_error_of_the_programs_own_is_shown():
    lines = (TRACEBACK, '  File "train.py", line 3, in <module>', "ValueError: no file to save to")
    assert shown_after_an_interrupt(*lines) == list(lines)
