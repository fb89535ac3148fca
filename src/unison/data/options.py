"""Options of datasets, and of how strategies distribute them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from unison.data.plan import AUTOTUNE, Plan, Rows, SameElements, Stream
from unison.errors import FailedPreconditionError, InvalidArgumentError


class AutoShardPolicy(enum.IntEnum):
    """How the input of several workers is divided between them.

    * `DATA`: the workers share every global batch, as the replicas of one worker do: W workers of
      R replicas get what one worker of W x R replicas gets. A worker reads and maps its own
      examples only, where their order tells which they are; else it computes whole batches.
    * `FILE`: worker i reads every W-th file, from the i-th on, in batches of its replicas' sizes.
      Fewer files than workers, and sources that are no files, are errors.
    * `AUTO`: `FILE`, where the elements come from at least W files one by one (not through `take`
      or `zip`, say); else `DATA`.
    * `HINT`: `dataset.shard(SHARD_HINT, SHARD_HINT)` says where.
    * `OFF`: every worker reads everything.

    On one worker, it decides how global batches are divided between the replicas: under `AUTO`
    and `DATA` each batch for itself, under the others the stream of examples, so that a replica
    gets full batches as long as there are examples.

    TF: `tf.data.experimental.AutoShardPolicy` (there, `DATA` gives a worker every W-th batch of
    the dataset, and divides it between its replicas).
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
        deterministic: Whether the transformations that follow keep the order of the elements
            where they are not told themselves, by their own `deterministic`.
        num_threads: In how many threads the functions of each transformation that follows are
            called at most; as many under `AUTOTUNE`.
    """

    auto_shard_policy: AutoShardPolicy | None = None
    deterministic: bool | None = None
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.num_threads is not None and self.num_threads < 1:
            raise InvalidArgumentError(
                message="Expected num_threads to be a positive number. Received: "
                f"{self.num_threads}"
            )

    def keeps_order(self, deterministic: bool | None) -> bool:
        """Whether a transformation keeps the order that was told `deterministic`."""
        said = self.deterministic if deterministic is None else deterministic
        return said is not False

    def parallel_calls(self, asked_for: int | None) -> int | None:
        """Returns the number of parallel calls of a transformation that was told `asked_for`."""
        if asked_for is None or self.num_threads is None:
            return asked_for
        return self.num_threads if asked_for == AUTOTUNE else min(asked_for, self.num_threads)

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


#: `dataset.shard(SHARD_HINT, SHARD_HINT)` says where to divide under `AutoShardPolicy.HINT`.
#: TF: `tf.data.experimental.SHARD_HINT`.
SHARD_HINT = -1


class ShardHere(SameElements):
    """The place at which `AutoShardPolicy.HINT` divides the elements between the workers."""

    def _stream(self) -> Stream:
        raise FailedPreconditionError(
            message="`Dataset.shard(SHARD_HINT, SHARD_HINT)` can only be used in "
            "`Strategy.experimental_distribute_dataset()` with `AutoShardPolicy.HINT`."
        )


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
        batch_shares: The part of a global batch of each replica that takes batches of this
            pipeline, where the strategy has `batch_shares`.

    TF: `tf.distribute.InputContext`.
    """

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
        batch_shares: Sequence[float] | None = None,
    ):
        self.num_input_pipelines = num_input_pipelines
        self.input_pipeline_id = input_pipeline_id
        self.num_replicas_in_sync = num_replicas_in_sync
        self.batch_shares = batch_shares

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the size of a replica's batch.

        Under `batch_shares`, it is the replica's share, of which there must be one for all
        replicas of the pipeline.

        Raises:
            ValueError: The global batch cannot be divided so that each replica gets its share.
        """
        if self.batch_shares is not None:
            return self._share_of(global_batch_size)
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync

    def _share_of(self, global_batch_size: int) -> int:
        sizes = {global_batch_size * share for share in self.batch_shares or ()}
        size = round(min(sizes))
        if max(abs(each - size) for each in sizes) > 1e-6 * global_batch_size:
            raise ValueError(
                f"The replicas that take batches of this pipeline get {sorted(sizes)} examples of "
                f"a `global_batch_size` of {global_batch_size}. Expected one whole number. Choose "
                "a size that the shares divide; where the replicas of a worker have different "
                "shares, use InputReplicationMode.PER_REPLICA."
            )
        return size

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )
