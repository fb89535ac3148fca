"""Unison: TensorFlow's distribution system on JAX.

Strategies run one program on several replicas, variables keep their copies on the replicas
consistent, and Keras models built in a strategy's scope train on all of its devices. `unison.tf` is
the drop-in interface for tf.distribute programs.

Importing this package does not start a JAX backend and does not modify other libraries.
"""

import contextlib

from unison import hooks
from unison.lazy_loader import attach_stub
from unison.runtime import logs

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

with contextlib.suppress(ValueError):  # raised again by strategies and commands
    logs.show_what_is_asked_for()
hooks.register()
