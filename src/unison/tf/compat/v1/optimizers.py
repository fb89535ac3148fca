"""The optimizers of `tf.compat.v1.train`: those of `unison.train`, with TensorFlow 1's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from unison import train
from unison.collectives import AggregationMethod
from unison.module import Tracked
from unison.tf.tape import GradientTape
from unison.train.optimizers.base import Hyperparameter, equal_writes
from unison.variables import Variable

#: A gradient and its variable; None for a variable that the loss does not depend on.
GradientAndVariable = tuple[Any, Any]


class Optimizer(Tracked):
    """Computes gradients and applies them; the base of the optimizers.

    Outside a strategy and inside `strategy.run`, where the gradients are summed over the
    replicas without scaling. An aggregation method says how; it can be given to
    `compute_gradients`, which is TensorFlow's place for it and holds for the updates that follow,
    and to `apply_gradients`.

    Args:
        optimizer: What updates the variables.

    TF: `tf.compat.v1.train.Optimizer`.
    """

    GATE_NONE = 0
    GATE_OP = 1
    GATE_GRAPH = 2

    def __init__(self, optimizer: train.Optimizer):
        self._optimizer = optimizer
        self._aggregation_method = AggregationMethod.DEFAULT

    def compute_gradients(
        self,
        loss: Callable[[], Any],
        var_list: Iterable[Any] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: AggregationMethod | int | str | None = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[GradientAndVariable]:
        """Returns the gradients of a loss, each with its variable.

        Args:
            loss: A function of no arguments that returns the loss.
            var_list: The variables. Default: the trainable ones that `loss` reads.
            gate_gradients: Without effect: XLA orders the computation.
            aggregation_method: How `apply_gradients` combines the gradients of the replicas.
            colocate_gradients_with_ops: Without effect: a replica computes on its device.
            grad_loss: The weights of the elements of the loss. Default: ones.

        Raises:
            RuntimeError: `loss` is not a function.
        """
        del gate_gradients, colocate_gradients_with_ops
        if not callable(loss):
            raise RuntimeError(
                "loss must be a function of no arguments that computes the loss, so that it can be "
                f"recorded: lambda: loss. Received: {loss!r}"
            )
        if aggregation_method is not None:
            self._aggregation_method = AggregationMethod.parse(aggregation_method)
        with GradientTape() as tape:
            if var_list is not None:
                var_list = list(var_list)
                tape.watch(var_list)
            value = loss()
        variables = list(tape.watched_variables()) if var_list is None else var_list
        gradients = tape.gradient(value, variables, grad_loss)
        return list(zip(gradients, variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[GradientAndVariable],
        global_step: Any = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        aggregation_method: AggregationMethod | int | str | None = None,
    ) -> None:
        """Updates the variables by their gradients.

        Args:
            grads_and_vars: What `compute_gradients` returned, perhaps changed.
            global_step: A variable to add 1 to.
            name: Without effect.
            skip_gradients_aggregation: Whether the gradients are sums over the replicas already.
            aggregation_method: How the gradients of the replicas are combined. Default: what
                `compute_gradients` was given last.

        Raises:
            RuntimeError: In cross-replica context.
            ValueError: There is no variable, or no variable has a gradient.
        """
        del name
        pairs = list(grads_and_vars)
        if not pairs:
            raise ValueError("No variables were given. Received: grads_and_vars=[]")
        method = self._aggregation_method if aggregation_method is None else aggregation_method
        gradients, variables = zip(*pairs, strict=True)
        self._optimizer.apply(gradients, variables, method, skip_gradients_aggregation)
        if global_step is not None:
            with equal_writes():
                global_step.assign_add(1)

    def minimize(
        self,
        loss: Callable[[], Any],
        global_step: Any = None,
        var_list: Iterable[Any] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: AggregationMethod | int | str | None = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> None:
        """Computes the gradients of `loss` and applies them; see the two methods for that.

        Raises:
            RuntimeError: `loss` is not a function, or this is cross-replica context.
            ValueError: The loss depends on no variable.
        """
        grads_and_vars = self.compute_gradients(
            loss,
            var_list,
            gate_gradients,
            aggregation_method,
            colocate_gradients_with_ops,
            grad_loss,
        )
        if all(gradient is None for gradient, _ in grads_and_vars):
            names = [variable.name for _, variable in grads_and_vars]
            raise ValueError(
                f"The loss {loss!r} depends on none of the variables {names}. Does it read them "
                "when it is called, and are they trainable?"
            )
        self.apply_gradients(grads_and_vars, global_step, name)

    def get_name(self) -> str:
        return self._optimizer.name

    def get_slot(self, var: Any, name: str) -> Variable | None:
        """Returns a slot of `var`; None if there is none, or before the first update."""
        return self._optimizer.slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots that exist, sorted."""
        return self._optimizer.slot_names

    def variables(self) -> list[Variable]:
        """Returns the variables of the optimizer's own, sorted by name."""
        return self._optimizer.variables


