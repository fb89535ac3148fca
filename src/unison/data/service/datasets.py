"""`distribute`, `register_dataset` and `from_dataset_id`: datasets that input workers compute."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from unison.data.chunks import Chunk
from unison.data.dataset import Dataset
from unison.data.options import AutoShardPolicy, Options, WithOptions
from unison.data.passes import Passes
from unison.data.plan import INFINITE, UNKNOWN, Plan, Stream
from unison.data.service.configuration import (
    CrossTrainerCache,
    ShardingPolicy,
    address_of_service,
    policy_of,
)
from unison.data.service.connections import Calls
from unison.data.service.elements import described_signature, signature_of
from unison.data.service.iterations import JobSpec
from unison.data.service.local_workers import ids_of_local_workers
from unison.data.service.pickles import pickled
from unison.data.service.reading import Consumer, JobReader
from unison.data.service.registry import ANONYMOUS
from unison.data.service.splits import split_sizes
from unison.data.specs import ArraySpec, Signature
from unison.data.state import State
from unison.data.structure import flatten
from unison.data.transformations.prefetching import ReadsChunks
from unison.errors import InvalidArgumentError
from unison.net.secret import key

#: Seconds for which the dispatcher may not answer when a dataset is registered.
_SECONDS_FOR_DISPATCHER = 60.0

_COMPRESSIONS = ("AUTO", None, "SNAPPY")
_TARGETS = ("AUTO", "ANY", "LOCAL")


def distribute(
    processing_mode: Any,
    service: Any,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    timeout: float = 120.0,
) -> Callable[[Dataset], Dataset]:
    """Returns a transformation that lets the workers of an input service compute a dataset.

    The transformations before it run on the workers, in processes of their own; those after it
    in this process. Each iteration over the result is an iteration of a job. Elements come in no
    particular order.

    Args:
        processing_mode: A `ShardingPolicy`, or "parallel_epochs" (OFF), "distributed_epoch"
            (DYNAMIC).
        service: The dispatcher: `DispatchServer.target`, "grpc://host:port" or "host:port".
        job_name: Lets several programs, or datasets, read one job: each element is for whoever
            asks first. The n-th iterations of all of them are one. Default: a job of one's own.
        consumer_index: This program's index among coordinated consumers.
        num_consumers: Their number. In each round, they get consecutive elements of the same
            worker. The dataset must be infinite, and a `job_name` given.
        max_outstanding_requests: The most elements that are requested or buffered here. Default:
            some megabytes for each worker.
        compression: Accepted for compatibility; elements are sent as they are.
        cross_trainer_cache: Lets programs with different trainer ids get the same elements.
        target_workers: "ANY"; "LOCAL": workers that this process has started; "AUTO": these under
            static sharding, if there are some, and otherwise any.
        timeout: Seconds for which workers are awaited while there are none.

    Raises:
        ValueError: An argument is invalid.

    Iterating raises `UnavailableError` if there are no workers, and what the workers' functions
    raise. An iterator's position cannot be saved, since elements come as workers compute them.

    Examples:
        >>> from unison.data import Dataset, service
        >>> dispatcher = service.DispatchServer()
        >>> worker = service.WorkerServer(service.WorkerConfig(dispatcher.target[7:]))
        >>> dataset = Dataset.range(4).map(lambda number: number * number)
        >>> dataset = dataset.apply(
        ...     service.distribute(service.ShardingPolicy.DYNAMIC, dispatcher.target))
        >>> sorted(int(number) for number in dataset)
        [0, 1, 4, 9]
        >>> worker.stop()
        >>> dispatcher.stop()

    TF: `tf.data.experimental.service.distribute`.
    """
    policy_of(processing_mode)
    address_of_service(service)
    _check_compression(compression)
    _check_consumer(job_name, consumer_index, num_consumers)

    def apply(dataset: Dataset) -> Dataset:
        # What was registered is what is read: the dispatcher is not asked again.
        about = _about(dataset.plan)
        dataset_id = _registered(address_of_service(service), dataset.plan, about, None)
        return _read(
            type(dataset),
            processing_mode,
            service,
            dataset_id,
            about,
            dataset.plan.signature,
            job_name,
            consumer_index,
            num_consumers,
            max_outstanding_requests,
            cross_trainer_cache,
            target_workers,
            timeout,
        )

    return apply


def register_dataset(
    service: Any,
    dataset: Dataset,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
) -> str:
    """Registers a dataset with an input service, and returns its id for `from_dataset_id`.

    Args:
        service: The dispatcher: `DispatchServer.target`, "grpc://host:port" or "host:port".
        dataset: The dataset.
        compression: Accepted for compatibility; elements are sent as they are.
        dataset_id: The id. If a dataset has it already, that one is used. Default: a new one,
            or that of an equal dataset.

    Raises:
        TypeError: The dataset cannot be sent to other processes.
        DeadlineExceededError: The dispatcher does not answer.

    TF: `tf.data.experimental.service.register_dataset`.
    """
    _check_compression(compression)
    address = address_of_service(service)
    return _registered(address, dataset.plan, _about(dataset.plan), dataset_id)


def from_dataset_id(
    processing_mode: Any,
    service: Any,
    dataset_id: Any,
    element_spec: Any = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    timeout: float = 120.0,
    kind: type[Dataset] = Dataset,
) -> Dataset:
    """Returns the dataset that was registered under an id, as input workers compute it.

    Args:
        processing_mode: As for `distribute`, also the following ones.
        service: The dispatcher.
        dataset_id: The result of `register_dataset`, in any process.
        element_spec: The specs of the elements. Default: those that were registered.
        job_name: See `distribute`. Jobs of different dataset ids are different.
        consumer_index: See `distribute`.
        num_consumers: See `distribute`.
        max_outstanding_requests: See `distribute`.
        cross_trainer_cache: See `distribute`.
        target_workers: See `distribute`.
        timeout: See `distribute`.
        kind: The class of the result.

    Raises:
        NotFoundError: There is no such dataset.
        DeadlineExceededError: The dispatcher does not answer.

    TF: `tf.data.experimental.service.from_dataset_id`.
    """
    _check_consumer(job_name, consumer_index, num_consumers)
    found = dataset_id.decode() if isinstance(dataset_id, bytes) else str(dataset_id)
    about = _described(address_of_service(service), found)
    signature = signature_of(about["signature"])
    if element_spec is not None:
        leaves, structure = flatten(element_spec)
        signature = Signature(structure, tuple(map(ArraySpec.like, leaves)))
    return _read(
        kind,
        processing_mode,
        service,
        found,
        about,
        signature,
        None if job_name is None else f"dataset_id={found}/{job_name}",
        consumer_index,
        num_consumers,
        max_outstanding_requests,
        cross_trainer_cache,
        target_workers,
        timeout,
    )


class Served(Plan):
    """The elements that an input service computes.

    Args:
        consumer: How they are read.
        signature: Their signature.
        cardinality: Their number, if it is known.
    """

    lasting = ("_iterations",)
    identity: ClassVar[Sequence[str]] = ("_dataset", "_policy")

    def __init__(self, consumer: Consumer, signature: Signature, cardinality: int):
        self._consumer = consumer
        self._signature = signature
        self._cardinality = cardinality
        self._dataset = consumer.spec.description
        self._policy = consumer.spec.policy.name
        # Each pass is an iteration of the job.
        self._iterations = Passes()

    def signature_from(self, inputs: Sequence[Signature]) -> Signature:
        return self._signature

    def cardinality(self) -> int:
        return self._cardinality

    def _stream(self) -> Stream:
        return _ServedStream(JobReader(self._consumer, self._iterations.begin()))


class _ServedStream(ReadsChunks, Stream):
    def __init__(self, reader: JobReader):
        self._reader = reader

    def _read(self) -> Chunk | None:
        return self._reader.next()

    def state(self) -> State:
        raise TypeError(_NO_POSITION)

    def restore(self, state: State) -> None:
        raise TypeError(_NO_POSITION)


_NO_POSITION = (
    "The position of an iterator over an input service cannot be saved: its elements come as "
    "workers compute them, and another iterator would get others. Save between epochs, without the "
    "iterator; or iterate over the dataset itself, without service.distribute."
)


def _read(
    kind: type[Dataset],
    processing_mode: Any,
    service: Any,
    dataset_id: str,
    about: dict[str, Any],
    signature: Signature,
    job_name: str | None,
    consumer_index: int | None,
    num_consumers: int | None,
    max_outstanding_requests: int | None,
    cache: CrossTrainerCache | None,
    target_workers: str,
    timeout: float,
) -> Dataset:
    policy, address = policy_of(processing_mode), address_of_service(service)
    cardinality = int(about["cardinality"])
    if policy is ShardingPolicy.DYNAMIC and about["split_error"]:
        raise InvalidArgumentError(message=about["split_error"])
    if max_outstanding_requests is not None and max_outstanding_requests < 1:
        if max_outstanding_requests != -1:
            raise ValueError(
                "Expected max_outstanding_requests to be a positive number, or None. Received: "
                f"{max_outstanding_requests}"
            )
        max_outstanding_requests = None
    for argument, is_given in (("num_consumers", num_consumers is not None), ("", cache)):
        if is_given and cardinality >= 0:
            raise InvalidArgumentError(
                message=f"{argument or 'cross_trainer_cache'} needs a dataset that does not end, "
                f"so that no program misses elements. Received: one of {cardinality} elements. Add "
                ".repeat() to the dataset."
            )
    if cache is not None and job_name is None:
        raise ValueError("cross_trainer_cache needs a job_name, which the programs share.")
    if target_workers not in _TARGETS:
        raise ValueError(f"Expected target_workers of {_TARGETS}. Received: {target_workers!r}")
    is_local = target_workers == "LOCAL"
    if target_workers == "AUTO" and policy.is_static:
        is_local = bool(ids_of_local_workers())
    spec = JobSpec(dataset_id, about["description"], policy, num_consumers, cache is not None)
    consumer = Consumer(
        address,
        f"{ANONYMOUS}{secrets.token_hex(8)}" if job_name is None else job_name,
        spec,
        consumer_index,
        max_outstanding_requests,
        "" if cache is None else cache.trainer_id,
        is_local,
        timeout,
    )
    # Which worker computes how many is known only when they have.
    known = cardinality if cardinality == INFINITE else UNKNOWN
    plan: Plan = Served(consumer, signature, known)
    if job_name is not None:
        # The programs share the elements already.
        plan = WithOptions(plan, Options(auto_shard_policy=AutoShardPolicy.OFF))
    return kind._of(plan)


def _about(plan: Plan) -> dict[str, Any]:
    """Returns what a dispatcher is told of a dataset."""
    sizes: list[int] = []
    split_error = ""
    try:
        sizes = split_sizes(plan)
    except InvalidArgumentError as error:
        split_error = error.message
    return {
        "description": plan.description,
        "signature": described_signature(plan.signature),
        "cardinality": plan.cardinality(),
        "split_sizes": sizes,
        "split_error": split_error,
    }


def _registered(address: str, plan: Plan, about: dict[str, Any], given: str | None) -> str:
    payload = np.frombuffer(pickled(plan, key()), np.uint8)
    with contextlib.closing(Calls(address, _SECONDS_FOR_DISPATCHER)) as calls:
        return str(calls.call("register", [payload], about=about, id=given)["id"])


def _described(address: str, dataset_id: str) -> dict[str, Any]:
    with contextlib.closing(Calls(address, _SECONDS_FOR_DISPATCHER)) as calls:
        about: dict[str, Any] = calls.call("describe", id=dataset_id)["about"]
        return about


def _check_compression(compression: str | None) -> None:
    if compression not in _COMPRESSIONS:
        raise ValueError(f"Expected compression of {_COMPRESSIONS}. Received: {compression!r}")


def _check_consumer(
    job_name: str | None, consumer_index: int | None, num_consumers: int | None
) -> None:
    if job_name is not None and (not isinstance(job_name, str) or not job_name):
        raise ValueError(f"Expected job_name to be text that is not empty. Received: {job_name!r}")
    if (consumer_index is None) != (num_consumers is None):
        raise ValueError(
            "Expected both consumer_index and num_consumers, or neither. Received: "
            f"consumer_index={consumer_index}, num_consumers={num_consumers}"
        )
    if num_consumers is None or consumer_index is None:
        return
    if job_name is None:
        raise ValueError("num_consumers needs a job_name, which the consumers share.")
    if not 0 <= consumer_index < num_consumers:
        raise ValueError(
            f"Expected consumer_index from 0 up to num_consumers={num_consumers}. Received: "
            f"{consumer_index}"
        )
