"""`tf.keras.optimizers`: Keras' optimizers, `legacy` and `experimental`."""

from __future__ import annotations

import keras

from unison.tf.keras.names import make_module, stand_over

__getattr__ = stand_over(__name__)

make_module(
    f"{__name__}.experimental",
    {
        name: getattr(keras.optimizers, name)
        for name in (
            "Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Nadam Optimizer RMSprop SGD".split()
        )
    },
)
