"""Options of datasets, and of how strategies distribute them."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from unison.data.plan import Plan, Rows, SameElements, Stream


class AutoShardPolicy(enum.IntEnum):
    """How the input of several workers is divided between them.

    On one worker, it decides how global batches are divided between the replicas: under `AUTO`
    and `DATA` each batch for itself, under the others the stream of examples, so that a replica
    gets full batches as long as there are examples.

    TF: `tf.data.experimental.AutoShardPolicy`.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a dataset; None where nothing was said.

    Attributes:
        auto_shard_policy: How strategies divide the dataset.
    """

    auto_shard_policy: AutoShardPolicy | None = None

    def merge(self, other: Options) -> Options:
        """Returns what either says; `other` where both do."""
        said = {name: value for name, value in vars(other).items() if value is not None}
        return dataclasses.replace(self, **said)


class WithOptions(SameElements):
    """The same elements, with options."""

    def __init__(self, source: Plan, options: Options):
        super().__init__(source)
        self.options = options

    def rows(self) -> Rows | None:
        return self._input.rows()

    def _stream(self) -> Stream:
        return self._input.stream()


def options_of(plan: Plan) -> Options:
    """Returns the options that a plan and its inputs have, the outer ones before the inner."""
    options = Options()
    for source in plan.inputs:
        options = options.merge(options_of(source))
    return options.merge(plan.options) if isinstance(plan, WithOptions) else options


class InputReplicationMode(enum.Enum):
    """Who calls the function of `distribute_datasets_from_function`.

    TF: `tf.distribute.InputReplicationMode`.
    """

    #: Each worker once; its replicas take batches in turn.
    PER_WORKER = "PER_WORKER"
    #: Each replica, for a dataset of its own.
    PER_REPLICA = "PER_REPLICA"


class InputOptions(NamedTuple):
    """How a strategy brings batches to its replicas.

    Attributes:
        experimental_fetch_to_device: Whether batches are put on the replicas' devices, ahead of
            time; otherwise they stay on the host.
        experimental_replication_mode: Who calls the dataset function.
        experimental_place_dataset_on_device: Whether the dataset itself is placed on the devices;
            takes `experimental_fetch_to_device=False` and `PER_REPLICA`. It makes no difference
            here: elements are computed on the host, and fetched.
        experimental_per_replica_buffer_size: How many batches a replica may be ahead.

    TF: `tf.distribute.InputOptions`.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1


class InputContext:
    """What a dataset function knows of the input pipeline that it makes.

    Args:
        num_input_pipelines: How many there are: one a worker.
        input_pipeline_id: Which of them this is.
        num_replicas_in_sync: The number of replicas on all workers.

    TF: `tf.distribute.InputContext`.
    """

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ):
        self.num_input_pipelines = num_input_pipelines
        self.input_pipeline_id = input_pipeline_id
        self.num_replicas_in_sync = num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the size of a replica's batch.

        Raises:
            ValueError: The global batch cannot be divided equally.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )
