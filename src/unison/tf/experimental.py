"""`tf.experimental`."""

from unison.tf.data.dataset import Optional
from unison.tf.missing import names_missing_from

__all__ = ["Optional"]

__getattr__ = names_missing_from(__name__)
