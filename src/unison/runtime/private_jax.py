"""The one file of Unison that touches JAX's private names.

Each name stands here with the reason why no public one does; `tests/single/test_private_jax.py`
fails loudly when JAX moves one. JAX 0.10.
"""

from __future__ import annotations

# `backends_are_initialized`: whether XLA already runs decides if devices and threads can still be
# chosen. Every public call that could tell (`jax.devices`, `jax.extend.backend.backends`) starts
# the backend in order to answer.
from jax._src import xla_bridge


def backend_is_started() -> bool:
    """Whether a JAX backend runs in this process. Does not start one."""
    return xla_bridge.backends_are_initialized()
