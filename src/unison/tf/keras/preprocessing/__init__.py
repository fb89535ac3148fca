"""`tf.keras.preprocessing`, with what Keras 2 had in it."""

from __future__ import annotations

from unison.tf.keras.names import stand_over
from unison.tf.keras.preprocessing import image, sequence, text

__all__ = ["image", "sequence", "text"]

__getattr__ = stand_over(__name__)
