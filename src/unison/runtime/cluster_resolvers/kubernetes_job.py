"""The cluster of the pods of an indexed Kubernetes job."""

from __future__ import annotations

import os
import pathlib
import socket
from typing import Any

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.ranks import number
from unison.runtime.cluster_resolvers.resolver import ClusterResolver

#: The variable with the index of a pod of an indexed job.
_INDEX = "JOB_COMPLETION_INDEX"

#: The labels of a job of a JobSet: how many were made of its template, and the index of this one.
_REPLICAS = "jobset.sigs.k8s.io/replicatedjob-replicas"
_REPLICA = "jobset.sigs.k8s.io/job-index"

#: The file with the name of a pod's namespace.
_NAMESPACE = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesJobClusterResolver(ClusterResolver):
    """The pods of an indexed job with a headless service; all are workers, by their index.

    The pods find each other by the DNS names that the service provides: the job's template must
    name it as its `subdomain`. `unison run --env kubernetes` prints such a job, which does not need
    a resolver. If the job is one of several that a JobSet has replicated, the pods of all are
    workers, in the order of the jobs.

    Args:
        workers: The number of pods of the job. Default: the job's `completions`, queried with the
            package `kubernetes`, as are its labels; the service account must be allowed to get
            jobs. If it is given, the job is taken for the only one.
        port: The port at which each pod listens.
        override_client: A client of Kubernetes' batch API to use instead of one from that package.

    Raises:
        RuntimeError: This is not a pod of an indexed job, or the job has no service.
        ValueError: The index or a label is malformed.
        ImportError: The package is not installed, and neither `workers` nor a client is given.

    Source: Kubernetes, "Job with Pod-to-Pod Communication"; JobSet, `pkg/constants` and
    `api/jobset/v1alpha2` (`jobset.sigs.k8s.io/replicatedjob-replicas`, `.../job-index`).
    """

    environment = "kubernetes"

    def __init__(self, workers: int | None = None, port: int = 8470, override_client: Any = None):
        if not self.is_here():
            raise RuntimeError(
                f"The environment variable {_INDEX} is not set: this pod does not belong to an "
                "indexed job. Set completionMode: Indexed."
            )
        self.task_type = "worker"
        index = number(_INDEX, "Kubernetes")
        job, domain = _job_and_domain(index)
        if not domain:
            raise RuntimeError(
                f"Expected the pod's name to be JOB-{index}.SERVICE. Received: "
                f"{socket.getfqdn()!r}. Give the job's template the name of a headless service as "
                "its subdomain."
            )
        jobs, own = [job], 0
        if workers is None:
            described = _described(job, override_client or _batch_api())
            workers = int(described.spec.completions)
            jobs, own = _replicated(job, getattr(described, "metadata", None))
        hosts = [f"{each}-{pod}.{domain}" for each in jobs for pod in range(workers)]
        self.task_id = own * workers + index
        self._cluster = ClusterSpec({"worker": [f"{host}:{port}" for host in hosts]})

    @staticmethod
    def is_here() -> bool:
        """Returns whether this is a pod of an indexed job."""
        return _INDEX in os.environ

    @staticmethod
    def has_service() -> bool:
        """Returns whether this is such a pod, and has a name by which others find it."""
        index = os.environ.get(_INDEX, "")
        return index.isdecimal() and bool(_job_and_domain(int(index))[1])

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster


def _job_and_domain(index: int) -> tuple[str, str]:
    """Returns the job's name and the domain of its pods' names; empty if the pod has none."""
    name, _, domain = socket.getfqdn().partition(".")
    job = name.removesuffix(f"-{index}")
    return (job, domain) if job != name else ("", "")


def _described(job: str, client: Any) -> Any:
    return client.read_namespaced_job(job, _NAMESPACE.read_text().strip())


def _replicated(job: str, metadata: Any) -> tuple[list[str], int]:
    """Returns the names of the jobs that a JobSet has made of one, and the index of this one."""
    labels = getattr(metadata, "labels", None) or {}
    if _REPLICAS not in labels:
        return [job], 0
    told = {label: labels.get(label, "") for label in (_REPLICAS, _REPLICA)}
    if not all(text.isdecimal() for text in told.values()):
        raise ValueError(f"Expected numbers in the labels of job {job!r}. Received: {told!r}")
    replicas, own = map(int, told.values())
    name = job.removesuffix(f"-{own}")
    return [f"{name}-{index}" for index in range(replicas)], own


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
