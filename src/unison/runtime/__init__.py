"""Devices, threads, device names, and the processes of a job.

Importing it starts no backend and changes no configuration. `devices` makes logical CPU devices and
sizes XLA's thread pool before the backend starts; `device_strings` turns the ways to name a device
("GPU:1", a `jax.Device`, a count) into `jax.Device`s; `private_jax` is the only file that uses
JAX's private names. `launching` starts the workers of a job.
"""

from unison.lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
