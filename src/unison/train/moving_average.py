"""`ExponentialMovingAverage`: exponential moving averages of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from unison.cells import VariableAggregation, has_cell
from unison.module import Module
from unison.unsupported import UnsupportedMember
from unison.variables import Variable


class ExponentialMovingAverage(Module):
    """Maintains an exponential moving average of each variable.

        average = decay * average + (1 - decay) * variable

    The averages begin with the variables' values at the first `apply`. A checkpoint can hold them:
    `Checkpoint(averages=average)`.

    Args:
        decay: Between 0 and 1; close to 1 for a long memory.
        num_updates: The number of updates so far: the decay is then at most
            `(1 + num_updates) / (10 + num_updates)`, so that the first values are soon forgotten.
        zero_debias: Without effect on the averages of variables, as in TensorFlow: they begin with
            a value.
        name: The suffix of the averages' names.

    Examples:
        >>> import unison
        >>> weight = unison.Variable(1.0, name="weight")
        >>> averages = ExponentialMovingAverage(0.5)
        >>> averages.apply([weight])
        >>> _ = weight.assign(3.0)
        >>> averages.apply([weight])
        >>> float(averages.average(weight))
        2.0

    TF: `tf.train.ExponentialMovingAverage`.
    """

    variables_to_restore = UnsupportedMember(
        "restore a tf.train.Checkpoint(averages=...), and assign average(v) to each variable v"
    )

    def __init__(
        self,
        decay: Any,
        num_updates: Any = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ):
        super().__init__(name=name)
        self.decay = decay
        self.num_updates = num_updates
        #: The averages, in the order of their variables.
        self.averages: list[Variable] = []
        self._index: dict[int, int] = {}
        self._variables: tuple[Any, ...] = ()

    def apply(self, var_list: Sequence[Any]) -> None:
        """Updates the averages by the variables' values; creates missing ones.

        Args:
            var_list: Variables of floating dtypes.
        """
        decay = self.decay
        if self.num_updates is not None:
            updates = float(self.num_updates)
            decay = min(decay, (1.0 + updates) / (10.0 + updates))
        for variable in var_list:
            average = self.average(variable)
            if average is None:
                self._add(variable)
            else:
                average.assign_sub((1.0 - decay) * (average.value() - _value(variable)))

    def average(self, var: Any) -> Variable | None:
        """Returns the average of a variable; None before the first `apply` with it."""
        index = self._index.get(id(var))
        return None if index is None else self.averages[index]

    def average_name(self, var: Any) -> str:
        """Returns the name of a variable's average."""
        return f"{var.cell.name if has_cell(var) else var.path}/{self.name}"

    def _add(self, variable: Any) -> None:
        average = Variable(
            _value(variable),
            trainable=False,
            name=self.average_name(variable),
            aggregation=VariableAggregation.MEAN,
        )
        self._index[id(variable)] = len(self.averages)
        self._variables = (*self._variables, variable)  # keeps its identity unique
        self.averages.append(average)


def _value(variable: Any) -> jax.Array:
    return variable.__jax_array__()  # Keras' variables do not have the method `value`
