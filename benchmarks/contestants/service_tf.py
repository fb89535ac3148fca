"""tf.data's service: workers in processes."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf  # noqa: TID251 -- a peer, in a process of its own

from benchmarks import jpegs
from benchmarks.contestants.served import BATCH, CROP, Served
from benchmarks.protocol import Contestant
from benchmarks.workloads import ServiceWork

_service = tf.data.experimental.service

#: A worker, which ends with the process that has started it.
_WORKER = """
import sys, threading
import tensorflow as tf
service = tf.data.experimental.service
worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=sys.argv[1]))
sys.stdin.read()
"""

_SECONDS_TO_START = 120.0


def build(work: ServiceWork) -> Contestant:
    """As by default: elements are compressed with Snappy."""
    return _served(work, "AUTO")


def uncompressed(work: ServiceWork) -> Contestant:
    return _served(work, None)


def _served(work: ServiceWork, compression: str | None) -> Contestant:
    dispatcher = _service.DispatchServer()
    program = [sys.executable, "-c", _WORKER, dispatcher.target.split("://")[1]]
    workers = [
        subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for _ in range(work.workers)
    ]
    end = time.monotonic() + _SECONDS_TO_START
    while dispatcher._num_workers() < work.workers:
        if time.monotonic() > end:
            raise TimeoutError("The workers have not started.")
        time.sleep(0.1)
    mode = "parallel_epochs" if work.load == "arrays" else "distributed_epoch"
    dataset = _dataset(work).apply(
        _service.distribute(mode, dispatcher.target, compression=compression)
    )
    contestant = Served(work, dataset, {"tensorflow": tf.__version__})
    contestant.kept = dispatcher, workers
    return contestant


def _dataset(work: ServiceWork) -> tf.data.Dataset:
    if work.load == "arrays":
        array = np.random.default_rng(0).integers(0, 256, work.kibibytes << 10, np.uint8)
        return tf.data.Dataset.from_tensors(array).repeat()
    files = jpegs.encoded() * 32
    return tf.data.Dataset.from_tensor_slices(files).repeat().map(_decoded).batch(BATCH)


def _decoded(file: Any) -> Any:
    image = tf.io.decode_jpeg(file, channels=3)[:CROP, :CROP]
    return tf.image.convert_image_dtype(image, tf.float32)
