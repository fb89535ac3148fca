"""The cluster of the hosts of an Amazon SageMaker training job."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.resolver import ClusterResolver

_HOSTS = "SM_HOSTS"
_CURRENT = "SM_CURRENT_HOST"

#: The file from which SageMaker's training toolkit sets those variables; it is in every container.
_CONFIG = pathlib.Path("/opt/ml/input/config/resourceconfig.json")


class SageMakerClusterResolver(ClusterResolver):
    """The hosts of a SageMaker training job, each a worker.

    They are read from `SM_HOSTS` and `SM_CURRENT_HOST`, which the training toolkit sets, or in
    other containers from `/opt/ml/input/config/resourceconfig.json`. Where SageMaker starts the
    program with `torchrun` or `mpirun`, several processes on a host, their variables apply.

    Args:
        port: A free port of each host.

    Raises:
        RuntimeError: This is not a host of a training job.
        ValueError: The variables or the file are malformed.

    Source: the SageMaker Training Toolkit's `ENVIRONMENT_VARIABLES.md`, and "How Amazon SageMaker
    AI Provides Training Information" (distributed training configuration).
    """

    environment = "sagemaker"

    def __init__(self, port: int = 7777):
        hosts, current = _from_environment() or _from_file()
        is_list = isinstance(hosts, list) and all(isinstance(host, str) and host for host in hosts)
        if not is_list or current not in hosts:
            raise ValueError(
                f'Expected a list of hosts such as ["algo-1", "algo-2"] in {_HOSTS}, and one of '
                f"them in {_CURRENT}. Received: {hosts!r} and {current!r}"
            )
        self.task_type = "worker"
        self.task_id = hosts.index(current)
        self._cluster = ClusterSpec({"worker": [f"{host}:{port}" for host in hosts]})

    @staticmethod
    def is_here() -> bool:
        """Returns whether this process belongs to a training job."""
        return bool(os.environ.get(_HOSTS)) or _CONFIG.is_file()

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster


def _from_environment() -> tuple[Any, Any] | None:
    text = os.environ.get(_HOSTS)
    return (_parsed(text, _HOSTS), os.environ.get(_CURRENT)) if text else None


def _from_file() -> tuple[Any, Any]:
    try:
        config = _parsed(_CONFIG.read_text(), str(_CONFIG))
    except OSError as error:
        raise RuntimeError(
            f"The environment variable {_HOSTS} is not set, and {_CONFIG} cannot be read ({error}):"
            " this process does not belong to a SageMaker training job."
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"Expected a JSON object in {_CONFIG}. Received: {config!r}")
    return config.get("hosts"), config.get("current_host")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"Expected JSON in {where}. Received: {text!r} ({error})") from None
