"""The configuration of dispatchers and workers, and the arguments of those who read."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any

from unison.net.addresses import LOOPBACK, split_address

#: The environment variable with the address at which dispatchers and workers listen.
HOST_VARIABLE = "UNISON_DATA_SERVICE_HOST"

#: In a worker's address, stands for its port.
ANY_PORT = "%port%"


class ShardingPolicy(enum.IntEnum):
    """The division of a dataset between the workers of an input service.

    * `OFF`: every worker computes the whole dataset. A worker that joins or restarts begins from
      the first element. Random numbers differ between workers.
    * `DYNAMIC`: the dispatcher hands out parts of the source (rows, names of files) to the workers
      that ask for them. Without failures, each element is visited exactly once; what a lost worker
      had been given is not handed out again, so none is visited twice (at most once).
    * `FILE`, `DATA`, `FILE_OR_DATA`, `HINT`: worker i of the list `DispatcherConfig.
      worker_addresses` computes share i: every n-th file; every n-th element; files if there are
      enough of them, otherwise elements; the share at `dataset.shard(SHARD_HINT, SHARD_HINT)`. A
      worker that restarts begins its share again.

    TF: `tf.data.experimental.service.ShardingPolicy`.
    """

    OFF = 0
    DYNAMIC = 1
    FILE = 2
    DATA = 3
    FILE_OR_DATA = 4
    HINT = 5

    @property
    def is_static(self) -> bool:
        """Whether the shares are fixed, by a list of workers."""
        return self not in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)


_NAMES = {"parallel_epochs": ShardingPolicy.OFF, "distributed_epoch": ShardingPolicy.DYNAMIC}


def policy_of(processing_mode: Any) -> ShardingPolicy:
    """Returns the policy of a processing mode: a policy, or one of TensorFlow's older names.

    Raises:
        ValueError: It is neither.

    Examples:
        >>> policy_of("distributed_epoch").name
        'DYNAMIC'
    """
    if isinstance(processing_mode, ShardingPolicy):
        return processing_mode
    if isinstance(processing_mode, str) and processing_mode in _NAMES:
        return _NAMES[processing_mode]
    raise ValueError(
        'Expected processing_mode to be a ShardingPolicy, "parallel_epochs" or '
        f'"distributed_epoch". Received: {processing_mode!r}'
    )


class CrossTrainerCache:
    """Lets several training programs share the elements that a job computes.

    A worker keeps the most recent elements; each program (`trainer_id`) reads all that are still
    kept, at its own pace. The dataset must be infinite.

    Args:
        trainer_id: The name of the training program.

    Raises:
        ValueError: `trainer_id` is empty.

    TF: `tf.data.experimental.service.CrossTrainerCache`.
    """

    def __init__(self, trainer_id: str):
        if not trainer_id:
            raise ValueError("Expected a trainer_id that is not empty. Received: ''")
        self.trainer_id = str(trainer_id)


@dataclasses.dataclass(frozen=True)
class DispatcherConfig:
    """The configuration of a dispatcher.

    Attributes:
        port: The port; 0: a free one.
        host: The address of this machine to listen at. Default: `UNISON_DATA_SERVICE_HOST`, or
            loopback, which only processes of this machine reach.
        work_dir: The folder for the journal.
        fault_tolerant_mode: Whether datasets, jobs and handed out splits are written to the
            journal, from which a dispatcher that is restarted at the same port resumes.
        worker_addresses: The workers of static sharding, in order: "host", "host:port" or
            "host:%port%" (any port).
        job_gc_check_interval: Seconds between two searches for jobs that nobody reads.
        job_gc_timeout: Seconds after which such a job is removed; negative: never.
        worker_timeout: Seconds without a heartbeat after which a worker is lost. One whose
            connection is closed is lost after a second.

    TF: `tf.data.experimental.service.DispatcherConfig`, whose times are in milliseconds.
    """

    port: int = 0
    host: str | None = None
    work_dir: str | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: tuple[str, ...] = ()
    job_gc_check_interval: float = 10.0
    job_gc_timeout: float = 300.0
    worker_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.fault_tolerant_mode and not self.work_dir:
            raise ValueError(
                "fault_tolerant_mode needs a folder for the journal. Set work_dir in the "
                "DispatcherConfig."
            )
        object.__setattr__(self, "worker_addresses", tuple(self.worker_addresses or ()))


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """The configuration of a worker.

    Attributes:
        dispatcher_address: The address of the dispatcher, host:port.
        worker_address: The address at which programs reach it, host:port; the port may be `%port%`,
            the one that it listens at. Default: `UNISON_DATA_SERVICE_HOST`, or loopback.
        port: The port; 0: that of `worker_address`, or a free one.
        heartbeat_interval: Seconds between two heartbeats.
        dispatcher_timeout: Seconds for which it tries to reach the dispatcher.

    TF: `tf.data.experimental.service.WorkerConfig`, whose times are in milliseconds.
    """

    dispatcher_address: str
    worker_address: str | None = None
    port: int = 0
    heartbeat_interval: float = 1.0
    dispatcher_timeout: float = 3600.0

    def __post_init__(self) -> None:
        if not self.dispatcher_address:
            raise ValueError(
                "Expected dispatcher_address to be host:port. Received: "
                f"{self.dispatcher_address!r}"
            )

    @property
    def host(self) -> str:
        """The address of this machine that the worker listens at."""
        if self.worker_address is None:
            return own_host(None)
        host, _, _ = self.worker_address.rpartition(":")
        return (host or self.worker_address).strip("[]")

    @property
    def own_port(self) -> int:
        """The port that the worker listens at; 0: a free one."""
        _, _, port = (self.worker_address or "").rpartition(":")
        return self.port or (int(port) if port.isdecimal() else 0)


def own_host(host: str | None) -> str:
    """Returns the address to listen at, if a configuration names `host`."""
    return host or os.environ.get(HOST_VARIABLE) or LOOPBACK


def address_of_service(service: Any) -> str:
    """Returns the address of a dispatcher, host:port.

    Args:
        service: "host:port", "grpc://host:port", or a pair of the protocol and host:port.

    Raises:
        ValueError: It is none of these.

    Examples:
        >>> address_of_service("grpc://localhost:5000")
        'localhost:5000'
    """
    text = service[1] if isinstance(service, tuple) and len(service) == 2 else service
    if isinstance(text, str):
        address = text.rpartition("://")[2]
        host, _, port = address.rpartition(":")
        if host and port.isdecimal() and text.count("://") <= 1:
            return address
    raise ValueError(
        "Expected service to be the address of a dispatcher, such as DispatchServer.target: "
        f'"grpc://host:port" or "host:port". Received: {service!r}'
    )


def place_in_list(address: str, listed: tuple[str, ...], taken: set[int]) -> int | None:
    """Returns the place of a worker's address in a list; None if it is not listed, or taken.

    Examples:
        >>> place_in_list("a:7", ("b", "a:%port%", "a"), taken={1})
        2
    """
    host, port = split_address(address)
    for place, each in enumerate(listed):
        if place in taken:
            continue
        own_name, _, own_port = each.rpartition(":") if ":" in each else (each, "", ANY_PORT)
        if _is_host(own_name.strip("[]"), host) and own_port in (ANY_PORT, str(port)):
            return place
    return None


def _is_host(name: str, host: str) -> bool:
    return name == host or (name == "localhost" and host in ("127.0.0.1", "::1"))
