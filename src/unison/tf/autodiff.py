"""`tf.autodiff`."""

from unison.tf.forward_gradients import ForwardAccumulator
from unison.tf.tape import GradientTape

__all__ = ["ForwardAccumulator", "GradientTape"]
