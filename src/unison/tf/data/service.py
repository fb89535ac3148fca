"""`tf.data.experimental.service`: TensorFlow's names of `unison.data.service`.

Times are in milliseconds here, as in TensorFlow, and in seconds there. Dispatchers and workers
listen at loopback unless `UNISON_DATA_SERVICE_HOST` or a worker's address names another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from unison.data import service as core
from unison.data.service import CrossTrainerCache, ShardingPolicy
from unison.tf.data.dataset import Dataset
from unison.tf.missing import names_missing_from
from unison.tf.tensors import convert_to_tensor

__all__ = [
    "CrossTrainerCache",
    "DispatchServer",
    "DispatcherConfig",
    "ShardingPolicy",
    "WorkerConfig",
    "WorkerServer",
    "distribute",
    "from_dataset_id",
    "register_dataset",
]

__getattr__ = names_missing_from("unison.tf.data.experimental.service")


class DispatcherConfig(NamedTuple):
    """The configuration of a dispatcher; see `unison.data.service.DispatcherConfig`.

    TF: `tf.data.experimental.service.DispatcherConfig`.
    """

    port: int = 0
    protocol: str | None = None
    work_dir: str | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: Any = None
    job_gc_check_interval_ms: int | None = None
    job_gc_timeout_ms: int | None = None
    worker_timeout_ms: int | None = None
    worker_max_concurrent_snapshots: int = 0


class WorkerConfig(NamedTuple):
    """The configuration of a worker; see `unison.data.service.WorkerConfig`.

    TF: `tf.data.experimental.service.WorkerConfig`.
    """

    dispatcher_address: str
    worker_address: str | None = None
    port: int = 0
    protocol: str | None = None
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None
    data_transfer_protocol: str | None = None
    data_transfer_address: str | None = None


class DispatchServer(core.DispatchServer):
    """TF: `tf.data.experimental.service.DispatchServer`."""

    def __init__(self, config: Any = None, start: bool = True):
        given = config or DispatcherConfig()
        if given.fault_tolerant_mode and not given.work_dir:
            raise ValueError(
                "Cannot enable fault tolerant mode without configuring a work dir. Make sure to "
                "set `work_dir` in the `config` object passed to `DispatcherServer`."
            )
        times = {
            "job_gc_check_interval": given.job_gc_check_interval_ms,
            "job_gc_timeout": given.job_gc_timeout_ms,
            "worker_timeout": given.worker_timeout_ms,
        }
        own = core.DispatcherConfig(
            port=given.port,
            work_dir=given.work_dir,
            fault_tolerant_mode=given.fault_tolerant_mode,
            worker_addresses=tuple(given.worker_addresses or ()),
            **_in_seconds(times),
        )
        super().__init__(own, start)


class WorkerServer(core.WorkerServer):
    """TF: `tf.data.experimental.service.WorkerServer`."""

    def __init__(self, config: Any, start: bool = True):
        if config.dispatcher_address is None:
            raise ValueError(
                "Must specify a `dispatcher_address` in the `config` passed to `WorkerServer`."
            )
        times = {
            "heartbeat_interval": config.heartbeat_interval_ms,
            "dispatcher_timeout": config.dispatcher_timeout_ms,
        }
        own = core.WorkerConfig(
            dispatcher_address=config.dispatcher_address,
            worker_address=config.worker_address,
            port=config.port,
            **_in_seconds(times),
        )
        super().__init__(own, start)


def _in_seconds(times: dict[str, int | None]) -> dict[str, Any]:
    """Returns the times that are given, in seconds; 0 is a very short one."""
    return {name: (time or 1) / 1000 for name, time in times.items() if time is not None}


def distribute(
    processing_mode: Any,
    service: Any,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
) -> Any:
    """Returns a transformation that lets input workers compute a dataset.

    TF: `tf.data.experimental.service.distribute`.
    """
    del data_transfer_protocol  # shared memory on one machine, TCP between machines
    return core.distribute(
        processing_mode,
        service,
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        compression,
        cross_trainer_cache,
        target_workers,
    )


def register_dataset(
    service: Any, dataset: Dataset, compression: str | None = "AUTO", dataset_id: Any = None
) -> Any:
    """Registers a dataset, and returns its id as a tensor of text.

    TF: `tf.data.experimental.service.register_dataset`.
    """
    given = None if dataset_id is None else _text_of(dataset_id)
    return convert_to_tensor(core.register_dataset(service, dataset, compression, given))


def from_dataset_id(
    processing_mode: Any,
    service: Any,
    dataset_id: Any,
    element_spec: Any = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
) -> Any:
    """Returns the dataset that was registered under an id, as input workers compute it.

    TF: `tf.data.experimental.service.from_dataset_id`.
    """
    del data_transfer_protocol
    return core.from_dataset_id(
        processing_mode,
        service,
        _text_of(dataset_id),
        element_spec,
        job_name,
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        cross_trainer_cache,
        target_workers,
        kind=Dataset,
    )


def _text_of(dataset_id: Any) -> str:
    """Returns an id that is text, bytes, a number, or a tensor of one of these."""
    value = dataset_id.numpy() if hasattr(dataset_id, "numpy") else dataset_id
    return value.decode() if isinstance(value, bytes) else str(value)
