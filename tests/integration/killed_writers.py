"""Kills writers of checkpoints at random instants: `killed_writers.py FOLDER KILLS SEED FORMAT`.

Each writer restores the latest checkpoint, says its number, and saves the numbers that follow,
each of which it says when it is saved. This program forks them before JAX starts, kills them, and
looks whether what the next one restores is what the last one has saved.
"""

import contextlib
import os
import random
import select
import signal
import sys
import time

import numpy as np

import unison
from unison.train import Checkpoint, CheckpointManager, CheckpointOptions

#: Seconds that a writer has to come up.
PATIENCE = 60


class Values:
    """A megabyte, all of one number."""

    number = 0

    def get_state(self):
        return {"values": np.full(250_000, self.number, np.float32), "number": self.number}

    def set_state(self, state):
        (value,) = set(state["values"].tolist())
        assert value == state["number"]
        self.number = state["number"]


def write_until_killed(folder, says, is_async, format):
    values = Values()
    variable = unison.Variable(np.zeros(250_000, np.float32))
    checkpoint = Checkpoint(format=format, values=values, variable=variable)
    manager = CheckpointManager(checkpoint, folder, max_to_keep=2)
    manager.restore_or_initialize()
    assert set(variable.numpy().tolist()) == {values.number}
    os.write(says, f"{values.number}\n".encode())
    while True:
        values.number += 1
        variable.assign(np.full(250_000, values.number, np.float32))
        manager.save(options=CheckpointOptions(enable_async=is_async))
        manager.sync()
        os.write(says, f"{values.number}\n".encode())


def run_and_kill(folder, chance, format):
    """Returns the number that a writer has restored, and the last one that it saved."""
    hears, says = os.pipe()
    writer = os.fork()
    if not writer:
        os.close(hears)
        with contextlib.suppress(BaseException):
            write_until_killed(folder, says, chance.random() < 0.5, format)
        os._exit(1)
    os.close(says)
    said = b""
    if chance.random() < 0.9:  # otherwise while it starts
        while said.count(b"\n") < 2:  # the first save starts JAX
            assert select.select([hears], [], [], PATIENCE)[0], "A writer does not come up."
            more = os.read(hears, 4096)
            assert more, "A writer has failed."
            said += more
        time.sleep(chance.random() * 0.06)
    else:
        time.sleep(chance.random() * 0.5)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    while more := os.read(hears, 4096):
        said += more
    os.close(hears)
    numbers = [int(line) for line in said.split()]
    return (numbers[0], numbers[-1]) if numbers else None


def main(folder, kills, seed, format):
    chance = random.Random(seed)
    saved, is_known = 0, True
    for _ in range(kills):
        numbers = run_and_kill(folder, chance, format)
        if numbers is not None:
            restored, last = numbers
            # One save may have been complete when its writer was killed before it could say so.
            assert saved <= restored
            assert restored <= saved + 1 or not is_known, (restored, saved)
            saved, is_known = last, True
        else:
            is_known = False
    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    assert len(left) <= 1, left
    print(f"{kills} kills, {saved} saved")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
