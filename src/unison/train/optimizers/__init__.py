"""TensorFlow 1's optimizers, and an aggregation method for those of Keras and Optax."""

from unison.train.optimizers.aggregation import aggregated, with_aggregation
from unison.train.optimizers.base import Optimizer
from unison.train.optimizers.methods import (
    Adadelta,
    Adagrad,
    Adam,
    Ftrl,
    GradientDescent,
    Momentum,
    RMSProp,
)

__all__ = [
    "Adadelta",
    "Adagrad",
    "Adam",
    "Ftrl",
    "GradientDescent",
    "Momentum",
    "Optimizer",
    "RMSProp",
    "aggregated",
    "with_aggregation",
]
