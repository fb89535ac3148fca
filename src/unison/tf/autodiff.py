"""`tf.autodiff`."""

from unison.tf.forward_gradients import ForwardAccumulator
from unison.tf.gradients import GradientTape

__all__ = ["ForwardAccumulator", "GradientTape"]
