"""Traces one step of a Keras model, as a replica runs it on its part of a batch."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.extend.core import ClosedJaxpr

from unison.captured import StateCapturedError, noting_captured
from unison.cells import Cell, Layout, VariableAggregation
from unison.collectives import all_reduce, all_reduce_packed
from unison.collectives.presence import from_the_first_operation
from unison.conversion import called
from unison.data import Shares
from unison.interrupts import signals_held
from unison.keras.control_flow import methods_converted
from unison.keras.losses import with_global_reductions
from unison.keras.metric_states import Update, updates_of
from unison.keras.optimizers import scaled_in_keras_steps, values_known_equal
from unison.keras.sharded_update import own_state, whole_state
from unison.keras.share_notes import note_share
from unison.keras.stateful_step import NotingLift, StatefulStep, metrics_having
from unison.keras.values import values_in
from unison.lifting import combine_writes, seen_from_outside
from unison.program.control_flow import converted_if_needed
from unison.program.tracing import traced
from unison.runtime.placement import REPLICA_AXIS
from unison.strategies import Strategy
from unison.strategies.context import FillerCombinedError, with_filler
from unison.strategies.replica_share import ScaledBy, replica_share

logger = logging.getLogger("unison")

#: The groups whose copies the replicas write differently (the others change by the summed
#: gradients only, and stay equal).
_LOCAL_GROUPS = ("non_trainable_variables", "metrics_variables")

#: The group of what a step that assigns touches beside the model's state. What the replicas write
#: to it is combined when the step returns.
OTHERS = "other_variables"

#: For which updates averaging is exact, where a step assigns variables and where it returns them.
_EXACT_IF_ASSIGNED = (
    "what is the same on all replicas. A replica's gradients are its part of the global gradient: "
    'sum them before, by tf.distribute.get_replica_context().all_reduce("SUM", gradients).'
)
_EXACT_IF_RETURNED = (
    "an update that is linear in the gradients. Use self.optimizer.stateless_apply for others."
)

#: A state, or what is of its form, in the groups that Keras passes.
_Groups = Sequence[Sequence[Any]]

#: The states of metrics that are neither sums nor extremes.
_warned_of: weakref.WeakSet[Cell] = weakref.WeakSet()

#: The combination over replicas of metrics' states that are not sums.
_EXTREMES = {Update.MAX: "MAX", Update.MIN: "MIN"}

#: The key of the metrics of all replicas in a step's results, if it has them.
METRICS_OF_ALL = "metrics of all replicas"


#: The errors of operations that cannot compute with no examples, such as a maximum.
_NEED_EXAMPLES = (IndexError, TypeError, ValueError, ZeroDivisionError)


@dataclasses.dataclass(frozen=True)
class StepTrace:
    """A step as traced for the replicas with the same number of examples.

    Attributes:
        jaxpr: Maps the flat state and the batch to the results and the new flat state.
        rows: The number of rows of the batch.
        results: The structure of the results.
        written: The indices of the state that it changes.
    """

    jaxpr: ClosedJaxpr
    rows: int
    results: Any
    written: set[int]

    def used(self, state_size: int) -> set[int]:
        """Returns the indices of the state whose values it uses for more than returning them."""
        jaxpr = self.jaxpr.jaxpr
        results = jaxpr.outvars[: self.results.num_leaves]
        atoms = [*results, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
        used = set(map(id, atoms))
        return {index for index in range(state_size) if id(jaxpr.invars[index]) in used}


def _part_of_mean(value: Any, share: float) -> jax.Array:
    """Returns a log times the replica's share: of an integer, a floating-point number, too."""
    part = jnp.asarray(value) * share
    return part if share else jnp.zeros_like(part)  # of NaN, too


