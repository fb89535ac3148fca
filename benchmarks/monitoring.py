"""What it costs a training of very small steps that `unison top` can watch it.

    python -m benchmarks.monitoring [--rounds 9] [--steps 2000]

The same model trains with and without a meter and its reports, in turn; this process also hears
them, which in a job the launcher does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import unison
from unison.monitoring.launcher import Monitored
from unison.monitoring.meter import Meter
from unison.monitoring.reporting import Reporter
from unison.runtime.launching import Program
from unison.strategies.observing import observe_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    x = np.random.default_rng(0).normal(size=(32 * options.steps, 8)).astype("float32")
    with unison.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def seconds_a_step() -> float:
        begin = time.perf_counter()
        model.fit(x, x[:, :1], batch_size=32, epochs=1, shuffle=False, verbose=0)
        return (time.perf_counter() - begin) / options.steps

    seconds_a_step()
    bare, watched = [], []
    with Monitored("benchmark", "workers", ["worker 0"]) as monitored:
        (program,) = monitored.programs([Program([], {})])
        reporter = Reporter(lambda told: program.on_report(json.dumps(told).encode(), 0.0))
        reporter.start()
        for _ in range(options.rounds):
            observe_steps(None)
            bare.append(seconds_a_step())
            observe_steps(reporter.meter)
            watched.append(seconds_a_step())
        reporter.end()
    meter = Meter()
    begin = time.perf_counter()
    for _ in range(100_000):
        meter._begin()
    own = (time.perf_counter() - begin) / 100_000
    print(f"without: {1e6 * statistics.median(bare):.2f} us a step")
    print(f"watched: {1e6 * statistics.median(watched):.2f} us a step")
    print(f"counting alone: {1e6 * own:.2f} us a step")


if __name__ == "__main__":
    main()
