"""`tf.keras.models`: Keras' models, and saving as programs of Keras 2 write it."""

from __future__ import annotations

from typing import Any

import keras

from unison.tf.keras.names import make_module, stand_over
from unison.tf.keras.old_saving import load_model, save_model

__all__ = ["load_model", "model_from_config", "save_model"]


def model_from_config(config: Any, custom_objects: Any = None) -> keras.Model:
    """Returns the model that `keras.saving.serialize_keras_object` described.

    TF: `tf.keras.models.model_from_config`.
    """
    return keras.saving.deserialize_keras_object(config, custom_objects)


__getattr__ = stand_over(__name__)
make_module(f"{__name__}.experimental", {})
