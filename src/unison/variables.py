"""`Variable`: state that a strategy keeps on every replica."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.captured import note_captured
from unison.cells import (
    Cell,
    Layout,
    VariableAggregation,
    VariableSynchronization,
    has_cell,
)
from unison.collectives import all_gather, broadcast
from unison.collectives.components import on_device
from unison.eager_fallback import needs_python
from unison.lifting import combine_writes, current_lift, outside_the_program
from unison.names import current_name_scope
from unison.observers import note_read
from unison.runtime.device_strings import canonical_name
from unison.runtime.placement import WEIGHTS, placement_in_scope
from unison.runtime.precision import device_dtype
from unison.runtime.private_jax import constant_value, let_jax_take
from unison.slices import Index, IndexedSlices, batch_index, nd_index, row_index, updated
from unison.values import Mirrored, PerReplica, ReplicaLocal, is_numeric

_numbers = itertools.count()

#: The sizes of a variable's axes; None for those that assignments may change.
Sizes = tuple[int | None, ...]


class Variable:
    """A value that programs read and update, with a copy on every replica.

    Create it inside `strategy.scope()`. Its annotations determine how the copies are kept
    consistent:

    * `ON_WRITE` (and `AUTO`): an update made by the replicas is combined by `aggregation`, and
      all copies stay equal. With `NONE` each replica updates its own copy.
    * `ON_READ`: replicas update their own copy without communication; reading outside the
      replicas combines the copies by `aggregation`.

    A function that `strategy.run` calls may create variables when it is first traced, and must keep
    them: their initial values must not depend on its arguments. JAX functions accept a variable in
    place of an array, and it is a leaf in `jax.tree`.

    Args:
        initial_value: An array, a number, or a function of no arguments that returns one.
        trainable: Whether `trainable_variables` lists it. Default: True, False for `ON_READ`.
        name: For messages. Default: `Variable_<number>`.
        dtype: The dtype; default: that of `initial_value`.
        shape: The sizes of the axes, with None for those that assignments outside programs may
            change; `...` if they may change the number of axes too. Default: that of
            `initial_value`.
        constraint: A function of the value, for an optimizer to apply after its updates.
        synchronization: A `VariableSynchronization`.
        aggregation: A `VariableAggregation`.

    Raises:
        ValueError: There is no initial value, or it does not fit `shape` or `dtype`; with several
            replicas: `MEAN` with an integer dtype, or `synchronization=NONE`; inside a program:
            the initial value depends on its inputs, or the program has been traced before.

    Examples:
        >>> import unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     steps = unison.Variable(0, aggregation=unison.VariableAggregation.SUM)
        >>> _ = strategy.run(lambda: steps.assign_add(1))
        >>> int(steps)
        2

    TF: `tf.Variable`.
    """

    # NumPy must defer to the variable in `array + variable`.
    __array_priority__ = 100

    def __init__(
        self,
        initial_value: Any | Callable[[], Any],
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        shape: Sequence[int | None] | EllipsisType | None = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ):
        synchronization = VariableSynchronization(synchronization)
        aggregation = VariableAggregation(aggregation)
        if constraint is not None and not callable(constraint):
            raise ValueError(
                f"constraint must be a function of the value. Received: {constraint!r}"
            )
        name = f"{current_name_scope()}{name or f'Variable_{next(_numbers)}'}"
        placement = placement_in_scope()
        value = _initial_array(initial_value, name, None if dtype is None else device_dtype(dtype))
        sizes = value.shape if shape is None else shape if shape is ... else tuple(shape)
        if not _fits(value.shape, sizes):
            raise ValueError(
                f"The initial value of variable {name!r} must fit shape={sizes}. "
                f"Received: shape {value.shape}"
            )
        if placement.num_replicas > 1:
            _require_copies(name, synchronization, aggregation, value.dtype)
            if synchronization is VariableSynchronization.AUTO:
                synchronization = VariableSynchronization.ON_WRITE
        self.name = name
        self.trainable = (
            synchronization is not VariableSynchronization.ON_READ
            if trainable is None
            else bool(trainable)
        )
        self.dtype = value.dtype
        self.constraint = constraint
        self._sizes: Sizes | EllipsisType = sizes
        with outside_the_program():
            self._cell = Cell(
                placement,
                value,
                synchronization=synchronization,
                aggregation=aggregation,
                name=name,
            )
            is_fixed = isinstance(sizes, tuple) and None not in sizes
            if self.trainable and is_fixed and self._cell.layout is Layout.MIRRORED:
                self._cell.shard_at(WEIGHTS, self._cell.aval.shape)
        lift = current_lift()
        if lift is not None:
            lift.created.append(self._cell)

    @property
    def cell(self) -> Cell:
        """The cell with the copies."""
        return self._cell

    @property
    def synchronization(self) -> VariableSynchronization:
        return self._cell.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        return self._cell.aggregation

    @property
    def device(self) -> str:
        """The name of the first copy's device, as TensorFlow writes it."""
        placement = self._cell.placement
        if placement.home is None:
            return canonical_name(placement.devices[0])
        (home,) = placement.home.device_set
        return canonical_name(home)

    @property
    def shape(self) -> Any:
        """The current shape of the value."""
        return self._shape_now

    @property
    def _shape_now(self) -> tuple[int, ...]:
        if self._sizes is ... or None in self._sizes:
            return self._cell.aval.shape
        return self._sizes  # type: ignore[return-value]

    @property
    def declared_shape(self) -> Sizes | EllipsisType:
        """The sizes of the axes, None for those that assignments may change; `...` if all may."""
        return self._sizes

    @property
    def ndim(self) -> int:
        return len(self._shape_now)

    @property
    def size(self) -> int:
        return int(np.prod(self._shape_now))

    def value(self) -> jax.Array:
        """Returns the value: this replica's inside a replica program, else the combined one."""
        lift = current_lift()
        if lift is not None:
            return note_read(self, lift.read(self._cell))
        value = self._cell.read()
        return note_read(self, self._cell.stored() if value is None else value)

    read_value = value

    def local_copies(self) -> tuple[Any, ...]:
        """Returns the copies of this process's replicas, as arrays."""
        return tuple(map(on_device, self._cell.copies()))

    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array that the caller owns."""
        return np.array(self._host_value())

    # -- assigning -------------------------------------------------------------------------

    def assign(self, value: Any) -> Variable:
        """Assigns `value` and returns the variable.

        Inside a replica program, `value` is this replica's, and the replicas' values are combined
        by the aggregation. Outside, it is assigned to all copies; the copies of an `ON_READ` `SUM`
        variable get equal parts, so that their sum is `value`. If it is a `PerReplica`, each copy
        gets its component.

        Raises:
            ValueError: The shape does not fit the variable, or an array of this dtype cannot be
                converted to the variable's dtype without losing information.
            TypeError: A Python number does not fit the dtype (1.5 in an int32 variable).
        """
        if isinstance(value, PerReplica | ReplicaLocal):
            return self._update_copies(value, lambda copy, component: component)
        array = self._conform(value)
        lift = current_lift()
        if lift is not None:
            lift.assign(self._cell, array)
        else:
            self._cell.assign(array)
        return self

    def assign_add(self, delta: Any) -> Variable:
        """Adds `delta`, combined as in `assign`, and returns the variable.

        Outside the replicas every copy gets the delta.

        Raises:
            ValueError: As `assign`; or the variable is `ON_READ` `SUM` and this is outside the
                replicas, where it is not defined how to divide the delta.
            TypeError: As `assign`.
        """
        if isinstance(delta, PerReplica | ReplicaLocal):
            return self._update_copies(delta, jnp.add)
        array = self._conform(delta, is_delta=True)
        lift = current_lift()
        if lift is not None:
            lift.add(self._cell, array)
        else:
            self._cell.add(array)
        return self

    def assign_sub(self, delta: Any) -> Variable:
        """Subtracts `delta` and returns the variable; see `assign_add`."""
        if isinstance(delta, PerReplica | ReplicaLocal):
            return self._update_copies(delta, jnp.subtract)
        return self.assign_add(-self._conform(delta, is_delta=True))

    def _update_copies(
        self,
        value: PerReplica | ReplicaLocal,
        function: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> Variable:
        """Replaces every copy by the result of `function` on it and its component of `value`."""
        lift = current_lift()
        if isinstance(value, ReplicaLocal) and lift is not None:
            own = self._conform(value.local, is_delta=True)
            with lift.updating_copies(differently=True):
                lift.update(self._cell, lambda copy: function(copy, own))
            return self
        components = [self._conform(component, is_delta=True) for component in value.values]
        self._cell.update_each(components, function)
        return self

    # -- assigning parts -------------------------------------------------------------------

    def assign_slice(self, index: Any, value: Any) -> Variable:
        """Assigns `value` to the elements that `variable[index]` selects.

        In a replica program the replicas' values of these elements are combined by the aggregation.

        Args:
            index: What `variable[index]` takes: integers, slices, `...`, None and arrays.
            value: The elements' value, of their shape or broadcast to it.

        Raises:
            IndexError: An index is outside of the variable.
            NotImplementedError: The variable is `ON_READ` on several replicas, outside of these.
            TypeError, ValueError: As `assign`.

        Examples:
            >>> import unison
            >>> v = unison.Variable([1.0, 2.0, 3.0])
            >>> v.assign_slice(slice(1, 3), [5.0, 6.0]).numpy().tolist()
            [1.0, 5.0, 6.0]

        TF: `tf.Variable.__getitem__(index).assign(value)`.
        """
        index = jax.tree.map(self._operand, index, is_leaf=has_cell)
        _check_index(index, self._shape_now)
        value = _as_array(value, self.dtype, self.name)
        if current_lift() is None and self._cell.is_on_read and not self._cell.is_alone:
            raise NotImplementedError(
                f"Outside of the replicas, a part of the ON_READ variable {self.name!r} cannot be "
                "assigned. Assign the whole value, or the part in strategy.run."
            )
        return self._update_parts(
            lambda copy, value: copy.at[index].set(value),
            (value,),
            lambda value: combine_writes([self._cell], [value]),
        )

    def scatter_add(self, slices: IndexedSlices) -> Variable:
        """Adds slices along the first axis; those with a repeated index are applied in sequence.

        Inside a replica program, the aggregation determines which slices are applied: with `SUM`
        those of all replicas, with `MEAN` those of all replicas divided by their number, with
        `ONLY_FIRST_REPLICA` those of the first replica.

        Raises:
            TypeError: `slices` is not an `IndexedSlices`.
            InvalidArgumentError: An index is known to be outside the variable.
            NotImplementedError: The variable is `ON_READ` on several replicas.
        """
        return self._scatter("add", slices)

    def scatter_sub(self, slices: IndexedSlices) -> Variable:
        """Subtracts slices; see `scatter_add`."""
        return self._scatter("sub", slices)

    def scatter_mul(self, slices: IndexedSlices) -> Variable:
        """Multiplies by slices; see `scatter_add`."""
        return self._scatter("mul", slices)

    def scatter_div(self, slices: IndexedSlices) -> Variable:
        """Divides by slices; see `scatter_add`."""
        return self._scatter("div", slices)

    def scatter_max(self, slices: IndexedSlices) -> Variable:
        """Keeps the larger elements of the variable and of slices; see `scatter_update`."""
        return self._scatter("max", slices)

    def scatter_min(self, slices: IndexedSlices) -> Variable:
        """Keeps the smaller elements of the variable and of slices; see `scatter_update`."""
        return self._scatter("min", slices)

    def scatter_update(self, slices: IndexedSlices) -> Variable:
        """Replaces slices along the first axis; of those with a repeated index, the last counts.

        Raises:
            NotImplementedError: With several replicas the variable is `ON_READ`, or has the
                aggregation `SUM` or `MEAN`, which is not defined for replacements.
            TypeError: As `scatter_add`.
            InvalidArgumentError: As `scatter_add`.
        """
        return self._scatter("update", slices)

    def batch_scatter_update(self, slices: IndexedSlices) -> Variable:
        """Replaces the elements `[b..., indices[b..., i]]` by `values[b..., i]`.

        Raises:
            NotImplementedError: There are several replicas.
        """
        self._require_one_replica("batch_scatter_update")
        return self._update("update", slices.values, slices.indices, batch_index)

    def scatter_nd_add(self, indices: Any, updates: Any) -> Variable:
        """Adds `updates` to the elements or slices at `indices`.

        Args:
            indices: Integers; the last axis holds indices into the variable's first axes.
            updates: The values to add, of shape `indices.shape[:-1] + shape[indices.shape[-1]:]`.

        Raises:
            NotImplementedError: There are several replicas.
        """
        return self._scatter_nd("add", indices, updates)

    def scatter_nd_sub(self, indices: Any, updates: Any) -> Variable:
        """Subtracts `updates`; see `scatter_nd_add`."""
        return self._scatter_nd("sub", indices, updates)

    def scatter_nd_update(self, indices: Any, updates: Any) -> Variable:
        """Replaces elements by `updates`; see `scatter_nd_add`."""
        return self._scatter_nd("update", indices, updates)

    def scatter_nd_max(self, indices: Any, updates: Any) -> Variable:
        """Keeps the larger of elements and `updates`; see `scatter_nd_add`."""
        return self._scatter_nd("max", indices, updates)

    def scatter_nd_min(self, indices: Any, updates: Any) -> Variable:
        """Keeps the smaller of elements and `updates`; see `scatter_nd_add`."""
        return self._scatter_nd("min", indices, updates)

    def _scatter(self, how: str, slices: IndexedSlices) -> Variable:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(
                f"scatter_{how} takes IndexedSlices(values, indices). Received: {slices!r}"
            )
        if self._cell.is_on_read and not self._cell.is_alone:
            raise NotImplementedError(
                f"scatter_{how} is not defined for the ON_READ variable {self.name!r} on several "
                "replicas. Create it with synchronization=ON_WRITE, or assign the whole value."
            )
        replaces = how in ("max", "min", "update")
        if replaces and self.aggregation in _ADDING and not self._cell.is_alone:
            raise NotImplementedError(
                f"scatter_{how} replaces elements, which the replicas' {self.aggregation.name} "
                f"cannot combine. Create variable {self.name!r} with "
                "aggregation=ONLY_FIRST_REPLICA or NONE."
            )
        return self._update(how, slices.values, slices.indices, row_index)

    def _scatter_nd(self, how: str, indices: Any, updates: Any) -> Variable:
        self._require_one_replica(f"scatter_nd_{how}")
        return self._update(how, updates, indices, nd_index)

    def _require_one_replica(self, method: str) -> None:
        if not self._cell.is_alone:
            raise NotImplementedError(
                f"{method} is not defined for variables of several replicas, as {self.name!r} is. "
                "Use scatter_add or scatter_update, or assign the whole value "
                "(variable.assign(variable.value().at[index].set(updates)))."
            )

    def _update(
        self, how: str, values: Any, indices: Any, index: Callable[[jax.Array, Any], Index]
    ) -> Variable:
        values = _as_array(values, self.dtype, self.name)
        return self._update_parts(
            lambda copy, values, indices: updated(copy, how, values, index(copy, indices)),
            (values, indices),
            self._combined_slices,
        )

    def _update_parts(
        self,
        function: Callable[..., jax.Array],
        operands: Sequence[Any],
        combine: Callable[..., Sequence[Any]],
    ) -> Variable:
        """Replaces every copy by `function(copy, *operands)`.

        Args:
            function: Updates some elements of a copy.
            operands: What it takes, of this replica inside a replica program.
            combine: Maps these to the operands of all replicas that contribute, if the aggregation
                combines what the replicas write.
        """

        def update(copy: jax.Array) -> jax.Array:
            return function(copy, *operands)

        lift = current_lift()
        if lift is None:
            self._cell.update(update)
        elif self._cell.is_alone or not lift.combines_now(self._cell):
            lift.update(self._cell, update)
        else:
            operands = combine(*operands)
            with lift.equal_writes():
                lift.update(self._cell, update)
        return self

    def _combined_slices(self, values: jax.Array, indices: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the slices to apply, of all replicas that contribute."""
        indices = jnp.asarray(indices)
        values = jnp.broadcast_to(values, (*indices.shape, *self._shape_now[1:]))
        slices = (values.reshape(indices.size, *self._shape_now[1:]), indices.reshape(-1))
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return broadcast(slices)
        values, indices = all_gather(slices, axis=0)
        if self.aggregation is VariableAggregation.MEAN:
            values = values / self._cell.placement.num_replicas
        return values, indices

    def _conform(self, value: Any, is_delta: bool = False) -> jax.Array:
        """Returns `value` as an array of the variable's dtype and of a shape that fits."""
        array = _as_array(value, self.dtype, self.name)
        if array.shape == self._shape_now:
            return array
        if is_delta or not _fits(array.shape, self._sizes):
            raise ValueError(
                f"The value assigned to variable {self.name!r} must have its shape "
                f"{self._shape_now if is_delta else self._sizes}. Received: shape {array.shape}"
            )
        if current_lift() is not None:
            needs_python(f"Giving variable {self.name!r} another shape")
            raise ValueError(
                f"Inside a program, variable {self.name!r} keeps the shape {self._shape_now} that "
                f"it has when the program is traced. Received: shape {array.shape}. Assign it "
                "outside strategy.run, or pad the value."
            )
        return array

    # -- as a value ------------------------------------------------------------------------

    def _host_value(self) -> np.ndarray | jax.Array:
        """The value on the host. Unlike after `value()`, the next step may reuse the buffer."""
        if current_lift() is not None:
            return self.value()
        note_captured(self.name)
        return self._cell.numpy()

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._host_value(), dtype=dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin._cell = self._cell.clone()
        return twin

    def __repr__(self) -> str:
        return (
            f"<unison.Variable {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"value={self._shown_value()}>"
        )

    def _shown_value(self) -> Any:
        try:
            return self._host_value()
        except (RuntimeError, ValueError):  # no common value, or taken by a program
            return "<none outside the replicas>"

    def __format__(self, spec: str) -> str:
        return format(self._host_value()[()], spec) if spec else str(self)

    def __bool__(self) -> bool:
        return bool(self._host_value())

    def __int__(self) -> int:
        return int(self._host_value())

    def __float__(self) -> float:
        return float(self._host_value())

    def __complex__(self) -> complex:
        return complex(self._host_value())

    def __index__(self) -> int:
        return self._host_value().__index__()

    def __len__(self) -> int:
        return len(self.value())

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value()[jax.tree.map(self._operand, index, is_leaf=has_cell)]

    def __iter__(self) -> Any:
        return iter(self.value())

    # `==` compares values, as for `jax.Array` and `tf.Variable`; the hash is that of the object's
    # identity.
    __hash__ = object.__hash__

    def _operand(self, other: Any) -> Any:
        """Returns the other operand of an operator in the form that JAX accepts."""
        if isinstance(other, Variable):
            return other.value()
        return self._list_operand(other) if isinstance(other, list) else other

    def _list_operand(self, other: list[Any]) -> Any:
        """Returns a list as an array of this dtype, if that has such numbers."""
        if any(isinstance(leaf, str | jax.core.Tracer) for leaf in jax.tree.leaves(other)):
            return other
        array = np.asarray(other)
        is_held = np.can_cast(array.dtype, self.dtype, "same_kind")
        return array.astype(self.dtype) if is_held else other


