"""`tf.experimental`."""

from unison.tf.data.dataset import Optional
from unison.tf.experimental import numpy
from unison.tf.missing import names_missing_from

__all__ = ["Optional", "numpy"]

__getattr__ = names_missing_from(__name__)
