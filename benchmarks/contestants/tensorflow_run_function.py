"""TensorFlow: `strategy.run` inside a `tf.function`."""

from __future__ import annotations

from benchmarks.contestants import tensorflow_run
from benchmarks.protocol import Contestant
from benchmarks.workloads import RunWork


def build(work: RunWork) -> Contestant:
    return tensorflow_run.build(work, in_function=True)