def _delegate(name: str) -> Callable[..., Any]:
    def operator(self: Variable, *operands: Any) -> Any:
        return getattr(self.value(), name)(*map(self._operand, operands))

    operator.__name__ = name
    return operator


def _refuse(name: str) -> Callable[..., Any]:
    def operator(self: Variable, other: Any) -> Any:
        raise RuntimeError(
            f"`variable {_IN_PLACE[name]}= value` would bind the name to an array and leave the "
            "variable as it is. Use variable.assign(...) to change the variable, or another name: "
            f"`result = variable {_IN_PLACE[name]} value`."
        )

    operator.__name__ = f"__i{name}__"
    return operator


_IN_PLACE = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
_IN_PLACE |= {"pow": "**", "matmul": "@", "and": "&", "or": "|", "xor": "^"}
_BINARY = [*_IN_PLACE, "lshift", "rshift", "divmod"]
_OTHER = "neg pos abs invert round eq ne lt le gt ge".split()
for _name in [*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHER]:
    setattr(Variable, f"__{_name}__", _delegate(f"__{_name}__"))
for _name in _IN_PLACE:
    setattr(Variable, f"__i{_name}__", _refuse(_name))
let_jax_take(Variable, Variable.value)


def _check_index(index: Any, shape: tuple[int, ...]) -> None:
    """Raises an IndexError if an index that is known is outside an array of `shape`.

    JAX would drop what is assigned there.
    """
    leaves, structure = jax.tree.flatten(index, is_leaf=lambda leaf: leaf is None)
    bounds = [
        bound
        for leaf in leaves
        for bound in ((leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,))
    ]
    if not any(isinstance(bound, jax.core.Tracer) for bound in bounds):
        known = [np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        _ = np.broadcast_to(np.empty(()), shape)[jax.tree.unflatten(structure, known)]


#: Aggregations that sum the replicas' values, which is not defined for replacements.
_ADDING = (VariableAggregation.SUM, VariableAggregation.MEAN)


def _require_copies(
    name: str,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
    dtype: np.dtype,
) -> None:
    """Raises a ValueError if several replicas cannot have copies with these annotations."""
    if synchronization is VariableSynchronization.NONE:
        raise ValueError(
            "VariableSynchronization.NONE keeps one copy that a single device owns, which a "
            "strategy of several replicas cannot. Use ON_READ for a copy on each replica, or "
            f"ON_WRITE for equal copies. Variable: {name!r}"
        )
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"aggregation=MEAN needs a floating dtype: the mean of integers is none. "
            f"Received: dtype={dtype} for variable {name!r}. Use SUM, or dtype=float32."
        )