class GradientDescentOptimizer(Optimizer):
    """Gradient descent. TF: `tf.compat.v1.train.GradientDescentOptimizer`.

    Examples:
        >>> import unison.tf as tf
        >>> w = tf.Variable(3.0)
        >>> optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        >>> optimizer.minimize(lambda: w * w, aggregation_method=tf.AggregationMethod.ADD_N)
        >>> round(float(w), 3)
        2.4
    """

    def __init__(
        self,
        learning_rate: Hyperparameter,
        use_locking: bool = False,
        name: str = "GradientDescent",
    ):
        del use_locking  # programs that update variables run one after the other
        super().__init__(train.GradientDescent(learning_rate, name))


class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum. TF: `tf.compat.v1.train.MomentumOptimizer`."""

    def __init__(
        self,
        learning_rate: Hyperparameter,
        momentum: Hyperparameter,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ):
        del use_locking
        super().__init__(train.Momentum(learning_rate, momentum, use_nesterov, name))


class AdamOptimizer(Optimizer):
    """Adam. TF: `tf.compat.v1.train.AdamOptimizer`."""

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.001,
        beta1: Hyperparameter = 0.9,
        beta2: Hyperparameter = 0.999,
        epsilon: Hyperparameter = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        use_own_namescope_for_non_slot_vars: bool = False,
    ):
        del use_locking, use_own_namescope_for_non_slot_vars
        super().__init__(train.Adam(learning_rate, beta1, beta2, epsilon, name))


class RMSPropOptimizer(Optimizer):
    """RMSProp. TF: `tf.compat.v1.train.RMSPropOptimizer`."""

    def __init__(
        self,
        learning_rate: Hyperparameter,
        decay: Hyperparameter = 0.9,
        momentum: Hyperparameter = 0.0,
        epsilon: Hyperparameter = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ):
        del use_locking
        super().__init__(train.RMSProp(learning_rate, decay, momentum, epsilon, centered, name))


class AdagradOptimizer(Optimizer):
    """Adagrad. TF: `tf.compat.v1.train.AdagradOptimizer`."""

    def __init__(
        self,
        learning_rate: Hyperparameter,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ):
        del use_locking
        super().__init__(train.Adagrad(learning_rate, initial_accumulator_value, name))


class AdadeltaOptimizer(Optimizer):
    """Adadelta. TF: `tf.compat.v1.train.AdadeltaOptimizer`."""

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.001,
        rho: Hyperparameter = 0.95,
        epsilon: Hyperparameter = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
    ):
        del use_locking
        super().__init__(train.Adadelta(learning_rate, rho, epsilon, name))


class FtrlOptimizer(Optimizer):
    """Follow the regularized leader. TF: `tf.compat.v1.train.FtrlOptimizer`."""

    def __init__(
        self,
        learning_rate: Hyperparameter,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float | None = None,
    ):
        del use_locking
        super().__init__(
            train.Ftrl(
                learning_rate,
                learning_rate_power,
                initial_accumulator_value,
                l1_regularization_strength,
                l2_regularization_strength,
                name,
                accum_name,
                linear_name,
                l2_shrinkage_regularization_strength,
                beta,
            )
        )
