"""`CentralStorageStrategy`: one copy of the variables, several compute devices."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

from unison.runtime import device_strings
from unison.runtime.placement import memory_of
from unison.strategies.base import Strategy
from unison.strategies.extended import StrategyExtended

#: The memories of a host that JAX can name, besides the devices' own.
_HOST_MEMORIES = ("pinned_host", "unpinned_host")


class CentralStorageStrategy(Strategy):
    """One replica per compute device, and one copy of each variable, on the parameter device.

    For a step, the variables that it reads are copied to the compute devices. Their updates are
    summed over the replicas and sent to the parameter device, where the update runs once: variables
    are stored only once, and those that only the update reads (an optimizer's slots) never leave
    the device. The results are those of `MirroredStrategy`.

    Values that differ between replicas are not stored centrally: each compute device has its own
    copy of an `ON_READ` variable (such as a metric's), and of the moving statistics of a
    `BatchNormalization`. Other variables that the replicas write need an aggregation.

    Args:
        compute_devices: The replicas' devices: strings as TensorFlow writes them (`"GPU:0"`),
            `jax.Device`s, or their number. Default: all accelerators, else all logical CPU
            devices.
        parameter_device: Where the variables are stored: a device, or `"pinned_host"` or
            `"unpinned_host"` for the host's memory of the first compute device (which then runs the
            update). Default: the compute device if there is only one, else the CPU.

    Raises:
        ValueError: No device is given, or one is given twice or does not exist.

    Examples:
        >>> import unison
        >>> strategy = unison.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:2")
        >>> with strategy.scope():
        ...     total = unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)
        >>> _ = strategy.run(lambda: total.assign_add(1.5))
        >>> float(total), len(total.cell.array.addressable_shards)
        (3.0, 1)

    TF: `tf.distribute.experimental.CentralStorageStrategy`.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | jax.Device] | str | int | None = None,
        parameter_device: str | jax.Device | None = None,
    ):
        replicas = device_strings.select_devices(compute_devices)
        home = _home(replicas, parameter_device)
        is_the_only_replica = len(replicas) == 1 and home == memory_of(replicas[0])
        super().__init__(replicas, home=None if is_the_only_replica else home)
        self._extended = _CentralStorageExtended(self, home)


class _CentralStorageExtended(StrategyExtended):
    def __init__(self, strategy: Strategy, home: SingleDeviceSharding):
        super().__init__(strategy)
        (device,) = home.device_set
        self._parameter_device = device_strings.canonical_name(device)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The name of the device that stores the variables, as TensorFlow writes it."""
        return (self._parameter_device,)


def _home(
    replicas: Sequence[jax.Device], parameter_device: str | jax.Device | None
) -> SingleDeviceSharding:
    if parameter_device is None:
        return memory_of(replicas[0] if len(replicas) == 1 else device_strings.resolve("CPU:0"))
    if parameter_device not in _HOST_MEMORIES:
        return memory_of(device_strings.resolve(parameter_device))
    there = [memory.kind for memory in replicas[0].addressable_memories()]
    if parameter_device not in there:
        raise ValueError(
            f"Expected one of the memories that {replicas[0]} can reach: {', '.join(there)}. "
            f'Received: parameter_device={parameter_device!r}. Name a device, such as "CPU:0".'
        )
    return memory_of(replicas[0]).with_memory_kind(str(parameter_device))