def _fits(shape: tuple[int, ...], sizes: Sizes | EllipsisType) -> bool:
    if sizes is ...:
        return True
    return len(shape) == len(sizes) and all(
        want in (None, size) for size, want in zip(shape, sizes, strict=True)
    )


def _initial_array(value: Any, name: str, dtype: np.dtype | None) -> jax.Array:
    """Returns the initial value, computed immediately even if a program is being traced."""
    lift = current_lift()
    if lift is not None and not lift.takes_new_cells:
        raise ValueError(
            "A compiled function may create variables in its first call only, and must keep them "
            f"for the next ones: this one creates {name!r} every time. Create it before, inside "
            "`with strategy.scope():`, or only if it is not there yet "
            "(`if self.v is None: self.v = Variable(...)`)."
        )
    with outside_the_program():
        if callable(value):
            value = value()
        if has_cell(value):
            value = value.__jax_array__()
        if lift is not None and isinstance(value, jax.core.Tracer):
            value = constant_value(value, lift.value_before)
            if value is None:
                raise ValueError(
                    f"The initial value of variable {name!r} depends on values that exist only "
                    "when the program runs. Start from a value that does not, such as zeros, and "
                    "assign; or pass a function of no arguments that computes it from constants."
                )
        if value is None:
            raise ValueError(f"Variable {name!r} needs an initial_value. Received: None")
        return _as_array(value, dtype, name, narrows=True)


