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
    """The machines of one or several Cloud TPU slices, each a worker with its own cores.

    They are read from the environment on Google Kubernetes Engine, and from the metadata server on
    Google Compute Engine. In a job of several slices (`MEGASCALE_NUM_SLICES`), the machines are in
    the order of the slices (`MEGASCALE_SLICE_ID`), and the first one listens at the host of
    `MEGASCALE_COORDINATOR_ADDRESS`; a machine does not know those of other slices, whose addresses
    are placeholders.

    Args:
        port: A free port of the first machine.

    Raises:
        RuntimeError: This is not a machine of a slice, or a variable of several slices is missing.
        ValueError: A variable is malformed.

    Source: JAX's `jax/_src/clusters/cloud_tpu_cluster.py`, and Google Kubernetes Engine's "Deploy
    TPU Multislices".
    """

    environment = "cloud-tpu"

    def __init__(self, port: int = 8476):
        hosts, place = _from_environment() or _from_metadata()
        if not 0 <= place < len(hosts):
            raise ValueError(
                f"Expected the index of a machine of the slice to be from 0 to {len(hosts) - 1}. "
                f"Received: {place} ({_PLACE})"
            )
        self.task_type = "worker"
        slices = _number("MEGASCALE_NUM_SLICES", "1")
        if slices > 1:
            own = _number("MEGASCALE_SLICE_ID", None)
            if own >= slices:
                raise ValueError(
                    f"Expected MEGASCALE_SLICE_ID to be below {slices}, the number of slices. "
                    f"Received: {own}"
                )
            place += own * len(hosts)
            first = _megascale("MEGASCALE_COORDINATOR_ADDRESS") or ""
            hosts = [f"slice-{s}-host-{h}" for s in range(slices) for h in range(len(hosts))]
            hosts[0] = first.partition(":")[0]
            if not hosts[0]:
                raise RuntimeError(_missing("MEGASCALE_COORDINATOR_ADDRESS", slices))
        self.task_id = place
        self._cluster = ClusterSpec({"worker": [f"{host}:{port}" for host in hosts]})

    @staticmethod
    def is_here() -> bool:
        """Returns whether this is a machine of a slice; with libtpu, may query the metadata."""
        if CloudTPUClusterResolver.is_described():
            return True
        if importlib.util.find_spec("libtpu") is None or not _may_ask_metadata():
            return False
        try:
            _metadata("agent-worker-number")
        except RuntimeError:
            return False
        return True

    @staticmethod
    def is_described() -> bool:
        """Returns whether environment variables describe a slice to which this machine belongs."""
        return _PLACE in os.environ and any(os.environ.get(name) for name in _HOSTS)

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster


def _from_environment() -> tuple[list[str], int] | None:
    """Returns the hosts of the slice, and the index of this one."""
    if not CloudTPUClusterResolver.is_described():
        return None
    told = next(os.environ[name] for name in _HOSTS if os.environ.get(name))
    return [host.partition(":")[0] for host in told.split(",")], _number(_PLACE, None)


def _number(name: str, default: str | None) -> int:
    """Returns the number in a variable of a slice.

    Raises:
        RuntimeError: The variable is not set, and there is no default.
        ValueError: It is not a number.
    """
    text = _megascale(name) or default
    if text is None:
        raise RuntimeError(_missing(name, _megascale("MEGASCALE_NUM_SLICES")))
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"Expected a number in {name}. Received: {text!r}")
    return int(text)


def _missing(name: str, slices: object) -> str:
    return (
        f"Expected {name}, as there are {slices} slices (MEGASCALE_NUM_SLICES). It is not set. "
        "JobSets on Google Kubernetes Engine and queued resources set it."
    )


def _megascale(name: str) -> str | None:
    """Returns a variable, or where it is missing its value in the metadata of the machine."""
    if name in os.environ or not _may_ask_metadata() or CloudTPUClusterResolver.is_described():
        return os.environ.get(name)
    try:
        told = _metadata("tpu-env")
    except RuntimeError:
        return None
    # A line is NAME: 'value'.
    lines = (line.partition(":") for line in told.splitlines())
    values = {key.strip(): value.strip().strip("'") for key, _, value in lines}
    return values.get(name)


def _may_ask_metadata() -> bool:
    return "TPU_SKIP_MDS_QUERY" not in os.environ


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
