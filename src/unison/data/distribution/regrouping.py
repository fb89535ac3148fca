"""Examples in batches of the replicas' sizes, whatever the sizes of the input batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unison.data.distribution.input_workers import InputWorkers
from unison.data.distribution.sharding import file_names_in
from unison.data.distribution.shares import Proportions, ReplicaShares, Shares
from unison.data.distribution.steps import Position, Step, Steps, step_in_turn
from unison.data.leaves import concatenate, count_rows
from unison.data.plan import Plan, position_of, stream_at
from unison.data.specs import Signature
from unison.data.state import State
from unison.data.structure import Leaves
from unison.data.transformations.batching import Unbatch


def sizes_of_worker(
    batch_size: int, num_replicas: int, workers: InputWorkers, proportions: Proportions = None
) -> list[int]:
    """Returns the sizes of the batches of a worker's replicas, in turn.

    All replicas together get a global batch in every step, and over the steps, each gets as many
    examples as the others; with proportions, its `Shares` of the batch.

    Raises:
        ValueError: The worker's replicas would get no examples, and its examples would not be read.

    TF: `batch_sizes_for_worker`.
    """
    total = num_replicas * workers.num_workers
    if proportions is not None:
        counts = Shares(batch_size, total, proportions).counts
        of_workers = [counts[first:][:num_replicas] for first in range(0, total, num_replicas)]
        for worker, of_worker in enumerate(of_workers):  # all workers raise the same error
            if not any(of_worker):
                raise ValueError(
                    "Where each worker reads examples of its own (AutoShardPolicy.FILE, OFF or "
                    "HINT), it must get a share of them. Received: "
                    f"batch_shares={proportions}, of which worker {worker} gets none of "
                    f"{batch_size} examples. Use AutoShardPolicy.DATA."
                )
        return [*of_workers[workers.index]]
    small, larger = divmod(batch_size, total)
    sizes = [small + (replica < larger) for replica in range(total)]
    first = workers.index * num_replicas
    return sizes[first:] + sizes[:first]


class RegroupedSteps(Steps):
    """The examples that a worker reads, in batches of its replicas' sizes.

    Args:
        plan: The plan of batches.
        fresh_plan: Returns an equal plan, whose passes are independent of those of `plan`.
        sizes: The sizes of the batches, in turn.
        num_replicas: The number of replicas of the worker.
        workers: The worker's index.
    """

    def __init__(
        self,
        plan: Plan,
        fresh_plan: Callable[[], Plan],
        sizes: Sequence[int],
        num_replicas: int,
        workers: InputWorkers,
    ):
        self._plan = plan
        self._fresh_plan = fresh_plan
        self._sizes = list(sizes)
        self._num_replicas = num_replicas
        self._workers = workers
        self._turn = 0
        # One reader, opened at first use; several after the number of workers has changed.
        self._opened: list[_Reader] | None = None
        self._has_own_share = True

    @property
    def _readers(self) -> list[_Reader]:
        if self._opened is None:
            self._opened = [_Reader(self._plan)]
        return self._opened

    def next(self) -> Step | None:
        sizes = [self._next_size() for _ in range(self._num_replicas)]
        blocks = [self._block(size) for size in sizes]
        if not any(sizes):
            blocks[0] = self._no_examples()
        if all(block is None for block in blocks):
            return None
        return step_in_turn(blocks, self._plan.structure.pack)

    def _next_size(self) -> int:
        self._turn += 1
        return self._sizes[(self._turn - 1) % len(self._sizes)]

    def _block(self, size: int) -> Leaves | None:
        """Returns the next examples, at most `size`; None at the end."""
        blocks: list[Leaves] = []
        while size and self._readers:
            block = self._readers[0].next_block(size)
            if block is None:
                self._readers.pop(0)
            else:
                blocks.append(block)
                size -= count_rows(block)
        return concatenate(blocks) if blocks else None

    def _no_examples(self) -> Leaves | None:
        """Returns a block without examples; None if all have been read."""
        while self._readers:
            if (nothing := self._readers[0].no_examples()) is not None:
                return nothing
            self._readers.pop(0)
        return None

    def state(self) -> State:
        return {
            "sizes": self._sizes,
            "num_replicas": self._num_replicas,
            "turn": self._turn,
            "has_own_share": self._has_own_share,
            "readers": [reader.state() for reader in self._readers],
        }

    def resume(self, positions: Sequence[Position]) -> None:
        """Resumes at the positions of the workers.

        With another number of workers, each continues what some of them had begun to read, and
        the files that none had begun are distributed again.
        """
        sizes, num_replicas = self._sizes, self._num_replicas
        workers = self._workers
        is_changed = len(positions) != workers.num_workers
        readers: list[_Reader] = []
        for position in positions[workers.index :: workers.num_workers]:
            self._restore(position.state, is_changed)
            self.skip(position.taken)
            readers += self._readers
        self._opened = readers
        if (sizes, num_replicas) != (self._sizes, self._num_replicas):
            self._sizes, self._num_replicas, self._turn = sizes, num_replicas, 0
        if is_changed:
            self._has_own_share = False
            self._deal_unread_files()

    def _restore(self, state: State, is_changed: bool) -> None:
        self._sizes = state["sizes"]
        self._num_replicas = state["num_replicas"]
        self._turn = state["turn"]
        self._has_own_share = state["has_own_share"] and not is_changed
        # The passes after this one read the worker's current share.
        plan_of = (lambda: self._plan) if self._has_own_share else self._fresh_plan
        self._opened = [_Reader(plan_of(), position) for position in state["readers"]]

    def _deal_unread_files(self) -> None:
        unread: list[Leaves] = []
        for reader in self._readers:
            names = file_names_in(reader.plan)
            # With several sources, the files of each stay together.
            if len(names) == 1:
                unread += names[0].take_unread()
        said = self._workers.talk("unread files").ask(unread)
        together = [name for names in said for name in names]
        dealt = together[self._workers.index :: self._workers.num_workers]
        if dealt:
            plan = self._fresh_plan()
            file_names_in(plan)[0].deal(dealt)
            self._readers.append(_Reader(plan))


class _Reader:
    """The examples of batches, in blocks of any size.

    Args:
        plan: The plan of batches.
        state: The position of a reader of an equal plan; None for the beginning.
    """

    def __init__(self, plan: Plan, state: State = None):
        self.plan = plan
        self._examples = Unbatch(plan)
        if state is None:
            state = {"held": None, "position": None}
        # An example that was read to find out whether there is one.
        self._held: Leaves | None = state["held"]
        position = state["position"]
        self._stream = (
            self._examples.stream() if position is None else stream_at(self._examples, position)
        )

    def next_block(self, count: int) -> Leaves | None:
        """Returns the next examples, at most `count`; None at the end."""
        held, self._held = self._held, None
        if held is None:
            return self._stream.next_block(count)
        rest = self._stream.next_block(count - 1) if count > 1 else None
        return held if rest is None else concatenate([held, rest])

    def no_examples(self) -> Leaves | None:
        """Returns a block without examples; None if all have been read."""
        if self._held is None:
            self._held = self._stream.next_block(1)
        return None if self._held is None else tuple(leaf[:0] for leaf in self._held)

    def state(self) -> State:
        return {"held": self._held, "position": position_of(self._examples, self._stream)}


def signature_of_replica(
    signature: Signature, num_replicas: int, shares: ReplicaShares
) -> Signature:
    """Returns the signatures of the parts of `num_replicas` replicas."""
    size = signature.batch_size
    share = None
    if size is not None and not shares.may_change:
        of_batch = Shares(size, num_replicas, shares.proportions)
        share = of_batch.chunk if of_batch.are_even else None
    return signature.unbatched().batched(share)
