"""`tf.keras.losses`: Keras' losses, `Reduction`, and the short names of Keras 2."""

from __future__ import annotations

from typing import ClassVar

import keras

from unison.tf.keras.names import stand_over

KLD = kld = kullback_leibler_divergence = keras.losses.kl_divergence
MAE = mae = keras.losses.mean_absolute_error
MAPE = mape = keras.losses.mean_absolute_percentage_error
MSE = mse = keras.losses.mean_squared_error
MSLE = msle = keras.losses.mean_squared_logarithmic_error
logcosh = keras.losses.log_cosh


class Reduction:
    """The reduction of a loss over the examples of a batch.

    TF: `tf.keras.losses.Reduction` (Keras 2). Keras 3 takes the same words as strings.

    Attributes:
        AUTO: The mean over the batch.
        NONE: Not at all: one value an example, for `tf.nn.compute_average_loss`.
        SUM: The sum.
        SUM_OVER_BATCH_SIZE: The mean over the batch.
    """

    AUTO: ClassVar[str] = "sum_over_batch_size"
    NONE: ClassVar[str] = "none"
    SUM: ClassVar[str] = "sum"
    SUM_OVER_BATCH_SIZE: ClassVar[str] = "sum_over_batch_size"

    @classmethod
    def all(cls) -> tuple[str, ...]:
        return (cls.AUTO, cls.NONE, cls.SUM, cls.SUM_OVER_BATCH_SIZE)


__getattr__ = stand_over(__name__)
