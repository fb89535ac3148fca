"""JPEG files in `tf.data`: one program, given TensorFlow or `unison.tf`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import jpegs
from benchmarks.workloads import DataWork


def decoded(tf: Any, work: DataWork) -> tuple[Any, int]:
    """Returns batches of a part of images of one size, and the sum of their labels."""

    def function(file: Any, label: Any) -> Any:
        image = tf.io.decode_jpeg(file, channels=3)[: jpegs.CROP, : jpegs.CROP]
        return tf.cast(image, tf.float32) / 255, label

    return _mapped(tf, work, jpegs.encoded(), function)


def resized(tf: Any, work: DataWork) -> tuple[Any, int]:
    """Returns batches of images of several sizes, brought to one, and the sum of their labels."""

    def function(file: Any, label: Any) -> Any:
        image = tf.image.convert_image_dtype(tf.io.decode_jpeg(file, channels=3), tf.float32)
        return tf.image.random_flip_left_right(tf.image.resize(image, [224, 224])), label

    return _mapped(tf, work, jpegs.of_several_sizes(), function)


def _mapped(
    tf: Any, work: DataWork, files: list[bytes], function: Callable[..., Any]
) -> tuple[Any, int]:
    labels = np.arange(work.examples)
    given = [files[number % len(files)] for number in labels]
    dataset = tf.data.Dataset.from_tensor_slices((given, labels)).map(function, tf.data.AUTOTUNE)
    return dataset.batch(work.batch).prefetch(tf.data.AUTOTUNE), int(labels.sum())
