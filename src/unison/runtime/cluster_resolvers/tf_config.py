"""The cluster that `TF_CONFIG` describes."""

from __future__ import annotations

import json
import os
from typing import Any

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.resolver import ClusterResolver


class TFConfigClusterResolver(ClusterResolver):
    """The cluster that the environment variable `TF_CONFIG` describes; none if it is not set.

    Args:
        task_type: Overrides the job that `TF_CONFIG` gives.
        task_id: Overrides the index.
        rpc_layer: Overrides the protocol.
        environment: Overrides the environment.

    Raises:
        ValueError: `TF_CONFIG` is not JSON, or does not describe a cluster.

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
        self.task_id = _index(task) if task_id is None else task_id
        self.rpc_layer = config.get("rpc_layer") if rpc_layer is None else rpc_layer
        self.environment = config.get("environment", "") if environment is None else environment
        self._master = config.get("session_master")
        try:
            self._cluster_spec = ClusterSpec(config.get("cluster", {}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"TF_CONFIG: {error}") from None

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, or of this one.

        It is `session_master`, if `TF_CONFIG` has one, and "" if this is the only task.
        """
        if self._master is not None:
            return str(self._master)
        if sum(len(tasks) for tasks in self._cluster_spec.as_dict().values()) <= 1:
            return ""
        return super().master(task_type, task_id, rpc_layer)


#: The expected form of `TF_CONFIG`, for errors.
_EXPECTED = (
    'TF_CONFIG must be JSON such as {"cluster": {"worker": ["host1:12345", "host2:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


def _tf_config() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG") or "{}"
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{_EXPECTED}. Received: {text!r:.1000} ({error})") from None
    if not isinstance(config, dict) or not all(
        isinstance(config.get(part, {}), dict) for part in ("cluster", "task")
    ):
        raise ValueError(f"{_EXPECTED}. Received: {text!r}")
    if config.get("task") and not config.get("cluster"):
        raise ValueError(f"{_EXPECTED}. Received a task without a cluster: {text!r}")
    kind = config.get("task", {}).get("type")
    if isinstance(kind, int) and not isinstance(kind, bool):
        config["task"]["type"] = str(kind)  # as TensorFlow's resolver reads it
    elif not isinstance(kind, str | None):
        raise ValueError(f"{_EXPECTED}. Received a task whose type is {kind!r}")
    return config


def _index(task: dict[str, Any]) -> int | None:
    """Returns the index of the task; some cluster managers write it as text."""
    index = task.get("index")
    if isinstance(index, str) and index.isdecimal():
        return int(index)
    if index is None or (isinstance(index, int) and not isinstance(index, bool) and index >= 0):
        return index
    raise ValueError(f"{_EXPECTED}. Received a task whose index is {index!r}")
