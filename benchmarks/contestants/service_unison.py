"""Unison's input service: workers in processes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np

import unison
from benchmarks import jpegs
from benchmarks.contestants.served import BATCH, CROP, Served
from benchmarks.protocol import Contestant
from benchmarks.workloads import ServiceWork
from unison.data import Dataset, service


def build(work: ServiceWork) -> Contestant:
    dataset = _arrays(work, Dataset) if work.load == "arrays" else _images()
    return _served(work, dataset, service)


def drop_in(work: ServiceWork) -> Contestant:
    """The program of `service_tf`, with `unison.tf` in the place of TensorFlow."""
    import unison.tf as tf

    def decoded(file: Any) -> Any:
        image = tf.io.decode_jpeg(file, channels=3)[:CROP, :CROP]
        return tf.image.convert_image_dtype(image, tf.float32)

    if work.load == "arrays":
        dataset = _arrays(work, tf.data.Dataset)
    else:
        files = tf.data.Dataset.from_tensor_slices(jpegs.encoded() * 32)
        dataset = files.repeat().map(decoded).batch(BATCH)
    return _served(work, dataset, tf.data.experimental.service)


def _served(work: ServiceWork, dataset: Any, service: Any) -> Contestant:
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [service.WorkerServer(service.WorkerConfig(address)) for _ in range(work.workers)]
    mode = "parallel_epochs" if work.load == "arrays" else "distributed_epoch"
    elements: Iterable[Any] = dataset.apply(service.distribute(mode, dispatcher.target))
    contestant = Served(work, elements, {"unison": unison.__version__})
    contestant.kept = dispatcher, workers  # they end with their objects
    return contestant


def _arrays(work: ServiceWork, dataset_class: Any) -> Any:
    array = np.random.default_rng(0).integers(0, 256, work.kibibytes << 10, np.uint8)
    return dataset_class.from_tensors(array).repeat()


def _images() -> Dataset:
    files = jpegs.encoded() * 32
    return Dataset.from_tensor_slices(files).repeat().map(_decoded).batch(BATCH)


def _decoded(file: bytes) -> np.ndarray:
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(file)))[:CROP, :CROP]
    return pixels.astype(np.float32) * np.float32(1 / 255)
