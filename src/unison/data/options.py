"""Options of datasets, and of their distribution by strategies."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from unison.data.plan import AUTOTUNE, Plan, Rows, SameElements, Stream
from unison.errors import FailedPreconditionError, InvalidArgumentError


class AutoShardPolicy(enum.IntEnum):
    """The division of the input between several workers.

    * `DATA`: the workers share every global batch, as the replicas of one worker do: W workers of
      R replicas get what one worker of W x R replicas gets. A worker only reads and maps its own
      examples if the order determines them; otherwise it computes whole batches.
    * `FILE`: worker i reads every W-th file, starting at the i-th, in batches of its replicas'
      sizes. Fewer files than workers, and sources that are not files, are errors.
    * `AUTO`: `FILE` if the elements come from at least W files one by one (not through `take`
      or `zip`, say); otherwise `DATA`.
    * `HINT`: the elements are divided at `dataset.shard(SHARD_HINT, SHARD_HINT)`.
    * `OFF`: every worker reads all elements.

    With one worker, it determines the division of global batches between the replicas: under `AUTO`
    and `DATA` each batch is divided, under the others the stream of examples, so that a replica
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
    """Options of a dataset; None if an option is not set.

    Attributes:
        auto_shard_policy: How strategies divide the dataset.
        deterministic: Whether the transformations that follow keep the order of the elements,
            unless their own `deterministic` is set.
        num_threads: The maximum number of threads for the functions of each transformation that
            follows; the number under `AUTOTUNE`.
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
        """Whether a transformation with this argument `deterministic` keeps the order."""
        said = self.deterministic if deterministic is None else deterministic
        return said is not False

    def parallel_calls(self, asked_for: int | None) -> int | None:
        """Returns the number of parallel calls of a transformation, given its argument."""
        if asked_for is None or self.num_threads is None:
            return asked_for
        return self.num_threads if asked_for == AUTOTUNE else min(asked_for, self.num_threads)

    def merge(self, other: Options) -> Options:
        """Returns both options merged; those of `other` take precedence."""
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


#: Marks where to divide under `AutoShardPolicy.HINT`: `dataset.shard(SHARD_HINT, SHARD_HINT)`.
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
    """Returns the options of a plan and its inputs, the outer ones before the inner."""
    options = Options()
    for source in plan.inputs:
        options = options.merge(options_of(source))
    return options.merge(plan.options) if isinstance(plan, WithOptions) else options


class InputReplicationMode(enum.Enum):
    """The calls of the function of `distribute_datasets_from_function`.

    TF: `tf.distribute.InputReplicationMode`.
    """

    #: Once per worker; its replicas take batches in turn.
    PER_WORKER = "PER_WORKER"
    #: Once per replica, for its own dataset.
    PER_REPLICA = "PER_REPLICA"


class InputOptions(NamedTuple):
    """The transfer of batches to a strategy's replicas.

    Attributes:
        experimental_fetch_to_device: Whether batches are copied to the replicas' devices ahead of
            their use; otherwise they stay on the host.
        experimental_replication_mode: The calls of the dataset function.
        experimental_place_dataset_on_device: Whether the dataset itself is placed on the devices;
            requires `experimental_fetch_to_device=False` and `PER_REPLICA`. It makes no difference
            here: elements are computed on the host, and copied.
        experimental_per_replica_buffer_size: The number of batches that a replica reads ahead.

    TF: `tf.distribute.InputOptions`.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1


class InputContext:
    """The context in which a dataset function creates an input pipeline.

    Args:
        num_input_pipelines: The number of pipelines: one per worker.
        input_pipeline_id: The index of this one.
        num_replicas_in_sync: The number of replicas on all workers.
        batch_shares: The parts of a global batch of the replicas that take batches of this
            pipeline, if the strategy has `batch_shares`.

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

        With `batch_shares`, it is the replica's share, which must be the same for all
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
