"""`OneDeviceStrategy`: a strategy's interface on a single device."""

from __future__ import annotations

import jax

from unison.runtime import device_strings
from unison.strategies.base import Strategy


class OneDeviceStrategy(Strategy):
    """One replica, on the given device: to test a distributed program, or to run it on one device.

    Args:
        device: A string as TensorFlow writes it (`"GPU:0"`), or a `jax.Device`.

    Examples:
        >>> import unison
        >>> unison.OneDeviceStrategy("CPU:0").run(lambda: 3)
        Array(3, dtype=int32)

    TF: `tf.distribute.OneDeviceStrategy`.
    """

    def __init__(self, device: str | jax.Device):
        super().__init__([device_strings.resolve(device)], may_be_alone=True)
