"""`tf.Variable`: a `unison.Variable` with TensorFlow's signatures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison import variables
from unison.cells import Cell, VariableAggregation, VariableSynchronization
from unison.eager_fallback import needs_python
from unison.identity_key import Reference
from unison.lifting import current_lift
from unison.runtime.device_strings import canonical_name
from unison.slices import nd_index, row_index
from unison.strategies.context import strategy_in_scope
from unison.tf.dtypes import as_dtype
from unison.tf.tensor_spec import TensorShape
from unison.tf.variable_slices import assignable
from unison.unsupported import UnsupportedMember

_GRAPH = "there are no graphs: a variable has its value when it is made"
_PROTO = "there are no protocol buffers of variables: save them with tf.train.Checkpoint"


class Variable(variables.Variable):
    """A variable, made and named as in TensorFlow; see `unison.Variable`.

    A slice can be assigned to: `v[1:3].assign(x)`. There are no variables of text.

    Args:
        initial_value: A value, or a function of no arguments that returns one.
        trainable: Whether `trainable_variables` lists it. Default: True, False for `ON_READ`.
        validate_shape: If False, assignments may change the shape (outside compiled functions).
        caching_device: Without effect.
        name: Its name; `variable.name` has ":0" at the end. Default: "Variable".
        variable_def: Refused: there are no protocol buffers of variables.
        dtype: The dtype; default: that of `initial_value`.
        import_scope: Without effect.
        constraint: A function of the value, for an optimizer to apply after its updates.
        synchronization: A `tf.VariableSynchronization`.
        aggregation: A `tf.VariableAggregation`.
        shape: A `tf.TensorShape` or list, with None for sizes that assignments may change.
        experimental_enable_variable_lifting: Without effect.

    Examples:
        >>> v = Variable([1.0, 2.0], name="v")
        >>> v.assign_add([1.0, 1.0])
        <tf.Variable 'v:0' shape=(2,) dtype=float32, numpy=array([2., 3.], dtype=float32)>

    TF: `tf.Variable`.
    """

    SaveSliceInfo = UnsupportedMember(_PROTO)
    count_up_to = UnsupportedMember("use assign_add and an `if`, or tf.data.Dataset.range(limit)")
    eval = UnsupportedMember("there are no sessions: use variable.numpy()")
    from_proto = UnsupportedMember(_PROTO)
    graph = UnsupportedMember(_GRAPH)
    initial_value = UnsupportedMember(_GRAPH)
    load = UnsupportedMember("there are no sessions: use variable.assign(value)")
    op = UnsupportedMember(_GRAPH)
    set_shape = UnsupportedMember("pass shape= to tf.Variable")
    to_proto = UnsupportedMember(_PROTO)

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: Any = None,
        name: str | None = None,
        variable_def: Any = None,
        dtype: Any = None,
        import_scope: str | None = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Any = None,
        experimental_enable_variable_lifting: bool = True,
    ):
        del caching_device, import_scope, experimental_enable_variable_lifting
        if variable_def is not None:
            raise ValueError(
                "tf.Variable cannot be made from a variable_def: there are no protocol buffers of "
                "variables. Pass initial_value=."
            )
        super().__init__(
            initial_value,
            trainable,
            name or "Variable",
            None if dtype is None else as_dtype(dtype),
            shape=_sizes(shape, validate_shape),
            constraint=constraint,
            synchronization=synchronization,
            aggregation=aggregation,
        )
        self.name = f"{self.name}:0"
        self._strategy = strategy_in_scope()
        self._known_copies: tuple[Cell | None, tuple[VariableCopy, ...]] = (None, ())

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Assigns `value`; returns the variable, or None without `read_value`.

        TF: `tf.Variable.assign`.
        """
        del use_locking, name
        super().assign(value)
        return self._assigned(read_value)

    def assign_add(
        self,
        delta: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Adds `delta`; returns as `assign`. TF: `tf.Variable.assign_add`."""
        del use_locking, name
        super().assign_add(delta)
        return self._assigned(read_value)

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtracts `delta`; returns as `assign`. TF: `tf.Variable.assign_sub`."""
        del use_locking, name
        super().assign_sub(delta)
        return self._assigned(read_value)

    def _assigned(self, read_value: bool) -> Variable | None:
        """Returns the result of an assignment: the variable, for its new value.

        Raises:
            ValueError: The copies, which are assigned, have no common value.
        """
        if read_value and current_lift() is None:
            self._cell.require_common_value()
        return self if read_value else None

    @property
    def values(self) -> tuple[VariableCopy, ...]:
        """The copies on this process's replicas, in their order: each is a variable."""
        if self._cell.is_alone:
            raise AttributeError("A variable on one replica has no values; use value().")
        count = len(self._cell.placement.local_replicas)
        cell, copies = self._known_copies
        if cell is not self._cell or len(copies) != count:
            # The same objects each time: a tape watches them, and programs compare them.
            copies = tuple(VariableCopy(self, index) for index in range(count))
            self._known_copies = (self._cell, copies)
        return copies

    def local_copies(self) -> tuple[Variable, ...]:
        """Returns `values`, or the variable itself if it is on one replica."""
        return (self,) if self._cell.is_alone else self.values

    @property
    def shape(self) -> Any:
        """The shape: a tuple, or a `TensorShape` if assignments may change it."""
        is_open = self._sizes is ... or None in self._sizes
        return self.get_shape() if is_open else self._sizes

    def get_shape(self) -> TensorShape:
        """Returns the shape, with None for sizes that assignments may change."""
        return TensorShape(None if self._sizes is ... else self._sizes)

    def __getitem__(self, index: Any) -> jax.Array:
        return assignable(super().__getitem__(index), self, index)

    def ref(self) -> Reference:
        """Returns a key for dictionaries and sets. TF: `tf.Variable.ref`."""
        return Reference(self)

    experimental_ref = ref

    def is_initialized(self, name: str | None = None) -> bool:
        """Whether there is a value: always. TF: `tf.Variable.is_initialized`."""
        del name
        return True

    @property
    def initializer(self) -> None:
        """None: a variable has its value when it is made. TF: `tf.Variable.initializer`."""
        return None

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope the variable was made.

        Raises:
            AttributeError: It was made outside of scopes.
        """
        if self._strategy is None:
            raise AttributeError(
                f"Variable {self.name!r} was made outside of a strategy's scope, and has no "
                "distribute_strategy."
            )
        return self._strategy

    def initialized_value(self) -> jax.Array:
        """Returns the value. TF: `tf.compat.v1.Variable.initialized_value`."""
        return self.value()

    def numpy(self) -> Any:
        """Returns the value as a NumPy array of the caller's own, or a NumPy scalar."""
        return super().numpy()[()]

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """Returns the slices at `indices` of the first axis. TF: `tf.Variable.sparse_read`."""
        del name
        value = self.value()
        return value[row_index(value, indices)]

    def gather_nd(self, indices: Any, name: str | None = None) -> jax.Array:
        """Returns the elements or slices at `indices`. TF: `tf.Variable.gather_nd`."""
        del name
        value = self.value()
        return value[nd_index(value, indices)]

    def _operand(self, other: Any) -> Any:
        # As TensorFlow converts them: NumPy's numbers of one kind take the variable's dtype.
        if isinstance(other, np.ndarray | np.generic):
            for kind in (jnp.floating, jnp.integer):
                if jnp.issubdtype(other.dtype, kind) and jnp.issubdtype(self.dtype, kind):
                    return np.asarray(other, dtype=self.dtype)
        return super()._operand(other)

    def __repr__(self) -> str:
        copies = self._shown_copies()
        if len(copies) == 1:
            return self._shown(self.name, copies[0])
        kind = "SyncOnReadVariable" if self._cell.is_on_read else "MirroredVariable"
        stem = self.name.removesuffix(":0")
        names = [self.name, *(f"{stem}/replica_{index}:0" for index in range(1, len(copies)))]
        lines = [
            f"  {index}: {self._shown(name, value)}"
            for index, (name, value) in enumerate(zip(names, copies, strict=True))
        ]
        return "\n".join([f"{kind}:{{", *lines, "}"])

    def _shown_copies(self) -> list[Any]:
        try:
            if current_lift() is None:
                return self._cell.copies()
        except RuntimeError:  # a program that failed took the value
            pass
        return [self._shown_value()]

    def _shown(self, name: str, value: Any) -> str:
        shown = str(value) if np.ndim(value) == 0 else repr(value)
        sizes = self.get_shape()
        return f"<tf.Variable {name!r} shape={sizes} dtype={self.dtype}, numpy={shown}>"


class VariableCopy(Variable):
    """One replica's copy of a variable, read and assigned alone.

    Reading it needs no communication. Copies that are assigned different values differ from then
    on, as those of a variable without aggregation do.

    Args:
        variable: The variable.
        index: The index of the copy among those of this process.

    TF: the components of a `DistributedVariable`.
    """

    def __init__(self, variable: Variable, index: int):
        stem = variable.name.removesuffix(":0")
        self.name = f"{stem}/replica_{index}:0" if index else variable.name
        self.trainable = variable.trainable
        self.dtype = variable.dtype
        self.constraint = variable.constraint
        self._sizes = variable._sizes
        self._strategy = variable._strategy
        self._copy = CopyOfCell(variable.cell, index)

    @property
    def _cell(self) -> Any:  # type: ignore[override]
        if current_lift() is not None:
            needs_python(f"The use of {self.name!r}, the copy of one replica,")
            raise RuntimeError(
                f"Variable {self.name!r} is the copy of one replica, and a program runs on all of "
                "them. Use the variable itself in the program: each replica reads its own copy."
            )
        return self._copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        twin = Variable(self.numpy(), self.trainable, name=self.name.removesuffix(":0"))
        memo[id(self)] = twin
        return twin

    @property
    def device(self) -> str:
        """The name of the device that has the copy."""
        return canonical_name(self._copy.device)


class CopyOfCell:
    """One copy of the value of a cell, with the methods by which variables use their cells.

    Args:
        cell: The cell.
        index: The index of the copy among those of this process.
    """

    is_alone = True
    is_on_read = False

    def __init__(self, cell: Cell, index: int):
        self._of_all = cell
        self._index = index

    @property
    def device(self) -> jax.Device:
        return self._of_all.placement.local_devices[self._index]

    @property
    def aval(self) -> Any:
        return self._of_all.aval

    @property
    def synchronization(self) -> VariableSynchronization:
        return self._of_all.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        return self._of_all.aggregation

    def numpy(self) -> np.ndarray:
        return self._of_all.copies()[self._index]

    def copies(self) -> list[np.ndarray]:
        return [self.numpy()]

    def read(self) -> jax.Array:
        value = self.numpy()
        return jnp.asarray(value, dtype=value.dtype)

    def assign(self, value: Any) -> None:
        self.update(lambda _: value)

    def update(self, function: Callable[[jax.Array], jax.Array]) -> None:
        """Replaces the copy by `function` of it; the others stay as they are."""
        count = len(self._of_all.placement.local_replicas)
        is_own = [index == self._index for index in range(count)]
        self._of_all.update_each(is_own, lambda copy, own: function(copy) if own else copy)

    def add(self, delta: jax.Array) -> None:
        self.update(lambda value: value + delta)

    def require_common_value(self) -> None:
        """Does nothing: one copy has one value."""


def _sizes(shape: Any, validate_shape: bool) -> Any:
    """Returns TensorFlow's `shape` as `unison.Variable` takes it."""
    if shape is None:
        return None if validate_shape else ...
    shape = TensorShape(shape)
    return ... if shape.rank is None else tuple(shape.as_list())


def _with_tensorflows_options(method: Callable[..., variables.Variable]) -> Any:
    """Returns `method` with `use_locking` and `name`, which TensorFlow's has as well.

    They are without effect: an update always takes effect as a whole, and it has no name.
    """

    @functools.wraps(method)
    def scatter(
        self: Variable, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> variables.Variable:
        del use_locking, name
        return method(self, sparse_delta)

    return scatter


def _with_tensorflows_name(method: Callable[..., variables.Variable]) -> Any:
    """Returns `method` with `name`, without effect."""

    @functools.wraps(method)
    def scatter_nd(
        self: Variable, indices: Any, updates: Any, name: str | None = None
    ) -> variables.Variable:
        del name
        return method(self, indices, updates)

    return scatter_nd


for _name in "add sub mul div max min update".split():
    _method = getattr(variables.Variable, f"scatter_{_name}")
    setattr(Variable, f"scatter_{_name}", _with_tensorflows_options(_method))
for _name in "add sub update max min".split():
    _method = getattr(variables.Variable, f"scatter_nd_{_name}")
    setattr(Variable, f"scatter_nd_{_name}", _with_tensorflows_name(_method))
Variable.batch_scatter_update = _with_tensorflows_options(  # type: ignore[method-assign]
    variables.Variable.batch_scatter_update
)
