"""A model's step as TensorFlow programs write it: `train_step(self, data)`, which assigns.

Keras' own steps on JAX map a state and a batch to a new state. A step that takes a batch only
reads and assigns variables (with a gradient tape, `optimizer.apply_gradients` and
`metric.update_state`); `StatefulStep` makes of it what Keras' steps are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras

from unison.cells import Cell, has_cell
from unison.conversion import called
from unison.data import Shares, count_examples
from unison.keras.optimizers import scaled_in_keras_steps
from unison.keras.values import values_in
from unison.keras.variables import LiftingScope, scopes_ask_lifts
from unison.lifting import Lift, current_lift
from unison.program.control_flow import converted_if_needed
from unison.program.tracing import traced
from unison.runtime.placement import Placement
from unison.strategies import get_replica_context
from unison.strategies.replica_share import current_share, replica_share

METRICS = "metrics_variables"
_PREDICT = ("trainable_variables", "non_trainable_variables")
_TEST = (*_PREDICT, METRICS)
_TRAIN = (*_PREDICT, "optimizer_variables", METRICS)

#: The groups of a model's state that its steps take, in the order in which Keras passes them.
STATE_OF_STEPS = {"train_step": _TRAIN, "test_step": _TEST, "predict_step": _PREDICT}

#: Those that only an optimizer writes, after gradients have been summed: alike on all replicas.
_WRITTEN_ALIKE = ("trainable_variables", "optimizer_variables")


def is_stateful(step: Callable[..., Any]) -> bool:
    """Whether a bound step takes a batch only, rather than a state and a batch."""
    parameters = inspect.signature(step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(required) == 1


class StatefulStep:
    """A step that reads and assigns variables, as a function of a state and a batch.

    Args:
        step: Maps a batch to logs (or outputs).
        groups: The groups of cells that make up the state.
        combined_later: The cells for which each replica returns what it wrote; of others, the
            writes are combined by their aggregations.
        placement: The replicas' devices.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        groups: Sequence[Sequence[Cell]],
        combined_later: set[Cell],
        placement: Placement,
    ):
        self.__name__ = getattr(step, "__name__", "step")
        self._step = step
        self._groups = groups
        self._combined_later = combined_later
        self._placement = placement
        #: The values of the latest call's new state that are equal on all replicas.
        self.equal_values: list[jax.Array] = []
        #: The cells whose copies no longer are equal after the latest call.
        self.diverging: list[Cell] = []

    def __call__(self, state: Sequence[Sequence[jax.Array]], batch: Any) -> tuple[Any, Any]:
        values = {
            cell: value
            for cells, group in zip(self._groups, state, strict=True)
            for cell, value in zip(cells, group, strict=True)
        }
        lift = _StepLift(self._placement, values, self._combined_later)
        with lift.active(), LiftingScope(lift):
            result = values_in(called(self._step, without_absent_parts(batch)))
            values.update(lift.results())
        self.equal_values = [values[cell] for cell in lift.alike]
        self.diverging = [cell for cell in lift.diverging if cell not in self._combined_later]
        return result, tuple([values[cell] for cell in cells] for cells in self._groups)


def cells_touched_by(
    step: Callable[[Any], Any],
    batch: Any,
    placement: Placement,
    replica: Callable[[float], contextlib.AbstractContextManager[Any]],
) -> list[Cell]:
    """Returns the cells that `step` reads or writes; what it creates is created.

    Args:
        step: Maps a batch to logs.
        batch: A batch of its data.
        placement: The replicas' devices.
        replica: Makes the context of a replica, given its share of the examples.
    """
    leaves, structure = jax.tree.flatten(batch)
    shares = Shares(count_examples(leaves), placement.num_replicas)
    lift: NotingLift | None = None

    def run(*arrays: Any) -> None:
        nonlocal lift
        lift = NotingLift(placement, {}, takes_new_cells=True)
        share = shares.chunk / shares.examples
        with lift.active(), LiftingScope(lift), replica(share):
            values_in(called(step, without_absent_parts(jax.tree.unflatten(structure, arrays))))

    avals = [jax.ShapeDtypeStruct((shares.chunk, *x.shape[1:]), x.dtype) for x in leaves]
    converted_if_needed(lambda: traced(run, *avals, num_replicas=placement.num_replicas))
    assert lift is not None
    return list(lift.touched)


def assigning(model: keras.Model, name: str) -> Callable[[Any], Any]:
    """Returns a step of `model` that takes a batch, and reads and assigns variables.

    Args:
        model: A compiled model.
        name: The name of its step.
    """
    step = getattr(model, name)
    if is_stateful(step):
        return step

    @functools.wraps(step)
    def assigning_step(batch: Any) -> Any:
        return call_assigning(
            model, lambda _, *state_and_batch: step(*state_and_batch), name, batch
        )

    return assigning_step


