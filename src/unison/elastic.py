"""Training loops of your own in a job whose workers may change (`unison run --min-workers`).

Keras' `fit` needs nothing of this. A loop of your own is a function of a `State`; `run` calls it
again, where the state was committed last, whenever the group of workers has changed.
"""

from __future__ import annotations

import collections
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp

from unison.cells import Cell, Layout, live_cells
from unison.data import DistributedDataset, DistributedIterator
from unison.runtime.elastic import ElasticOptions as Options
from unison.runtime.elastic import Entry, GroupChanged, elastic_group
from unison.runtime.interrupts import is_of_a_signal_handler, signals_held, without_signals
from unison.train import random_state
from unison.train.handover import Handover

__all__ = ["GroupChanged", "Options", "State", "run"]

logger = logging.getLogger("unison")

P = ParamSpec("P")
T = TypeVar("T")


class State:
    """What a training loop needs to go on in another group of workers.

    Numbers are attributes, to be read and set: `state.step += 1`. Everything else is what a
    `unison.train.Checkpoint` follows: Keras models and optimizers, variables, modules, metrics.
    `commit` says that a step is complete; what happens to the group afterwards, the state goes back
    to that. Workers that join get the state of the others, but no part of what is summed over the
    replicas where it is read (`ON_READ`, `SUM`).

    Args:
        steps_are_one_program: Whether there is at most one `strategy.run` that assigns variables
            between two commits, and no assignment outside. Then nothing needs to be copied: a
            program takes effect as a whole or not at all. Otherwise each commit keeps a copy of
            what is overwritten after it.
        parts: Numbers, and what has variables, by name. All workers give the same.

    Raises:
        ValueError: A part is neither a number nor something that a checkpoint can follow.

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
        self._keeps_copies = not steps_are_one_program
        self._iterators: dict[str, DistributedIterator] = {}
        #: Where iterators are, by name; where the latest complete pass has ended, which says how
        #: the next one is shuffled; and the datasets of the present call that have been iterated.
        self._places: dict[str, dict[str, Any]] = {}
        self._passed: dict[str, dict[str, Any]] = {}
        self._begun: dict[str, DistributedDataset] = {}
        #: The datasets of which no commit has carried a place, with what passes over them had left
        #: behind before the first one here.
        self._fresh: dict[str, tuple[DistributedDataset, Any]] = {}
        self._commits = 0
        self._committed: dict[str, Any] = {}
        #: The variables' arrays at the last commit, and what copies them before a program may
        #: overwrite them.
        self._kept: dict[Cell, jax.Array] = {}
        self._copying: dict[Cell, Callable[[], None]] = {}
        #: Cells that have changed and that a worker that joins gets, or that were warned of.
        self._known: weakref.WeakSet[Cell] = weakref.WeakSet()
        #: Brings the random generators of the process back to where they were then.
        self._reset_generators: Callable[[], None] = lambda: None
        #: How many programs there had been at the last commit.
        self._runs = 0
        #: How many loops the group had come to before the present one.
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
        """Says that what was done since the last commit is complete, on this worker.

        Raises:
            GroupChanged: The group has changed; `run` takes care of it.
            RuntimeError: More than one program has assigned variables since the last commit,
                although the state was told that none would.
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
        with signals_held:
            self._keep()
        if group is not None:
            group.tell("commit")
        if group is not None and group.is_over:
            raise GroupChanged(message="The group of workers has changed.")

    @without_signals
    def restore(self) -> None:
        """Goes back to the last commit."""
        self._numbers = dict(self._committed.get("numbers", self._numbers))
        self._places = dict(self._committed.get("places", {}))
        self._passed = dict(self._committed.get("passed", {}))
        self._forget_passes()
        self._reset_generators()
        for cell, array in self._kept.items():
            if not array.is_deleted():  # else a program has had it that left the value as it was
                cell.put(array)
        self._keep_copies()

    def iterate(self, dataset: DistributedDataset, name: str = "data") -> Iterator[Any]:
        """Yields the batches of a distributed dataset, from where the state was committed on.

        In the function that `run` calls, so that after a change of the group the rest of the pass
        is divided among the workers that are there: each example is used once. The passes that
        follow are shuffled as they would have been.

        Args:
            dataset: What `strategy.experimental_distribute_dataset` has returned, in this call of
                the function.
            name: Tells several datasets apart.
        """
        is_new = self._begun.get(name) is not dataset
        self._begun[name] = dataset
        if is_new and name in self._passed and name not in self._places:
            passed = iter(dataset)
            passed.set_state(self._passed[name])
            collections.deque(passed, maxlen=0)  # nothing is left of it; the next pass follows
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

    def begin(self) -> bool:
        """Comes to the group, or takes over what an earlier run of the job has kept.

        Returns:
            Whether the function is to be called.
        """
        group = self._group
        if group is None:
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

    def go_on(self) -> None:
        """Goes back to the last commit, in the next group."""
        group = self._group
        assert group is not None
        group.settle_all()
        self.restore()
        group.regroup(self, is_open=True)
        self._runs = group.runs
        self._keep_copies()

    def step_aside(self) -> None:
        """Goes back to the last commit, and has the others go on without this worker."""
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
        """Waits for what is under way, after which the function is not called again."""
        if self._group is not None:
            self._group.settle(0)
            self._group.open(False)
            self._group.renumber(self._commits)
            self._group.position = self._group.count
            self._group.recover = self._group.regroup_alone

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
        """Warns of variables that change, are equal on all workers, and that none would get."""
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
        """Undoes the passes that were begun since the last commit.

        Where a commit has carried the place of a dataset, its iterator is set to that. Of others,
        the next pass is the one that has been begun.
        """
        for iterator in self._iterators.values():
            iterator.close()
        self._iterators.clear()
        self._begun.clear()
        for dataset, memory in reversed(self._fresh.values()):
            dataset.recall(memory)
        self._fresh.clear()

    def _keep_copies(self) -> None:
        """Sees to it that the variables can be brought back to what they are now."""
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
        """Copies what a program is about to overwrite."""
        self._kept[cell] = jnp.copy(self._kept[cell])


class _Numbers:
    """The numbers of a state, as a checkpoint follows them."""

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
    """Returns a training loop that goes on when the group of workers changes.

    It calls `function` with the state, and again, with the state as it was committed last, after
    each change: then datasets are to be distributed anew (`State.iterate` goes on in them), and
    what depends on `strategy.num_replicas_in_sync` computed again. Outside elastic jobs it just
    calls the function. A program may have several such loops: a worker that comes to one which the
    others have left does not call the function, and gets None.

    If a signal handler raises (Ctrl-C, an alarm), the state goes back to the last commit, the
    others go on without this worker, and the error is passed on. When the loop is called again, the
    worker joins the others.

    Args:
        function: Takes a `State`, and may take more.
    """

    @functools.wraps(function)
    def wrapped(state: State, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            if not state.begin():
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

    return cast(Callable[Concatenate[State, P], T | None], wrapped)


def _go_back() -> None:
    """What a question does in a loop when the group has changed: the loop goes back."""
    raise GroupChanged(message="The group of workers has changed.")


def _is_number(part: Any) -> bool:
    return isinstance(part, bool | int | float)


def _public(objects: Handover | None) -> set[str]:
    if objects is None:
        return set()
    own = {"numbers", "library_generators"}
    return {name for name in vars(objects) if not name.startswith("_")} - own
