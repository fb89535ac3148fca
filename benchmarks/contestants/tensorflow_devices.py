"""TensorFlow on its GPUs, or with its CPU split into logical devices."""

from __future__ import annotations

import tensorflow as tf  # noqa: TID251 -- a peer, in a process of its own

from benchmarks.workloads import REPLICAS, FitWork, RunWork


def mirrored_strategy(work: FitWork | RunWork) -> tf.distribute.MirroredStrategy:
    if work.device == "gpu":
        assert tf.config.list_physical_devices("GPU"), "TensorFlow finds no GPU."
        return tf.distribute.MirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    split = [tf.config.LogicalDeviceConfiguration() for _ in range(REPLICAS)]
    tf.config.set_logical_device_configuration(cpu, split)
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(REPLICAS)])


def versions() -> dict[str, str]:
    return {"tensorflow": tf.__version__}
