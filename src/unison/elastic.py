"""Custom training loops in a job whose workers may change (`unison run --min-workers`).

Keras' `fit` does not need this module. A custom loop is a function of a `State`; `run` calls it
again, with the last committed state, whenever the group of workers has changed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import jax

from unison.cells import Cell, Layout, live_cells
from unison.data import DistributedDataset, DistributedIterator
from unison.interrupts import is_of_a_signal_handler, signals_held, without_signals
from unison.runtime.elastic import ElasticOptions as Options
from unison.runtime.elastic import Entry, GroupChanged, elastic_group
from unison.runtime.transfers import copied
from unison.train import random_state
from unison.train.handover import Handover
from unison.train.in_memory import InMemoryCheckpoints, in_memory_checkpoints

__all__ = ["GroupChanged", "Options", "State", "run"]

logger = logging.getLogger("unison")

P = ParamSpec("P")
T = TypeVar("T")


class State:
    """The state that a training loop needs to continue in a different group of workers.

    Numbers are attributes, to be read and set: `state.step += 1`. Everything else is an object that
    a `unison.train.Checkpoint` tracks: Keras models and optimizers, variables, modules, metrics.
    `commit` marks a step as complete; if the group changes afterwards, the state is restored to the
    last commit. Workers that join receive the state of the others, except that their copies of
    variables that are summed over the replicas when read (`ON_READ`, `SUM`) are zero.

    Args:
        steps_are_one_program: Whether there is at most one `strategy.run` that assigns variables
            between two commits, and no assignment outside it. Then nothing needs to be copied,
            since a program takes effect completely or not at all. Otherwise a copy is kept of
            everything that is overwritten after a commit.
        parts: Numbers, and objects with variables, by name. All workers must pass the same ones.

    Raises:
        ValueError: A part is neither a number nor an object that a checkpoint can track.

    Examples:
        >>> import unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     total = unison.Variable(0.0, aggregation=unison.VariableAggregation.SUM)
        >>> @unison.elastic.run
        ... def train(state):
        ...     while state.step < 3:
        ...         strategy.run(lambda: total.assign_add(1.0))
        ...         state.step += 1
        ...         state.commit()
        >>> state = unison.elastic.State(step=0, total=total)
        >>> train(state)
        >>> state.step, float(total)
        (3, 6.0)
    """

    def __init__(self, *, steps_are_one_program: bool = False, **parts: Any):
        self._numbers = {name: part for name, part in parts.items() if _is_number(part)}
        objects = {name: part for name, part in parts.items() if not _is_number(part)}
        self._group = elastic_group()
        placement = None if self._group is None else self._group.placement
        self._objects = Handover(tuple, placement, numbers=_Numbers(self), **objects)
        #: The checkpoints in the host's memory, during a loop of a job that has them.
        self._checkpoints: InMemoryCheckpoints | None = None
        self._keeps_copies = not steps_are_one_program
        self._iterators: dict[str, DistributedIterator] = {}
        #: The positions of iterators, by name; the positions at the end of the latest complete
        #: passes, which determine how the next ones are shuffled; and the datasets iterated in this
        #: call.
        self._places: dict[str, dict[str, Any]] = {}
        self._passed: dict[str, dict[str, Any]] = {}
        self._begun: dict[str, DistributedDataset] = {}
        #: The datasets whose position is not in any commit, with the state that passes over them
        #: had left before the first one here.
        self._fresh: dict[str, tuple[DistributedDataset, Any]] = {}
        self._commits = 0
        self._committed: dict[str, Any] = {}
        #: The variables' arrays at the last commit, and the functions that copy them before a
        #: program may overwrite them.
        self._kept: dict[Cell, jax.Array] = {}
        self._copying: dict[Cell, Callable[[], None]] = {}
        #: Cells that have changed and are handed to a joining worker, or were warned about.
        self._known: weakref.WeakSet[Cell] = weakref.WeakSet()
        #: Resets the random generators of the process to their states at the last commit.
        self._reset_generators: Callable[[], None] = lambda: None
        #: The number of programs that had been launched at the last commit.
        self._runs = 0
        #: The number of loops that this worker had reached before the current one.
        self._loops = 0

    def __getattr__(self, name: str) -> Any:
        numbers = vars(self).get("_numbers", {})
        if name in numbers:
            return numbers[name]
        objects = vars(self).get("_objects")
        if objects is not None and name in vars(objects):
            return vars(objects)[name]
        raise AttributeError(
            f"The state has no {name!r}. It was made with: "
            f"{', '.join(sorted({*numbers, *_public(objects)}))}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._numbers and _is_number(value):
            self._numbers[name] = value
        else:
            raise AttributeError(
                "Only the numbers of a state can be set: "
                f"{', '.join(self._numbers) or 'it has none'}. Received: {name} = {value!r}"
            )

    def commit(self) -> None:
        """Marks the work since the last commit as complete on this worker.

        Raises:
            GroupChanged: The group has changed; `run` handles this.
            RuntimeError: More than one program has assigned variables since the last commit,
                although the state was created with `steps_are_one_program`.
        """
        group = self._group
        if group is not None:
            group.settle(0)
            if not self._keeps_copies and group.runs - self._runs > 1:
                raise RuntimeError(
                    "Expected at most one strategy.run between two commits of a State with "
                    f"steps_are_one_program=True. Received: {group.runs - self._runs}. "
                    "Leave that argument out."
                )
        self._warn_of_what_is_left_out()
        programs = 0 if group is None else group.runs - self._runs
        with signals_held:
            self._keep()
        if group is not None:
            group.tell("commit", programs=programs)
        if group is not None and group.is_over:
            raise GroupChanged(message="The group of workers has changed.")
        if self._checkpoints is not None:
            self._checkpoints.steps += 1
            if self._checkpoints.is_due:
                self._checkpoints.keep(self._objects)

    @without_signals
    def restore(self) -> None:
        """Restores the state of the last commit."""
        self._numbers = dict(self._committed.get("numbers", self._numbers))
        self._places = dict(self._committed.get("places", {}))
        self._passed = dict(self._committed.get("passed", {}))
        self._forget_passes()
        self._reset_generators()
        for cell, array in self._kept.items():
            if not array.is_deleted():  # else a program took it and did not change the value
                cell.put(array)
        self._keep_copies()

    def iterate(self, dataset: DistributedDataset, name: str = "data") -> Iterator[Any]:
        """Yields the batches of a distributed dataset, starting at the last committed position.

        Use it in the function that `run` calls: after a change of the group, the rest of the pass
        is divided among the current workers, and each example is used once. Later passes are
        shuffled as they would have been without the change.

        Args:
            dataset: A result of `strategy.experimental_distribute_dataset` from this call of the
                function.
            name: Distinguishes several datasets.
        """
        is_new = self._begun.get(name) is not dataset
        self._begun[name] = dataset
        if is_new and name in self._passed and name not in self._places:
            passed = iter(dataset)
            passed.set_state(self._passed[name])
            collections.deque(passed, maxlen=0)  # it is complete; the next pass follows
        if name not in self._places and name not in self._passed:
            self._fresh.setdefault(name, (dataset, dataset.memory()))
        iterator = self._iterators[name] = iter(dataset)
        if name in self._places:
            iterator.set_state(self._places[name])
        yield from iterator
        self._passed[name] = iterator.get_state()
        del self._iterators[name]
        self._places.pop(name, None)

    # -- for `run` -------------------------------------------------------------------------

    def begin(self, checkpoints: InMemoryCheckpoints | None = None) -> bool:
        """Enters the loop with the group, or restores the state kept by an earlier run of the job.

        Args:
            checkpoints: Where the state of the loop is kept in memory.

        Returns:
            Whether the function is to be called.
        """
        group = self._group
        if group is None:
            self._restore_from_memory(checkpoints)
            return True
        self._loops = group.loops
        group.settle_all()
        self._commits = group.step
        self._keep(counts=False)
        if group.enter(self) is Entry.EARLY:
            return False
        group.position = lambda: self._commits
        group.recover = _go_back
        group.open(True)
        return True

    def _restore_from_memory(self, checkpoints: InMemoryCheckpoints | None) -> None:
        """Restores the state that the last start of the job has kept in memory, if any."""
        placements = {cell.placement for cell in self._objects.followed_cells()}
        is_of_all = jax.process_count() == 1 or any(each.spans_processes for each in placements)
        if checkpoints is None or not is_of_all:
            return
        self._checkpoints = checkpoints
        if placements:
            self._objects.include_streams_of(max(placements, key=lambda each: each.num_replicas))
        if checkpoints.enter(self._objects) is Entry.RESUMED:
            self._keep(counts=False)

    def go_on(self) -> None:
        """Restores the last commit in the next group."""
        group = self._group
        assert group is not None
        group.settle_all()
        self.restore()
        group.regroup(self, is_open=True)
        self._runs = group.runs
        self._keep_copies()

    def step_aside(self) -> None:
        """Restores the last commit, and lets the other workers continue without this one."""
        group = self._group
        if group is None:
            return
        with signals_held:
            group.settle_all()
            if self._keeps_copies:
                self.restore()
            group.open(False)
            group.recover = group.regroup_alone
            group.step_aside(self._loops)

    def end(self) -> None:
        """Waits for pending programs, after which the function is not called again."""
        if self._group is not None:
            self._group.settle(0)
            self._group.open(False)
            self._group.renumber(self._commits)
            self._group.position = self._group.count
            self._group.recover = self._group.regroup_alone

    def forget_memory(self) -> None:
        """Keeps the state in memory no longer: its loop has ended."""
        self._checkpoints = None

    @property
    def can_be_resumed(self) -> bool:
        return True

    def pack(self) -> bytes:
        return self._objects.pack()

    def pack_part(self) -> bytes:
        return self._objects.pack_part()

    def unpack(self, held: bytes, keeps_part: bool = False) -> None:
        self._objects.unpack(held, keeps_part)
        self._keep(counts=False)

    def resume(self, held: bytes, parts: Sequence[bytes]) -> None:
        self._objects.resume(held, parts)
        self._keep(counts=False)

    # -- what is kept ----------------------------------------------------------------------

    def _keep(self, counts: bool = True) -> None:
        self._commits += counts
        self._places |= {name: each.get_state() for name, each in self._iterators.items()}
        self._fresh = {
            name: fresh
            for name, fresh in self._fresh.items()
            if name not in self._places and name not in self._passed
        }
        self._committed = {
            "numbers": dict(self._numbers),
            "places": dict(self._places),
            "passed": dict(self._passed),
        }
        if self._group is not None:
            self._runs = self._group.runs
            self._reset_generators = random_state.snapshot()
        self._keep_copies()

    def _warn_of_what_is_left_out(self) -> None:
        """Warns about variables that change, are equal on all workers, and are not in the state."""
        equal = (Layout.MIRRORED, Layout.SHARDED)
        changed = {
            cell
            for cell, array in self._kept.items()
            if cell.array is not array and cell.layout in equal and cell not in self._known
        }
        if not changed:
            return
        self._known.update(changed)
        missing = sorted(cell.name for cell in changed.difference(self._objects.followed_cells()))
        if missing:
            logger.warning(
                "The training loop changes variables that its elastic.State does not hold: %s. A "
                "worker that joins would have other values, and a job that is started again would "
                "lose them. Give the State what they belong to: State(optimizer=optimizer, ...).",
                ", ".join(missing),
            )

    def _forget_passes(self) -> None:
        """Undoes the passes that began after the last commit.

        If a commit contains a dataset's position, its iterator is set to that. For other datasets,
        the next pass repeats the one that had begun.
        """
        for iterator in self._iterators.values():
            iterator.close()
        self._iterators.clear()
        self._begun.clear()
        for dataset, memory in reversed(self._fresh.values()):
            dataset.recall(memory)
        self._fresh.clear()

    def _keep_copies(self) -> None:
        """Ensures that the variables can be restored to their current values."""
        if self._group is None:
            return
        cells = live_cells(self._group.placement)
        self._kept = {cell: cell.stored() for cell in cells}
        if self._keeps_copies:
            known = self._copying
            self._copying = {c: known.get(c) or functools.partial(self._copy, c) for c in cells}
            for cell, copy in self._copying.items():
                cell.copy_later(copy)

    def _copy(self, cell: Cell) -> None:
        """Copies an array that a program is about to overwrite."""
        self._kept[cell] = copied(self._kept[cell])


class _Numbers:
    """The numbers of a state, in the form that a checkpoint tracks."""

    def __init__(self, state: State):
        self._state = state

    def get_state(self) -> dict[str, Any]:
        own = vars(self._state)
        kept = {name: own[f"_{name}"] for name in ("numbers", "places", "passed", "commits")}
        return kept | {"host": random_state.numpy_and_python()}

    def set_state(self, state: dict[str, Any]) -> None:
        own = vars(self._state)
        own["_numbers"] = own["_numbers"] | state["numbers"]
        own["_places"], own["_passed"] = state["places"], state["passed"]
        own["_commits"] = state["commits"]
        random_state.set_numpy_and_python(state["host"])


def run(function: Callable[Concatenate[State, P], T]) -> Callable[Concatenate[State, P], T | None]:
    """Returns a training loop that continues when the group of workers changes.

    It calls `function` with the state, and after each change calls it again with the last committed
    state: the function must then distribute datasets again (`State.iterate` resumes in them) and
    recompute what depends on `strategy.num_replicas_in_sync`. Outside elastic jobs it just calls
    the function. A program may have several such loops: on a worker that reaches a loop which the
    others have already left, the function is not called and the result is None.

    If a signal handler raises (Ctrl-C, an alarm), the state is restored to the last commit, the
    other workers continue without this one, and the exception propagates. When the loop is called
    again, the worker rejoins the others.

    Args:
        function: A function of a `State` and, optionally, further arguments.
    """

    @functools.wraps(function)
    def wrapped(state: State, *args: P.args, **kwargs: P.kwargs) -> T | None:
        with _loop_in_memory() as checkpoints:
            try:
                if not state.begin(checkpoints):
                    return None
                while True:
                    try:
                        result = function(state, *args, **kwargs)
                        state.end()
                        return result
                    except GroupChanged:
                        state.go_on()
            except BaseException as error:
                if is_of_a_signal_handler(error):
                    state.step_aside()
                raise
            finally:
                state.forget_memory()

    return cast(Callable[Concatenate[State, P], T | None], wrapped)


@contextlib.contextmanager
def _loop_in_memory() -> Iterator[InMemoryCheckpoints | None]:
    """Inside, a loop runs; yields where its state is kept in memory, if it is."""
    checkpoints = in_memory_checkpoints()
    if checkpoints is None:
        yield None
        return
    with checkpoints.loop() as is_outermost:
        yield checkpoints if is_outermost else None


def _go_back() -> None:
    """Makes the loop restore its last commit if the group changes during an exchange."""
    raise GroupChanged(message="The group of workers has changed.")


def _is_number(part: Any) -> bool:
    return isinstance(part, bool | int | float)


def _public(objects: Handover | None) -> set[str]:
    if objects is None:
        return set()
    own = {"numbers", "library_generators"}
    return {name for name in vars(objects) if not name.startswith("_")} - own
