"""How long saving stops the training: `python -m benchmarks.checkpoint_stall [--peer NAME=PYTHON]`.

Saves a state of one array per 16 MB, in turn by each contestant, each in a process of its own:
Unison's checkpoint as it is and asynchronous, and Orbax' and TensorFlow's asynchronous ones where
`--peer orbax=...` and `--peer tf=...` name interpreters that have them. Prints medians in
milliseconds: until the call returned, and until the file was written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

MEGABYTES = (1, 100, 1000)
ROUNDS = 3

_COMMON = """
import json, os, shutil, sys, time
import numpy as np
megabytes, folder, rounds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
count = max(megabytes // 16, 1)
arrays = [np.random.default_rng(i).random(megabytes * 250_000 // count).astype(np.float32)
          for i in range(count)]
def measure(save, wait):
    times = []
    for number in range(rounds + 1):
        path = os.path.join(folder, f"c{number}")
        begin = time.perf_counter()
        save(path)
        stalled = time.perf_counter()
        wait()
        times.append([stalled - begin, time.perf_counter() - begin])
        for name in os.listdir(folder):
            found = os.path.join(folder, name)
            shutil.rmtree(found) if os.path.isdir(found) else os.remove(found)
    print(json.dumps(times[1:]))
"""

_UNISON = """
import unison
from unison.train import Checkpoint, CheckpointOptions
checkpoint = Checkpoint(state=[unison.Variable(array) for array in arrays])
options = CheckpointOptions(enable_async={is_async})
measure(lambda path: checkpoint.write(path, options), checkpoint.sync)
"""

_ORBAX = """
import jax, orbax.checkpoint as ocp
state = [jax.numpy.asarray(array) for array in arrays]
checkpointer = ocp.StandardCheckpointer()
measure(lambda path: checkpointer.save(path, state), checkpointer.wait_until_finished)
"""

_TENSORFLOW = """
import tensorflow as tf
checkpoint = tf.train.Checkpoint(state=[tf.Variable(array) for array in arrays])
options = tf.train.CheckpointOptions(enable_async=True)
measure(lambda path: checkpoint.save(path, options), checkpoint.sync)
"""

_PEERS = {"orbax": ("Orbax, asynchronous", _ORBAX), "tf": ("TensorFlow, asynchronous", _TENSORFLOW)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--megabytes", type=int, nargs="*", default=MEGABYTES)
    arguments = parser.parse_args()
    contestants = [
        ("Unison", sys.executable, _UNISON.format(is_async=False)),
        ("Unison, asynchronous", sys.executable, _UNISON.format(is_async=True)),
    ]
    for peer in arguments.peer:
        name, _, python = peer.partition("=")
        contestants.append((_PEERS[name][0], python, _PEERS[name][1]))
    print("| state | contestant | stalled, ms | written after, ms |\n| --- | --- | --- | --- |")
    for megabytes in arguments.megabytes:
        for name, python, program in contestants:
            times = _measured(python, program, megabytes, arguments.rounds)
            stalled, written = (statistics.median(t) * 1000 for t in zip(*times, strict=True))
            print(f"| {megabytes} MB | {name} | {stalled:.1f} | {written:.1f} |", flush=True)


def _measured(python: str, program: str, megabytes: int, rounds: int) -> list[list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, "-c", _COMMON + program, str(megabytes), folder, str(rounds)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
