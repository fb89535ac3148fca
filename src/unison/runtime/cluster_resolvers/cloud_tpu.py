"""The cluster of the machines of a Cloud TPU slice."""

from __future__ import annotations

import importlib.util
import os
import urllib.error
import urllib.request

from unison.runtime.cluster import ClusterSpec
from unison.runtime.cluster_resolvers.resolver import ClusterResolver

#: The variables of Google Kubernetes Engine: the hosts, by either name, and this one's index.
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_PLACE = "TPU_WORKER_ID"

#: The metadata of Google Compute Engine; the host name resolves only there.
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_SECONDS_TO_ANSWER = 5.0


class CloudTPUClusterResolver(ClusterResolver):
    """The machines of a Cloud TPU slice, each a worker with its own cores.

    They are read from the environment on Google Kubernetes Engine, and from the metadata server on
    Google Compute Engine.

    Args:
        port: A free port of the first machine.

    Raises:
        RuntimeError: This is not a machine of a slice, or there are several slices.
    """

    environment = "cloud-tpu"

    def __init__(self, port: int = 8476):
        slices = os.environ.get("MEGASCALE_NUM_SLICES", "1")
        if slices != "1":
            raise RuntimeError(
                f"Expected one slice, whose machines know each other. Received: {slices} slices "
                "(MEGASCALE_NUM_SLICES). State all machines in TF_CONFIG."
            )
        hosts, place = _from_environment() or _from_metadata()
        self.task_type = "worker"
        self.task_id = place
        self._cluster = ClusterSpec({"worker": [f"{host}:{port}" for host in hosts]})

    @staticmethod
    def is_here() -> bool:
        """Returns whether this is a machine of a slice; with libtpu, may query the metadata."""
        if _from_environment() is not None:
            return True
        if importlib.util.find_spec("libtpu") is None or "TPU_SKIP_MDS_QUERY" in os.environ:
            return False
        try:
            _metadata("agent-worker-number")
        except RuntimeError:
            return False
        return True

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster


def _from_environment() -> tuple[list[str], int] | None:
    """Returns the hosts of the slice, and the index of this one."""
    told = next((os.environ[name] for name in _HOSTS if os.environ.get(name)), None)
    if told is None or _PLACE not in os.environ:
        return None
    return [host.partition(":")[0] for host in told.split(",")], int(os.environ[_PLACE])


def _from_metadata() -> tuple[list[str], int]:
    # A machine is given by its name, or as name:number:address.
    told = [machine.split(":") for machine in _metadata("worker-network-endpoints").split(",")]
    return [parts[-1] for parts in told], int(_metadata("agent-worker-number"))


def _metadata(name: str) -> str:
    request = urllib.request.Request(_METADATA + name, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS_TO_ANSWER) as answer:
            return str(answer.read().decode())
    except (OSError, urllib.error.URLError) as error:
        raise RuntimeError(
            f"This machine does not belong to a Cloud TPU slice: {' or '.join(_HOSTS)} and "
            f"{_PLACE} are not set, and {_METADATA} does not answer ({error})."
        ) from error
