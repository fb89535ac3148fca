"""Unison's input service: workers in processes."""

from __future__ import annotations

import io

import numpy as np

import unison
from benchmarks import jpegs
from benchmarks.contestants.served import BATCH, CROP, Served
from benchmarks.protocol import Contestant
from benchmarks.workloads import ServiceWork
from unison.data import Dataset, service


def build(work: ServiceWork) -> Contestant:
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [service.WorkerServer(service.WorkerConfig(address)) for _ in range(work.workers)]
    mode = "parallel_epochs" if work.load == "arrays" else "distributed_epoch"
    dataset = _dataset(work).apply(service.distribute(mode, dispatcher.target))
    contestant = Served(work, dataset, {"unison": unison.__version__})
    contestant.kept = dispatcher, workers  # they end with their objects
    return contestant


def _dataset(work: ServiceWork) -> Dataset:
    if work.load == "arrays":
        array = np.random.default_rng(0).integers(0, 256, work.kibibytes << 10, np.uint8)
        return Dataset.from_tensors(array).repeat()
    files = jpegs.encoded() * 32
    return Dataset.from_tensor_slices(files).repeat().map(_decoded).batch(BATCH)


def _decoded(file: bytes) -> np.ndarray:
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(file)))[:CROP, :CROP]
    return pixels.astype(np.float32) * np.float32(1 / 255)
