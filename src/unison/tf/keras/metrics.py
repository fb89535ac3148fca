"""`tf.keras.metrics`: Keras' metrics, and the short names of Keras 2."""

from __future__ import annotations

import keras

from unison.tf.keras.names import make_module, stand_over

KLD = kld = kullback_leibler_divergence = keras.losses.kl_divergence
MAE = mae = keras.losses.mean_absolute_error
MAPE = mape = keras.losses.mean_absolute_percentage_error
MSE = mse = keras.losses.mean_squared_error
MSLE = msle = keras.losses.mean_squared_logarithmic_error
logcosh = keras.losses.log_cosh

__getattr__ = stand_over(__name__)
make_module(f"{__name__}.experimental", {})
