"""`tf.distribute.experimental`."""

from unison.strategies import ValueContext
from unison.tf.missing import names_missing_from

__all__ = ["ValueContext"]

__getattr__ = names_missing_from(__name__)
