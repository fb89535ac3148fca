"""The cluster of the machines of a TPU, with TensorFlow's interface."""

from __future__ import annotations

from typing import Any

import jax

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.cloud_tpu import CloudTPUClusterResolver
from unison.runtime.cluster_resolvers.resolver import ClusterResolver
from unison.runtime.private_jax import backend_is_started
from unison.unsupported import UnsupportedMember


class TPUClusterResolver(ClusterResolver):
    """The TPU that this process runs on: its Cloud TPU VM's, or the VM's whole slice.

    TensorFlow reaches a TPU over the network, by a name or an address; JAX runs on the machines of
    the TPU. So any name stands for the TPU of this machine, and the machines of a slice are found
    as in `CloudTPUClusterResolver`. Neither TPUs nor JAX's backend are started until the resolver
    is used.

    Args:
        tpu: `"local"` for the cores of this machine only; otherwise any name or address.
        zone: Accepted for compatibility with TensorFlow, as are the following: names are not looked
            up in Google's API.
        project: Likewise.
        job_name: Likewise; the machines are tasks of the job `worker`.
        coordinator_name: Likewise.
        coordinator_address: Likewise.
        credentials: Likewise.
        service: Likewise.
        discovery_url: Likewise.

    Raises:
        RuntimeError: The machine belongs to several slices.

    Examples:
        >>> TPUClusterResolver(tpu="local").cluster_spec().jobs
        []

    TF: `tf.distribute.cluster_resolver.TPUClusterResolver`.
    """

    environment = "google"
    task_type: str | None = "worker"
    task_id: int | None = 0

    get_coordination_service_leader = UnsupportedMember("JAX finds it: jax.distributed.initialize")
    get_tpu_system_metadata = UnsupportedMember("use jax.devices(), and each device's attributes")
    set_tpu_topology = UnsupportedMember("tf.tpu.experimental.initialize_tpu_system returns it")
    tpu_hardware_feature = UnsupportedMember("use jax.devices()[0].device_kind")

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: str = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ):
        del zone, project, job_name, coordinator_name, coordinator_address
        del credentials, service, discovery_url
        if tpu is not None and not isinstance(tpu, str):
            raise TypeError(f"tpu must be a name, an address or 'local'. Received: {tpu!r}")
        self.tpu = tpu or ""
        self.is_local = tpu == "local"
        self._cluster = ClusterSpec({})
        if not self.is_local and CloudTPUClusterResolver.is_here():
            found = CloudTPUClusterResolver()
            hosts = found.cluster_spec().job_tasks("worker")
            self._cluster = ClusterSpec({"worker": hosts} if len(hosts) > 1 else {})
            self.task_id = found.task_id

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Returns a resolver whose TPU has been started.

        Raises:
            NoTPUError: This process has no TPU.
        """
        from unison.runtime.tpu.system import tpu_devices

        resolver = TPUClusterResolver(tpu, zone, project)
        tpu_devices(resolver)
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """Returns the machines of the slice; an empty cluster if it has a single machine."""
        return self._cluster

    def get_job_name(self) -> str | None:
        return self.task_type

    def get_master(self) -> str:
        return self.master()

    def num_accelerators(self) -> dict[str, int]:
        """Returns the number of this machine's TPU cores, once the backend has been started."""
        if not backend_is_started():
            return {}
        cores = [device for device in jax.local_devices() if device.platform == "tpu"]
        return {"TPU": len(cores)} if cores else {}

    def __repr__(self) -> str:
        return f"TPUClusterResolver(tpu={self.tpu!r})"