def _as_array(value: Any, dtype: np.dtype | None, name: str, narrows: bool = False) -> jax.Array:
    """Returns `value` as an array of `dtype`, or of its own dtype if that is None.

    Python and NumPy numbers are converted to any dtype that can hold such numbers. The dtype of a
    JAX array is explicit: it may be widened (int32 to float32), and narrowed (float32 to bfloat16)
    if `narrows`, but may not lose fractions (float32 to int32).
    """
    if isinstance(value, Mirrored):
        value = value.values[0]
    if isinstance(value, IndexedSlices) or has_cell(value):
        value = value.__jax_array__()
    elif isinstance(value, list | tuple) and any(
        isinstance(leaf, jax.Array) or has_cell(leaf) for leaf in jax.tree.leaves(value)
    ):
        value = jnp.asarray(value)
    if not isinstance(value, jax.Array):
        return _from_host(value, dtype, name)
    if dtype is None or value.dtype == dtype:
        return value
    is_same_kind = narrows and _kind(value.dtype) == _kind(dtype)
    if jnp.result_type(value, dtype) != dtype and not is_same_kind:
        raise ValueError(
            f"An array of dtype {value.dtype} does not fit variable {name!r} of dtype {dtype}. "
            f"Convert it first: value.astype({str(dtype)!r})."
        )
    return value.astype(dtype)


def _from_host(value: Any, dtype: np.dtype | None, name: str) -> jax.Array:
    array = np.asarray(value)
    if not is_numeric(array.dtype):
        raise TypeError(
            f"The value of variable {name!r} must be an array or numbers. Received: {value!r}"
        )
    is_python = not isinstance(value, np.ndarray | np.generic)
    if dtype is None:
        dtype = jnp.asarray(value).dtype if is_python else device_dtype(array.dtype)
    widest = _kind(dtype) if is_python else max(_kind(dtype), _FLOATING)
    if _kind(array.dtype) > widest:
        raise TypeError(
            f"{value!r} does not fit variable {name!r} of dtype {dtype}. Convert it first, or "
            "create the variable with another dtype."
        )
    return jnp.asarray(np.asarray(value, dtype=dtype), dtype=dtype)


_KINDS: tuple[Any, ...] = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
_FLOATING = _KINDS.index(jnp.floating)


def _kind(dtype: Any) -> int:
    """Returns the index in `_KINDS` of `dtype`: Boolean, integer, floating or complex."""
    return next(place for place, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind))
