"""`tf.autodiff`."""

from unison.tf.gradients import ForwardAccumulator, GradientTape

__all__ = ["ForwardAccumulator", "GradientTape"]
