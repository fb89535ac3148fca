"""`tf.keras.preprocessing`, with the names of Keras 2."""

from __future__ import annotations

from unison.tf.keras.names import stand_over
from unison.tf.keras.preprocessing import image, sequence, text
from unison.tf.keras.utils import (
    image_dataset_from_directory,
    text_dataset_from_directory,
    timeseries_dataset_from_array,
)

__all__ = [
    "image",
    "image_dataset_from_directory",
    "sequence",
    "text",
    "text_dataset_from_directory",
    "timeseries_dataset_from_array",
]

__getattr__ = stand_over(__name__)
