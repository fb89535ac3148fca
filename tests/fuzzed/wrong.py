"""Readers that do what none should, by which the tests of `fuzzing` show that it finds that."""

from __future__ import annotations

import os
import signal
import time

from fuzzed.format import Format

GOOD = bytes(range(256)) * 4


def write(folder):
    (folder / "number").write_bytes(GOOD)


def is_changed(folder):
    return (folder / "number").read_bytes() != GOOD


def crash(folder):
    if is_changed(folder):
        os.kill(os.getpid(), signal.SIGKILL)


def hang(folder):
    if is_changed(folder):
        time.sleep(1000)


def compute(folder):
    begin = time.process_time()
    while is_changed(folder) and time.process_time() - begin < 2.5:
        pass


def remember(folder):
    if is_changed(folder):
        bytearray(b"x" * 200_000_000)


def fail(folder):
    if is_changed(folder):
        raise KeyError("number")


def guess(folder):
    return (folder / "number").read_bytes()


def look_outside(folder):
    (folder.parent / "outside" / "secret").read_text()


def leave_something_outside(folder):
    if is_changed(folder):
        os.makedirs(folder.parent / "outside" / "new", exist_ok=True)


def say_nothing(folder):
    if is_changed(folder):
        raise ValueError


#: What readers do that they should not, and what is said of it.
WRONG = {
    crash: "ended the process",
    hang: "ended the process (it hangs",
    compute: "took 2.",
    remember: "MB beyond what it had",
    fail: "raised KeyError",
    guess: "gave wrong data",
    look_outside: "touched",
    leave_something_outside: "touched",
    say_nothing: "without a message",
}

FORMATS = {read.__name__: Format(write, read, errors=(ValueError,)) for read in WRONG}
