"""`Variable`: state that a strategy keeps on every replica."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.cells import Cell, VariableAggregation, VariableSynchronization
from unison.lifting import current_lift
from unison.runtime.placement import placement_in_scope

_numbers = itertools.count()


class Variable:
    """A value that programs read and update, with a copy on every replica.

    Create it inside `strategy.scope()`. Its annotations say how the copies relate:

    * `ON_WRITE` (and `AUTO`): an update made by the replicas is combined by `aggregation`, and
      all copies stay equal. With `NONE` each replica updates its own copy.
    * `ON_READ`: replicas update their own copy without communication; reading outside the
      replicas combines the copies by `aggregation`.

    Args:
        initial_value: An array, a number, or a function of no arguments that returns one.
        trainable: Whether `trainable_variables` lists it. Default: True, False for `ON_READ`.
        name: For messages. Default: `Variable_<number>`.
        dtype: The dtype; default: that of `initial_value`.
        synchronization: A `VariableSynchronization`.
        aggregation: A `VariableAggregation`.

    Raises:
        ValueError: `MEAN` with an integer dtype; `synchronization=NONE` with several replicas.

    Example:
        >>> import unison
        >>> strategy = unison.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     steps = unison.Variable(0, aggregation=unison.VariableAggregation.SUM)
        >>> _ = strategy.run(lambda: steps.assign_add(1))
        >>> int(steps)
        2

    TF: `tf.Variable`.
    """

    # NumPy must leave `array + variable` to the variable.
    __array_priority__ = 100

    def __init__(
        self,
        initial_value: Any | Callable[[], Any],
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ):
        if current_lift() is not None:
            raise ValueError(
                "A variable cannot be created while a replica program is traced: it would be "
                "created anew in every trace. Create it before, inside `with strategy.scope():`."
            )
        synchronization = VariableSynchronization(synchronization)
        aggregation = VariableAggregation(aggregation)
        placement = placement_in_scope()
        value = initial_value() if callable(initial_value) else initial_value
        dtype = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
        value = jnp.asarray(value.value() if isinstance(value, Variable) else value, dtype=dtype)
        name = name or f"Variable_{next(_numbers)}"
        if synchronization is VariableSynchronization.NONE and placement.num_replicas > 1:
            raise ValueError(
                "VariableSynchronization.NONE keeps one copy that a single device owns, which a "
                f"strategy of {placement.num_replicas} replicas cannot. Use ON_READ for a copy on "
                f"each replica, or ON_WRITE for equal copies. Variable: {name!r}"
            )
        if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(value.dtype, jnp.inexact):
            raise ValueError(
                f"aggregation=MEAN needs a floating dtype: the mean of integers is none. "
                f"Received: dtype={value.dtype} for variable {name!r}. Use SUM, or dtype=float32."
            )
        self.name = name
        self.trainable = (
            synchronization is not VariableSynchronization.ON_READ
            if trainable is None
            else bool(trainable)
        )
        self.shape = value.shape
        self.dtype = value.dtype
        self._cell = Cell(
            placement,
            value,
            synchronization=synchronization,
            aggregation=aggregation,
            name=name,
        )

    @property
    def cell(self) -> Cell:
        """Where the copies are stored."""
        return self._cell

    @property
    def synchronization(self) -> VariableSynchronization:
        return self._cell.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        return self._cell.aggregation

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def value(self) -> jax.Array:
        """Returns the value: this replica's inside a replica program, else the combined one."""
        lift = current_lift()
        if lift is not None:
            return lift.read(self._cell)
        value = self._cell.read()
        return self._cell.stored() if value is None else value

    read_value = value

    def numpy(self) -> np.ndarray:
        """Returns the value as a NumPy array of the caller's own."""
        return np.array(self._host_value())

    def assign(self, value: Any) -> Variable:
        """Assigns `value` and returns the variable.

        Inside a replica program, `value` is this replica's, and the replicas' values are
        combined by the aggregation. Outside, all copies get it; the copies of an `ON_READ` `SUM`
        variable get equal parts, so that their sum is `value`.

        Raises:
            ValueError: The shape is not the variable's.
        """
        value = self._conform(value)
        lift = current_lift()
        if lift is not None:
            lift.assign(self._cell, value)
        else:
            self._cell.assign(value)
        return self

    def assign_add(self, delta: Any) -> Variable:
        """Adds `delta` and returns the variable; combined as in `assign`.

        Raises:
            ValueError: The shape is not the variable's, or the variable is `ON_READ` `SUM` and
                this is outside the replicas (how should the delta be divided?).
        """
        delta = self._conform(delta)
        lift = current_lift()
        if lift is not None:
            lift.add(self._cell, delta)
            return self
        if self._cell.is_on_read and self.aggregation is VariableAggregation.SUM:
            raise ValueError(
                f"Outside the replicas, adding to the ON_READ SUM variable {self.name!r} has no "
                "one meaning. Assign the sum that you want (variable.assign(variable + delta)), "
                "or add inside strategy.run."
            )
        self._cell.assign(self.value() + delta)
        return self

    def assign_sub(self, delta: Any) -> Variable:
        """Subtracts `delta` and returns the variable; see `assign_add`."""
        return self.assign_add(-self._conform(delta))

    def _conform(self, value: Any) -> jax.Array:
        value = jnp.asarray(value, dtype=self.dtype)
        if value.shape != self.shape:
            raise ValueError(
                f"The value assigned to variable {self.name!r} must have its shape {self.shape}. "
                f"Received: shape {value.shape}"
            )
        return value

    def _host_value(self) -> np.ndarray | jax.Array:
        """The value on the host; the next step need not spare the buffer, as after `value()`."""
        return self._cell.numpy() if current_lift() is None else self.value()

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._host_value(), dtype=dtype)

    def __repr__(self) -> str:
        return (
            f"<unison.Variable {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"value={self._shown_value()}>"
        )

    def _shown_value(self) -> Any:
        try:
            return self._host_value()
        except (RuntimeError, ValueError):  # copies without a common value, or taken
            return "<none outside the replicas>"

    def __bool__(self) -> bool:
        return bool(self._host_value())

    def __int__(self) -> int:
        return int(self._host_value())

    def __float__(self) -> float:
        return float(self._host_value())

    def __index__(self) -> int:
        return self._host_value().__index__()

    def __len__(self) -> int:
        return len(self.value())

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value()[index]

    def __iter__(self) -> Any:
        return iter(self.value())

    # `==` compares values, as `jax.Array` and `tf.Variable` do; identity is the hash.
    __hash__ = object.__hash__


def _delegate(name: str) -> Callable[..., Any]:
    def operator(self: Variable, *operands: Any) -> Any:
        plain = (o.value() if isinstance(o, Variable) else o for o in operands)
        return getattr(self.value(), name)(*plain)

    operator.__name__ = name
    return operator


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod".split()
_OTHER = "neg pos abs invert round eq ne lt le gt ge".split()
for _name in [*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHER]:
    setattr(Variable, f"__{_name}__", _delegate(f"__{_name}__"))
