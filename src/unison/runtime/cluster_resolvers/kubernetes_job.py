"""The cluster of the pods of an indexed Kubernetes job."""

from __future__ import annotations

import os
import pathlib
import socket
from typing import Any

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.resolver import ClusterResolver

#: The variable with the index of a pod of an indexed job.
_INDEX = "JOB_COMPLETION_INDEX"

#: The file with the name of a pod's namespace.
_NAMESPACE = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesJobClusterResolver(ClusterResolver):
    """The pods of an indexed job with a headless service; all are workers, by their index.

    The pods find each other by the DNS names that the service provides: the job's template must
    name it as its `subdomain`. `unison run --env kubernetes` prints such a job, which does not need
    a resolver.

    Args:
        workers: The number of pods. Default: the job's `completions`, queried with the package
            `kubernetes`; the service account must be allowed to get jobs.
        port: The port at which each pod listens.
        override_client: A client of Kubernetes' batch API to use instead of one from that package.

    Raises:
        RuntimeError: This is not a pod of an indexed job, or the job has no service.
        ImportError: The package is not installed, and neither `workers` nor a client is given.
    """

    environment = "kubernetes"

    def __init__(self, workers: int | None = None, port: int = 8470, override_client: Any = None):
        if not self.is_here():
            raise RuntimeError(
                f"The environment variable {_INDEX} is not set: this pod does not belong to an "
                "indexed job. Set completionMode: Indexed."
            )
        self.task_type = "worker"
        self.task_id = int(os.environ[_INDEX])
        name, _, domain = socket.getfqdn().partition(".")
        job = name.removesuffix(f"-{self.task_id}")
        if not domain or job == name:
            raise RuntimeError(
                f"Expected the pod's name to be JOB-{self.task_id}.SERVICE. Received: "
                f"{socket.getfqdn()!r}. Give the job's template the name of a headless service as "
                "its subdomain."
            )
        if workers is None:
            workers = _completions(job, override_client or _batch_api())
        hosts = [f"{job}-{index}.{domain}" for index in range(workers)]
        self._cluster = ClusterSpec({"worker": [f"{host}:{port}" for host in hosts]})

    @staticmethod
    def is_here() -> bool:
        """Returns whether this is a pod of an indexed job."""
        return _INDEX in os.environ

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster


def _completions(job: str, client: Any) -> int:
    return int(client.read_namespaced_job(job, _NAMESPACE.read_text().strip()).spec.completions)


def _batch_api() -> Any:
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ImportError(
            "KubernetesJobClusterResolver needs the package `kubernetes` to query the number of "
            "the job's pods: pip install 'unison[k8s]', or pass workers."
        ) from error
    config.load_incluster_config()
    return client.BatchV1Api()
