"""`tf.compat.v1.ConfigProto`, which programs pass to `tf.distribute.Server`."""

from __future__ import annotations

from typing import Any

_MEMORY = "tf.config.experimental.set_memory_growth and tf.config.set_logical_device_configuration"
_DEVICES = "tf.config.set_visible_devices and tf.config.set_logical_device_configuration"

#: By the name of a field, its replacement.
_INSTEAD = {
    "allow_soft_placement": "tf.config.set_soft_device_placement",
    "cluster_def": "the cluster of tf.distribute.Server",
    "device_count": _DEVICES,
    "gpu_options": _MEMORY,
    "graph_options": "tf.function",
    "intra_op_parallelism_threads": "tf.config.threading.set_intra_op_parallelism_threads",
    "log_device_placement": "jax.debug.visualize_array_sharding",
}


class ConfigProto:
    """The configuration of a `tf.distribute.Server`.

    Args:
        inter_op_parallelism_threads: How many functions run at once, at least. A server has a
            thread for each that it is asked for, so that any number is kept.

    Raises:
        AttributeError: Another field is set; the message names what there is instead.

    Examples:
        >>> config = ConfigProto()
        >>> config.inter_op_parallelism_threads = 4

    TF: `tf.compat.v1.ConfigProto`.
    """

    __slots__ = ("inter_op_parallelism_threads",)

    def __init__(self, inter_op_parallelism_threads: int = 0, **fields: Any):
        self.inter_op_parallelism_threads = inter_op_parallelism_threads
        for name in fields:
            raise self._refused(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__slots__:
            raise self._refused(name)
        super().__setattr__(name, int(value))

    def __getattr__(self, name: str) -> Any:
        raise self._refused(name)

    @staticmethod
    def _refused(name: str) -> AttributeError:
        instead = _INSTEAD.get(name, "the functions of tf.config")
        return AttributeError(
            f"tf.compat.v1.ConfigProto has no {name} here: there are no sessions. Use {instead}."
        )
