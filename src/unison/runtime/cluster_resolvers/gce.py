"""The cluster of an instance group of Google Compute Engine."""

from __future__ import annotations

from typing import Any

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.resolver import ClusterResolver


class GCEClusterResolver(ClusterResolver):
    """The running instances of an instance group. Queries Google's API every time.

    Args:
        project: The project's name.
        zone: The zone.
        instance_group: The group's name.
        port: The port at which each instance listens.
        task_type: The job that they are tasks of.
        task_id: The index of this process: its position among the sorted addresses.
        rpc_layer: The protocol that addresses are prefixed with.
        credentials: Credentials for Google's API. Default: the application's.
        service: The compute API to use instead of one from the package `google-api-python-client`.

    Raises:
        ImportError: That package is not installed, and `service` is not given.

    TF: `tf.distribute.cluster_resolver.GCEClusterResolver`.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ):
        self._where = {"project": project, "zone": zone}
        self._group = instance_group
        self._port = port
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer
        self._service = service or _compute_api(None if credentials == "default" else credentials)

    def cluster_spec(self) -> ClusterSpec:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._where,
            instanceGroup=self._group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        addresses = []
        while request is not None:
            response = request.execute()
            for listed in response.get("items", []):
                name = listed["instance"].rpartition("/")[2]
                instance = self._service.instances().get(**self._where, instance=name).execute()
                addresses.append(f"{instance['networkInterfaces'][0]['networkIP']}:{self._port}")
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )
        assert self.task_type is not None
        return ClusterSpec({self.task_type: sorted(addresses)})


def _compute_api(credentials: Any) -> Any:
    try:
        from googleapiclient import discovery
    except ImportError as error:
        raise ImportError(
            "GCEClusterResolver needs the package `google-api-python-client`: "
            "pip install google-api-python-client, or pass the API as service."
        ) from error
    return discovery.build("compute", "v1", credentials=credentials)