@contextlib.contextmanager
def metrics_having(
    model: keras.Model, values: Sequence[Any], lift: NotingLift
) -> Iterator[NotingLift]:
    """Inside, the metrics' variables have `values`, and others, if any, those of `lift`."""
    with contextlib.ExitStack() as stack:
        if lift.has_values:
            stack.enter_context(lift.active())
            stack.enter_context(LiftingScope(lift))
        mapping = list(zip(model.metrics_variables, values, strict=True))
        stack.enter_context(keras.StatelessScope(state_mapping=mapping))
        yield lift


def call_assigning(
    model: keras.Model, step: Callable[..., Any], name: str, batch: Any
) -> dict[str, Any] | Any:
    """Calls a step that maps a state to a state; reads the state from variables, and assigns it.

    Args:
        model: A compiled model.
        step: Keras' own step, unbound: it takes the model, its state and a batch.
        name: Its name.
        batch: The batch.

    Returns:
        The step's logs or outputs.
    """
    # A running loop has built what it uses, and lent the arrays that it would take to build more.
    are_lent = any(has_cell(each) and each.cell.array is None for each in model.variables)
    if name != "predict_step" and not are_lent:
        type(model)._symbolic_build(model, data_batch=batch)  # what is not built yet, as in `fit`
    names = STATE_OF_STEPS[name]
    groups = [_variables(model, group) for group in names]
    state = tuple([variable.value for variable in group] for group in groups)
    with _in_a_step_of_keras(model), scopes_ask_lifts.bound_to(True):
        result, new = step(model, state, batch)
    if name == "predict_step":
        new = (state[0], new)
    lift = current_lift()
    for group, variables, before, after in zip(names, groups, state, new, strict=True):
        alike = lift.equal_writes() if lift and group in _WRITTEN_ALIKE else None
        with alike or contextlib.nullcontext():
            for variable, old, value in zip(variables, before, after, strict=True):
                if value is old:
                    continue
                if lift and has_cell(variable):  # perhaps with the part of a divided state
                    lift.assign(variable.cell, value)
                else:
                    variable.assign(value)
    return result


@contextlib.contextmanager
def _in_a_step_of_keras(model: keras.Model) -> Iterator[None]:
    """Inside, a replica scales what Keras' own steps on JAX leave to be scaled."""
    context = get_replica_context()
    share = current_share()
    if share is None and context is not None:
        share = 1 / context.num_replicas_in_sync
    if share is None:
        yield
        return
    with replica_share(share, scaled_in_keras_steps(model)):
        yield


def _variables(model: keras.Model, group: str) -> list[keras.Variable]:
    if group == "optimizer_variables":
        return [] if model.optimizer is None else model.optimizer.variables
    return list(getattr(model, group))


def without_absent_parts(batch: Any) -> Any:
    """Returns a batch without labels or weights that are None, as programs unpack it."""
    if isinstance(batch, tuple):
        while len(batch) > 1 and batch[-1] is None:
            batch = batch[:-1]
    return batch


class _StepLift(Lift):
    """A lift that leaves it to the step to combine what was written to some cells."""

    def __init__(self, placement: Placement, values: dict[Cell, Any], combined_later: set[Cell]):
        super().__init__(placement, values)
        self._combined_later = combined_later
        self._writes_are_alike = False
        #: The cells that were last written with equal values on all replicas (an ordered set).
        self.alike: dict[Cell, None] = {}

    def combines_now(self, cell: Cell) -> bool:
        return cell not in self._combined_later and super().combines_now(cell)

    @contextlib.contextmanager
    def equal_writes(self) -> Iterator[None]:
        outer, self._writes_are_alike = self._writes_are_alike, True
        try:
            with super().equal_writes():
                yield
        finally:
            self._writes_are_alike = outer

    def assign(self, cell: Cell, value: jax.Array) -> None:
        super().assign(cell, self._detached(value))
        if self._writes_are_alike:
            self.alike[cell] = None
        else:
            self.alike.pop(cell, None)

    def add(self, cell: Cell, delta: jax.Array) -> None:
        super().add(cell, self._detached(delta))

    def _detached(self, value: jax.Array) -> jax.Array:
        """Returns a value that may leave Keras' gradient, which does not flow through variables."""
        return value if self.is_traced_now else jax.lax.stop_gradient(value)


class NotingLift(Lift):
    """A lift that notes which cells are touched."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        #: An ordered set.
        self.touched: dict[Cell, None] = {}

    def own_copy(self, cell: Cell) -> jax.Array:  # called by reads, those of branches too
        self.touched[cell] = None
        return super().own_copy(cell)

    def assign(self, cell: Cell, value: jax.Array) -> None:
        self.touched[cell] = None
        super().assign(cell, value)

    def add(self, cell: Cell, delta: jax.Array) -> None:
        self.touched[cell] = None
        super().add(cell, delta)
