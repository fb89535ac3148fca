"""Where a process learns which cluster it belongs to, and which of its tasks it is."""

from __future__ import annotations

import json
import os
from typing import Any

from unison.runtime.cluster import ClusterSpec


class ClusterResolver:
    """What names a cluster's tasks and this process's own among them.

    Attributes:
        task_type: The job of this process (`"worker"`, `"chief"`); None if it is in no cluster.
        task_id: Its index in the job.
        rpc_layer: The protocol that addresses are prefixed with; None: none.
        environment: Where the process runs (`"google"`, say); the empty string if unknown.

    TF: `tf.distribute.cluster_resolver.ClusterResolver`.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str = ""

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks."""
        raise NotImplementedError("A cluster resolver must say what its cluster is.")

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, this process's by default; "" outside a cluster."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        cluster = self.cluster_spec()
        if task_type is None or task_id is None or not cluster.jobs:
            return ""
        address = cluster.task_address(task_type, task_id)
        protocol = self.rpc_layer if rpc_layer is None else rpc_layer
        return f"{protocol}://{address}" if protocol else address


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program itself describes.

    Args:
        cluster_spec: The cluster.
        master: What `master()` returns without a task.
        task_type: The job of this process.
        task_id: Its index in the job.
        environment: Where the process runs.
        num_accelerators: How many of which accelerators a task has, such as `{"GPU": 2}`.
        rpc_layer: The protocol that addresses are prefixed with.

    TF: `tf.distribute.cluster_resolver.SimpleClusterResolver`.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ):
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"cluster_spec must be a ClusterSpec. Received: {cluster_spec!r}")
        self.task_type = task_type
        self.task_id = task_id
        self.environment = environment
        self.rpc_layer = rpc_layer
        self._cluster_spec = cluster_spec
        self._master = master
        self._num_accelerators = num_accelerators or {}

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        if task_type is None or task_id is None:
            return self._master
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(self) -> dict[str, int]:
        """Returns how many of which accelerators a task has."""
        return self._num_accelerators


class TFConfigClusterResolver(ClusterResolver):
    """The cluster that the environment variable `TF_CONFIG` describes; none if it is not set.

    Args:
        task_type: Overrides the job that `TF_CONFIG` gives.
        task_id: Overrides the index.
        rpc_layer: Overrides the protocol.
        environment: Overrides the environment.

    Raises:
        ValueError: While it is read: `TF_CONFIG` is not JSON, or no description of a cluster.

    TF: `tf.distribute.cluster_resolver.TFConfigClusterResolver`.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ):
        config = _tf_config()
        task = config.get("task", {})
        self.task_type = task.get("type") if task_type is None else task_type
        index = task.get("index") if task_id is None else task_id
        self.task_id = None if index is None else int(index)
        self.rpc_layer = config.get("rpc_layer") if rpc_layer is None else rpc_layer
        self.environment = config.get("environment", "") if environment is None else environment
        self._cluster_spec = ClusterSpec(config.get("cluster", {}))

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec


def _tf_config() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG") or "{}"
    expected = (
        'TF_CONFIG must be JSON such as {"cluster": {"worker": ["host1:12345", "host2:12345"]}, '
        '"task": {"type": "worker", "index": 0}}'
    )
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{expected}. Received: {text!r} ({error})") from None
    if not isinstance(config, dict) or not all(
        isinstance(config.get(part, {}), dict) for part in ("cluster", "task")
    ):
        raise ValueError(f"{expected}. Received: {text!r}")
    return config
