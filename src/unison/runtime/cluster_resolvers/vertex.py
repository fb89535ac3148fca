"""The cluster of the replicas of a Vertex AI training job."""

from __future__ import annotations

import json
import os
from typing import Any

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.resolver import ClusterResolver

_VARIABLE = "CLUSTER_SPEC"

#: The worker pools whose replicas train together: the primary replica, and the other workers.
_TRAINING = ("workerpool0", "workerpool1")
_EVALUATORS = "workerpool3"

_EXPECTED = (
    f'Expected {_VARIABLE} to be JSON such as {{"cluster": {{"workerpool0": ["host1:2222"], '
    '"workerpool1": ["host2:2222"]}, "task": {"type": "workerpool1", "index": 0}}'
)


class VertexClusterResolver(ClusterResolver):
    """The replicas of the first two worker pools of a Vertex AI job, each a worker.

    The first pool has the primary replica, which is worker 0, the second one the others. A replica
    of the fourth pool is an evaluator; the third one is for parameter servers and reduction
    servers, which Unison does not use.

    Raises:
        RuntimeError: `CLUSTER_SPEC` is not set, or this replica belongs to the third pool.
        ValueError: `CLUSTER_SPEC` is malformed.

    Source: Vertex AI, "Distributed training" (the structure of the training cluster, and the format
    of `CLUSTER_SPEC`).
    """

    environment = "vertex"

    def __init__(self) -> None:
        text = os.environ.get(_VARIABLE)
        if not text:
            raise RuntimeError(
                f"The environment variable {_VARIABLE} is not set: this process does not belong to "
                "a Vertex AI job of several replicas."
            )
        pools, pool, index = _parsed(text)
        first, second = (pools.get(name, []) for name in _TRAINING)
        evaluators = pools.get(_EVALUATORS, [])
        if pool == _EVALUATORS:
            self.task_type, self.task_id = "evaluator", index
        elif pool in _TRAINING:
            self.task_type = "worker"
            self.task_id = index + (len(first) if pool == _TRAINING[1] else 0)
        else:
            raise RuntimeError(
                "Expected a replica of the first, second or fourth worker pool, which train or "
                f"evaluate. Received: {pool!r}"
            )
        cluster = {"worker": [*first, *second]}
        if evaluators:
            cluster["evaluator"] = evaluators[:1]
        self._cluster = ClusterSpec(cluster)

    @staticmethod
    def is_here() -> bool:
        """Returns whether `CLUSTER_SPEC` describes worker pools."""
        try:
            return bool(_parsed(os.environ.get(_VARIABLE, ""))[0].get(_TRAINING[0]))
        except ValueError:  # it may be another program's variable
            return False

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster


def _parsed(text: str) -> tuple[dict[str, list[str]], str, int]:
    """Returns the pools, this replica's pool, and its index there."""
    try:
        described: Any = json.loads(text)
        pools, task = described["cluster"], described["task"]
        pool, index = task["type"], int(task["index"])
        are_addresses = all(
            isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)
            for hosts in pools.values()
        )
        if not are_addresses or not 0 <= index < len(pools[pool]):
            raise ValueError("the task is not in the cluster")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{_EXPECTED}. Received: {text!r} ({error})") from None
    return pools, pool, index
