"""How long a program takes until its first steps are done: `python -m benchmarks.first_steps`.

Each round starts a process for each contestant, in turns, which makes a small convolutional network
and trains it for two steps at batch 256, on two logical CPU devices. Measured are the wall time and
the processor time from the end of the imports to the end of the steps, compilation included; no
compiled program is kept. Ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.workloads import REPLICAS

_BATCH, _STEPS = 256, 2

#: The contestants; the others' ratios are to the first one.
CONTESTANTS = ("unison", "keras_data_parallel", "keras_one_device")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_steps", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="(%(default)s)")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.contestant:
        print(json.dumps(_measured(options.contestant)))
        return 0
    found: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name in CONTESTANTS:
            found[name].append(_in_a_process(name))
    first = found[CONTESTANTS[0]]
    print("| contestant | s | processor s | Unison takes |\n| --- | --- | --- | --- |")
    for name, rounds in found.items():
        wall, processor = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(a[1] / b[1] for a, b in zip(first, rounds, strict=True))
        print(f"| {name} | {wall:.2f} | {processor:.2f} | {ratio:.2f} x |")
    return 0


def _in_a_process(name: str) -> list[float]:
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, "-m", "benchmarks.first_steps", "--contestant", name]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _measured(name: str) -> list[float]:
    """Returns the wall and processor seconds of a contestant in this process."""
    scope: Any = contextlib.nullcontext()
    if name == "unison":
        import unison

        unison.set_logical_cpu_devices(REPLICAS)
        scope = unison.MirroredStrategy().scope()
    else:
        import jax

        jax.config.update("jax_num_cpu_devices", REPLICAS)
    import keras
    import numpy as np

    from benchmarks.contestants import keras_models

    if name == "keras_data_parallel":
        devices = keras.distribution.list_devices("cpu")
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    examples = _BATCH * _STEPS
    x = np.zeros((examples, 28, 28, 1), np.float32)
    y = np.zeros(examples, np.int32)
    begin = time.perf_counter(), time.process_time()
    with scope:
        model = keras_models.compiled("cnn")
    model.fit(x, y, batch_size=_BATCH, epochs=1, verbose=0)
    return [time.perf_counter() - begin[0], time.process_time() - begin[1]]


if __name__ == "__main__":
    sys.exit(main())
