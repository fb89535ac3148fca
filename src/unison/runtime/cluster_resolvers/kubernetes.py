"""The cluster of the pods that a label selects."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.resolver import ClusterResolver


class ExecutableLocation(enum.Enum):
    """The place of the program that queries Kubernetes. TF: `ExecutableLocation`."""

    #: In a pod of the cluster, whose service account is used.
    WITHIN_CLUSTER = 0
    #: Elsewhere; the user's `kubeconfig` is used.
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """The running pods that labels select. Queries Kubernetes every time.

    The resolver cannot determine which of them this process is: set its `task_type` and `task_id`.

    Args:
        job_to_label_mapping: The label selectors of each job's pods. Default: the workers are the
            pods with `job-name=tensorflow`.
        tf_server_port: The port at which each pod listens.
        rpc_layer: The protocol that addresses are prefixed with.
        override_client: A client of Kubernetes' core API to use instead of one from the package
            `kubernetes`.
        executable_location: Where this program runs.

    Raises:
        ImportError: The package `kubernetes` is not installed, and `override_client` is not given.

    TF: `tf.distribute.cluster_resolver.KubernetesClusterResolver`.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: ExecutableLocation = ExecutableLocation.WITHIN_CLUSTER,
    ):
        self._selectors = dict(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        self._port = tf_server_port
        self.rpc_layer = rpc_layer
        self._client = override_client or _core_api(ExecutableLocation(executable_location))

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks: each selector's pods, in the order of their names.

        Raises:
            RuntimeError: A pod is not running.
        """
        return ClusterSpec(
            {
                job: [address for selector in selectors for address in self._addresses(selector)]
                for job, selectors in self._selectors.items()
            }
        )

    def _addresses(self, selector: str) -> list[str]:
        pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
        for pod in pods:
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f"Pod {pod.metadata.name!r} must be running. Its phase: {pod.status.phase}"
                )
        ordered = sorted(pods, key=lambda pod: pod.metadata.name)
        return [f"{pod.status.host_ip}:{self._port}" for pod in ordered]


def _core_api(location: ExecutableLocation) -> Any:
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver needs the package `kubernetes`: "
            "pip install 'unison[k8s]', or pass a client as override_client."
        ) from error
    if location is ExecutableLocation.WITHIN_CLUSTER:
        config.load_incluster_config()
    else:
        config.load_kube_config()
    return client.CoreV1Api()
