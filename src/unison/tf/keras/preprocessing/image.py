"""`tf.keras.preprocessing.image`, as Keras keeps it for TensorFlow."""

from __future__ import annotations

from unison.tf.keras.names import stand_over

__getattr__ = stand_over(__name__, source="keras._tf_keras.keras.preprocessing.image")
