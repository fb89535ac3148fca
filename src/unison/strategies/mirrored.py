"""`MirroredStrategy`: synchronous training on the devices of one process."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from unison.collectives import CommunicationOptions, CrossDeviceOps
from unison.runtime import device_strings
from unison.strategies.base import Strategy


class MirroredStrategy(Strategy):
    """One replica per device; every variable has an equal copy on each.

    Args:
        devices: The replicas' devices: strings as TensorFlow writes them (`"GPU:0"`),
            `jax.Device`s, or their number. Default: all accelerators, else all logical CPU
            devices.
        cross_device_ops: How the values of the devices are combined: a `NcclAllReduce`, a
            `HierarchicalCopyAllReduce`, a `ReductionToOneDevice` or a custom one (see
            `unison.collectives`). Default: XLA chooses.
        batch_shares: The proportions in which a global batch is divided among the replicas, if some
            devices are faster than others: a number for each; or `"measured"`, so that the strategy
            measures their speed while Keras' `fit` runs (or when `measure_batch_shares` is called),
            and divides accordingly. Default: equal parts.
        communication_options: How gradients are communicated, and whether to determine the fastest
            way in the first steps (`auto_tune`).

    Raises:
        ValueError: No device is given, or one is given twice or does not exist; or the shares are
            invalid.
        TypeError: `cross_device_ops` is not a `CrossDeviceOps`.
        RuntimeError: This process is one of several (of `unison run`, torchrun, srun, ...), which
            would each train their own model; `UNISON_ALONE=1` allows that.

    Examples:
        >>> import unison
        >>> unison.MirroredStrategy(["CPU:0", "CPU:1"]).num_replicas_in_sync
        2
        >>> unison.MirroredStrategy(["CPU:0", "CPU:1"], batch_shares=[3, 1]).batch_shares
        (0.75, 0.25)

    TF: `tf.distribute.MirroredStrategy`.
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | str | int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        batch_shares: Sequence[float] | str | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        if not isinstance(cross_device_ops, CrossDeviceOps | None):
            raise TypeError(
                "cross_device_ops must be a CrossDeviceOps, such as ReductionToOneDevice(). "
                f"Received: {cross_device_ops!r}"
            )
        super().__init__(
            device_strings.select_devices(devices),
            cross_device_ops,
            batch_shares=batch_shares,
            communication_options=communication_options,
        )
