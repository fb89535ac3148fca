"""`tf.keras.preprocessing`, with the names of Keras 2."""

from __future__ import annotations

from unison.tf.keras.names import stand_over
from unison.tf.keras.preprocessing import image, sequence, text

__all__ = ["image", "sequence", "text"]

__getattr__ = stand_over(__name__)