class StepTracer:
    """Traces a train, test or predict step of `model`.

    Args:
        model: A built Keras model.
        strategy: The strategy whose replicas run it.
        step: Maps the state of one replica, a tuple of lists of arrays, and its batch to logs
            (or outputs) and the new state.
        cells: The groups of the model's variables that make up the state, in order.
        returns_examples: Whether the step returns one row an example rather than logs.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        step: Callable[..., Any],
        cells: dict[str, list[Cell]],
        returns_examples: bool,
    ):
        self._model = model
        self._strategy = strategy
        self._step = step
        self._assigns = isinstance(step, StatefulStep)
        self._sizes = [len(members) for members in cells.values()]
        #: The cells of the state, flat.
        self.cells = [cell for members in cells.values() for cell in members]
        #: The group of each of them.
        self.groups = [group for group, members in cells.items() for _ in members]
        #: Whether the step trains the model.
        self.trains = "optimizer_variables" in cells
        #: Whether it returns one row an example.
        self.returns_examples = returns_examples
        #: Whether the steps' results have the metrics of all replicas. Combining them takes all
        #: processes, which need not read the same logs.
        has_others = strategy.placement.spans_processes or strategy.placement.is_elastic
        self.tells_metrics = has_others and not returns_examples
        #: The names of the logs that are results of metrics; known after the first step.
        self.metric_names: list[str] = []
        #: The names of all logs.
        self.log_names: list[str] = []

    def regrouped(self, flat: Sequence[Any]) -> tuple[list[Any], ...]:
        groups = []
        start = 0
        for size in self._sizes:
            groups.append(list(flat[start : start + size]))
            start += size
        return tuple(groups)

    def trace(
        self,
        count: int,
        shares: Shares,
        structure: Any,
        leaves: list[Any],
        flat: list[Any],
        diverging: set[int],
    ) -> StepTrace:
        """Traces the step of a replica that gets `count` examples.

        A replica without examples gets none from a step that assigns, as on TensorFlow, and from
        one for Keras on JAX that combines values of the replicas by hand. In others of these, and
        where something in the step needs some, it gets a row of zeros, whose results do not count.

        The indices of other variables whose copies it leaves different are added to `diverging`.
        """
        args = (shares, structure, leaves, flat, diverging)
        if count:
            return self._trace(count, count, *args)
        if not self._assigns:
            with contextlib.suppress(FillerCombinedError), with_filler():
                return self._trace(count, 1, *args)
        try:
            return self._trace(count, 0, *args)
        except _NEED_EXAMPLES as error:
            with with_filler(error):
                return self._trace(count, 1, *args)

    def _trace(
        self,
        count: int,
        rows: int,
        shares: Shares,
        structure: Any,
        leaves: list[Any],
        flat: list[Any],
        diverging: set[int],
    ) -> StepTrace:
        share = count / shares.examples
        tree: Any = None

        def on_one_replica(*args: Any) -> list[Any]:
            nonlocal tree
            batch = args[len(flat) :]
            with (
                from_the_first_operation(),
                replica_of_step(self._model, self._strategy, share, self._assigns),
                values_known_equal() as equal,
                whole_state(self.cells, args[: len(flat)]) as state,
            ):
                if not self.trains:
                    state = self._united(state)
                with methods_converted(self._model):
                    results, new = called(
                        self._step, self.regrouped(state), jax.tree.unflatten(structure, batch)
                    )
                if isinstance(self._step, StatefulStep):
                    equal += self._step.equal_values
                    diverging.update(map(self.cells.index, self._step.diverging))
                new_flat = [value for group in new for value in group]
                if not self.returns_examples:
                    before = self.regrouped(state)
                    results = self._global_logs(flat_logs(results), before, new, share)
                new_flat = [
                    old if value is seen else value
                    for old, seen, value in zip(args, state, new_flat, strict=False)
                ]
                new_flat = self._with_equal_updates(args, new_flat, equal, share)
                new_flat = own_state(self.cells, args, new_flat)
            combining = self._combining(args, new_flat)
            statistics = self._statistics(args, new_flat) if 0 in shares.counts else []
            if count == 0:
                results, new_flat = self._without_example(results, args, new_flat)
            if shares.proportions is not None and statistics:
                self._share_statistics(new_flat, statistics, shares, has_examples=count > 0)
            new_flat = self._combine_writes(combining, new_flat)
            new_flat = [
                value if cell.extreme is None else all_reduce(cell.extreme, value)
                for cell, value in zip(self.cells, new_flat, strict=True)
            ]
            if self.tells_metrics:
                results = {**results, METRICS_OF_ALL: self._metrics_of_all(new_flat)}
            results, tree = jax.tree.flatten(results)
            return [*results, *new_flat]

        avals = [_replica_aval(c, a) for c, a in zip(self.cells, flat, strict=True)]
        avals += [jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in leaves]
        captured: list[str] = []
        noting = contextlib.nullcontext(captured) if self._assigns else noting_captured()
        with self._strategy.placement.tracing(), noting as captured:
            try:
                jaxpr = converted_if_needed(
                    lambda: traced(on_one_replica, *avals, num_replicas=shares.num_replicas)
                )
            except Exception as error:
                if captured:  # perhaps for that reason
                    raise StateCapturedError(captured) from error
                if isinstance(error, TypeError | ValueError):
                    note_share(error, [x.shape for x in leaves], rows, shares)
                raise
        if captured:
            raise StateCapturedError(captured)
        inputs = jaxpr.jaxpr.invars[: len(flat)]
        outputs = jaxpr.jaxpr.outvars[len(jaxpr.jaxpr.outvars) - len(flat) :]
        pairs = enumerate(zip(inputs, outputs, strict=True))
        return StepTrace(
            jaxpr, rows, tree, {index for index, (old, new) in pairs if new is not old}
        )

    def logs_without_metrics(
        self, logs: Any, before: _Groups, new: _Groups
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sorts the names of the logs, and returns those logs that no metric reports later.

        Metrics report what they calculate of their own variables. What others calculate, of a
        `tf.Variable` for example, is calculated here, of the values over all replicas.

        Returns:
            The logs of this replica, and those over all replicas.
        """
        with self._metrics_having(new) as lift:
            results = self._model.get_metrics_result()
            changed = self._changed_others(before, new)
            updated = iter([new is not old for old, new in zip(before[-1], new[-1], strict=True)])
            # A step of the user's may log something else, such as a `loss` of its own, under the
            # name of a metric that it does not update.
            silent: set[str] = set()
            used: dict[str, set[Cell]] = {}
            for metric in self._model.metrics:
                of_metric = [next(updated) for _ in metric.variables]
                lift.touched.clear()
                result = values_in(metric.result())
                names = list(result) if isinstance(result, dict) else [metric.name]
                if not any(of_metric) and changed.isdisjoint(lift.touched):
                    silent.update(names)
                elif lift.touched:
                    used.update({name: set(lift.touched) for name in names})
        self.log_names = list(logs)
        later = results.keys() - silent - used.keys()
        self.metric_names = [name for name in logs if name in later]
        own = {name: value for name, value in logs.items() if name not in later | used.keys()}
        now = [name for name in logs if name in used]
        if not now:
            return own, {}
        cells = set().union(*(used[name] for name in now))
        with self._metrics_having(self._over_all_replicas(new, cells)):
            results = self._model.get_metrics_result()
        return own, {name: jnp.asarray(results[name]) for name in now}

    def _metrics_having(self, state: _Groups) -> contextlib.AbstractContextManager[NotingLift]:
        others = self._others
        values = dict(zip(others, state[-2], strict=True)) if others else {}
        # What the step does not use, others may: evaluation, for example.
        lift = NotingLift(self._strategy.placement, values, takes_new_cells=True)
        return metrics_having(self._model, state[-1], lift)

    @property
    def _others(self) -> list[Cell]:
        return [c for c, group in zip(self.cells, self.groups, strict=True) if group == OTHERS]

    def _changed_others(self, before: _Groups, after: _Groups) -> set[Cell]:
        others = self._others
        if not others:
            return set()
        pairs = zip(others, before[-2], after[-2], strict=True)
        return {cell for cell, old, new in pairs if new is not old}

    def _over_all_replicas(self, state: _Groups, others: set[Cell]) -> _Groups:
        """Returns a state in which `others` and metrics' variables are as outside of replicas."""
        flat = [value for group in state for value in group]
        return self.regrouped(
            [
                seen_from_outside(cell, value)
                if cell in others or group == "metrics_variables"
                else value
                for cell, group, value in zip(self.cells, self.groups, flat, strict=True)
            ]
        )

    def _global_logs(
        self, logs: Any, before: _Groups, new: _Groups, share: float
    ) -> dict[str, Any]:
        """Leaves to `StepLogs` what metrics report, and averages the rest over the examples."""
        own, of_all = self.logs_without_metrics(logs, before, new)
        weighted = jax.tree.map(lambda value: _part_of_mean(value, share), own)
        return (all_reduce("SUM", weighted) if own else {}) | of_all

    def _without_example(
        self, results: Any, state: Sequence[Any], new: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Undoes what a replica without examples computed from no rows, or from a row of zeros.

        Its random streams still advance, in step with those of the other replicas.
        """
        if self.returns_examples:
            results = jax.tree.map(lambda rows: rows[:0], results)
        keep = [
            group in _LOCAL_GROUPS and cell.layout is not Layout.STREAM
            for group, cell in zip(self.groups, self.cells, strict=True)
        ]
        merged = zip(keep, state[: len(new)], new, strict=True)
        return results, [old if unchanged else value for unchanged, old, value in merged]

    def _statistics(self, before: Sequence[Any], after: Sequence[Any]) -> list[int]:
        """Returns which of the written variables are means over the replicas' examples."""
        return [
            index
            for index, (group, cell) in enumerate(zip(self.groups, self.cells, strict=True))
            if group == "non_trainable_variables"
            and after[index] is not before[index]
            and jnp.issubdtype(after[index].dtype, jnp.inexact)
            and cell.aggregation is not VariableAggregation.SUM
        ]

    def _share_statistics(
        self, state: list[Any], statistics: list[int], shares: Shares, has_examples: bool
    ) -> None:
        """Gives a replica without examples the mean of the others' statistics.

        It may never get any, and its statistics, the initial ones, would count for ever.
        """
        own = [state[index] for index in statistics]
        sums = all_reduce_packed(own if has_examples else [jnp.zeros_like(x) for x in own])
        if not has_examples:
            num_sharing = sum(count > 0 for count in shares.counts)
            for index, total in zip(statistics, sums, strict=True):
                state[index] = (total / num_sharing).astype(state[index].dtype)

    def _united(self, state: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns `state` with the means of copies that have diverged (moving statistics).

        Evaluation and prediction see what is read and saved, not each replica its own copy.
        """
        diverged = [
            index
            for index, cell in enumerate(self.cells)
            if cell.layout is Layout.LOCAL
            and not cell.is_on_read
            and cell.aggregation is VariableAggregation.MEAN
        ]
        united = list(state)
        sums = all_reduce_packed([state[index] for index in diverged])
        for index, total in zip(diverged, sums, strict=True):
            united[index] = total / self._strategy.num_replicas_now
        return united

    def _with_equal_updates(
        self, before: Sequence[Any], after: list[Any], equal: list[Any], share: float
    ) -> list[Any]:
        """Returns `after` with equal weights on all replicas, whoever updated them.

        What an optimizer returns is equal already. The results of a step that changes weights in
        a way of its own are averaged by the examples (of integers, the first replica's are taken).
        """
        known = set(map(id, equal))
        own = [
            index
            for index, (group, value) in enumerate(zip(self.groups, after, strict=True))
            if group not in (*_LOCAL_GROUPS, OTHERS)
            and value is not before[index]
            and id(value) not in known
        ]
        if not own or self._strategy.num_replicas_now == 1:
            return after
        logger.warning(
            "The step of model %r changes %d variables without its optimizer, by what each "
            "replica computed alone. The results are averaged over the replicas, weighted by "
            "examples: exact for %s",
            self._model.name,
            len(own),
            _EXACT_IF_ASSIGNED if self._assigns else _EXACT_IF_RETURNED,
        )
        is_first = lax.axis_index(REPLICA_AXIS) == 0

        def contribution(value: jax.Array) -> jax.Array:
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                return jnp.where(is_first, value, jnp.zeros_like(value))
            return jnp.zeros_like(value) if share == 0 else (value * share).astype(value.dtype)

        totals = all_reduce_packed([contribution(after[index]) for index in own])
        for index, total in zip(own, totals, strict=True):
            after[index] = total
        return after

    def _combining(self, before: Sequence[Any], after: Sequence[Any]) -> list[int]:
        """Returns which of the written variables have copies that stay equal (`ON_WRITE`)."""
        return [
            index
            for index, (group, cell) in enumerate(zip(self.groups, self.cells, strict=True))
            if group in _LOCAL_GROUPS and after[index] is not before[index] and cell.combines_writes
        ]

    def _combine_writes(self, combining: list[int], values: Sequence[Any]) -> list[Any]:
        """Returns `values` with what all replicas wrote to the `combining` variables."""
        cells = [self.cells[index] for index in combining]
        combined = combine_writes(cells, [values[index] for index in combining])
        everything = list(values)
        for index, value in zip(combining, combined, strict=True):
            everything[index] = value
        return everything

    def combine_extremes(self, traces: Iterable[StepTrace], state: list[jax.Array]) -> bool:
        """Has steps combine the states of metrics that are maxima or minima, not sums.

        Warns of those that are neither. Returns whether the step has to be traced again.
        """
        if self._strategy.num_replicas_now == 1:
            return False
        sums = [
            index
            for index, (group, cell) in enumerate(zip(self.groups, self.cells, strict=True))
            if group == "metrics_variables"
            and cell.is_on_read
            and cell.reading_aggregation is VariableAggregation.SUM
        ]
        found: dict[int, set[Update]] = {index: set() for index in sums}
        for trace in traces:
            outputs = {index: trace.results.num_leaves + index for index in sums}
            for index, update in updates_of(trace.jaxpr.jaxpr, outputs).items():
                found[index].add(update)
        extremes = False
        for index, updates in found.items():
            updates -= {Update.NONE}
            (update,) = updates if len(updates) == 1 else (Update.OTHER,)
            if update in _EXTREMES:
                extremes = True
                with self._returned(index, state):
                    self.cells[index].keep_equal_by(_EXTREMES[update])
            elif not updates <= {Update.SUM} and self.cells[index] not in _warned_of:
                _warned_of.add(self.cells[index])
                logger.warning(
                    "A metric updates its state %r in another way than by adding to it, or by a "
                    "maximum or minimum. Its result on %d replicas is not that of one device: the "
                    "replicas' states are added up. Write the update as a sum (state.assign_add), "
                    "or create the state with add_variable(..., aggregation='mean').",
                    self.cells[index].name,
                    self._strategy.num_replicas_now,
                )
        return extremes

    def _metrics_of_all(self, state: Sequence[Any]) -> list[Any]:
        """Returns the values of the metrics' variables, combined over the replicas."""
        pairs = zip(self.cells, self.groups, state, strict=True)
        return [
            seen_from_outside(cell, value)
            for cell, group, value in pairs
            if group == "metrics_variables"
        ]

    def localize(self, written: Iterable[int], diverging: set[int], flat: list[Any]) -> None:
        """Gives the replicas copies of their own of the state that they write differently."""
        for index in written:
            cell = self.cells[index]
            if self.groups[index] not in _LOCAL_GROUPS and index not in diverging:
                continue
            if cell.layout is Layout.MIRRORED and not cell.combines_writes:
                with self._returned(index, flat):
                    cell.localize()

    @contextlib.contextmanager
    def _returned(self, index: int, state: list[jax.Array]) -> Iterator[None]:
        """Inside, a cell of which the step has the array has it itself, and may change its form."""
        cell = self.cells[index]
        with signals_held:
            borrower = cell.borrower
            cell.put(state[index])
            yield
            state[index] = cell.take()
            if borrower is not None:
                cell.lend(borrower)


def flat_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs in which a metric of several results has an entry for each, as Keras shows."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


@contextlib.contextmanager
def replica_of_step(
    model: keras.Model, strategy: Strategy, share: float, assigns: bool
) -> Iterator[None]:
    """Inside, the thread is a replica of `strategy` that runs a step of `model`.

    Args:
        model: A compiled model.
        strategy: Its strategy.
        share: The replica's share of the global batch's examples.
        assigns: Whether the step assigns variables, as `train_step(self, data)` does.
    """
    scaled_by = ScaledBy.LOSSES if assigns else scaled_in_keras_steps(model)
    with (
        strategy.replica_context(),
        replica_share(share, scaled_by),
        with_global_reductions(model, share),
    ):
        yield


def _replica_aval(cell: Cell, stored: jax.Array) -> jax.ShapeDtypeStruct:
    shape = stored.shape
    if cell.layout is Layout.LOCAL:
        shape = shape[1:]
    elif cell.layout is Layout.SHARDED:
        axis = cell.divided_axis
        size = shape[axis] // cell.placement.num_replicas
        shape = (*shape[:axis], size, *shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, stored.dtype)
