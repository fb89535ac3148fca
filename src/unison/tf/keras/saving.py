"""`tf.keras.saving`: Keras' functions, which also read and write directories."""

from __future__ import annotations

from unison.tf.keras.names import stand_over
from unison.tf.keras.old_saving import load_model, save_model

__all__ = ["load_model", "save_model"]

__getattr__ = stand_over(__name__)
