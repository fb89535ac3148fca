"""TensorFlow 1's optimizers: each is a rule, with its slots and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from unison.train.optimizers import rules
from unison.train.optimizers.base import Hyperparameter, Optimizer
from unison.variables import Variable


class GradientDescent(Optimizer):
    """Gradient descent; the formula is that of `rules.gradient_descent`.

    Args:
        learning_rate: A number, a variable, or a function of no arguments (a schedule).
        name: The prefix of the names of the optimizer's variables.

    Examples:
        >>> import jax, unison, unison.train
        >>> weight = unison.Variable(3.0)
        >>> optimizer = unison.train.GradientDescent(learning_rate=0.1)
        >>> optimizer.apply([jax.grad(lambda w: w**2)(weight.value())], [weight])
        >>> round(float(weight), 3)
        2.4

    TF: `tf.compat.v1.train.GradientDescentOptimizer`.
    """

    def __init__(self, learning_rate: Hyperparameter, name: str = "GradientDescent"):
        super().__init__(rules.gradient_descent, {}, {"learning_rate": learning_rate}, name)


class Momentum(Optimizer):
    """Gradient descent with momentum; the formulas are in `rules.momentum` and `rules.nesterov`.

    Args:
        learning_rate: As for `GradientDescent`.
        momentum: The fraction of the accumulated gradient that is added to a step; likewise.
        use_nesterov: Whether to take Nesterov's step.
        name: The prefix of the names of the optimizer's variables.

    TF: `tf.compat.v1.train.MomentumOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Hyperparameter,
        momentum: Hyperparameter,
        use_nesterov: bool = False,
        name: str = "Momentum",
    ):
        super().__init__(
            rules.nesterov if use_nesterov else rules.momentum,
            {"momentum": 0.0},
            {"learning_rate": learning_rate, "momentum": momentum},
            name,
        )


class Adam(Optimizer):
    """Adam; the formula is in `rules.adam`.

    Args:
        learning_rate: As for `GradientDescent`.
        beta1: The decay of the mean of gradients; likewise.
        beta2: The decay of the mean of squared gradients; likewise.
        epsilon: Added to the root of the mean of squares; likewise.
        name: The prefix of the names of the optimizer's variables.

    TF: `tf.compat.v1.train.AdamOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.001,
        beta1: Hyperparameter = 0.9,
        beta2: Hyperparameter = 0.999,
        epsilon: Hyperparameter = 1e-8,
        name: str = "Adam",
    ):
        hyperparameters = {
            "learning_rate": learning_rate,
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": epsilon,
        }
        super().__init__(rules.adam, {"m": 0.0, "v": 0.0}, hyperparameters, name)
        #: The powers of beta1 and beta2 by the number of the next step; None before the first.
        self.beta1_power: Variable | None = None
        self.beta2_power: Variable | None = None

    def _make_shared_variables(self, variables: Sequence[Any]) -> None:
        if self.beta1_power is None:
            powers = [
                self._make_beside(variables[0], _now(self._hyperparameters[beta]), name)
                for beta, name in (("beta1", "beta1_power"), ("beta2", "beta2_power"))
            ]
            self.beta1_power, self.beta2_power = powers

    def _shared_variables(self) -> list[Variable]:
        powers = (self.beta1_power, self.beta2_power)
        return [power for power in powers if power is not None]

    def _current_hyperparameters(self) -> Mapping[str, Hyperparameter]:
        assert self.beta1_power is not None and self.beta2_power is not None
        powers = {"beta1_power": self.beta1_power, "beta2_power": self.beta2_power}
        return self._hyperparameters | {name: power.value() for name, power in powers.items()}

    def _finish(self) -> None:
        for power, name in ((self.beta1_power, "beta1"), (self.beta2_power, "beta2")):
            assert power is not None
            power.assign(power.value() * _now(self._hyperparameters[name]))


class RMSProp(Optimizer):
    """RMSProp; the formulas are in `rules.rms_prop` and `rules.centered_rms_prop`.

    The mean of squares starts at 1.

    Args:
        learning_rate: As for `GradientDescent`.
        decay: The decay of the means; likewise.
        momentum: The fraction of the last step that is added to the next; likewise.
        epsilon: Added to the mean of squares, under the root; likewise.
        centered: Whether to divide by the root of the variance rather than of the mean square.
        name: The prefix of the names of the optimizer's variables.

    TF: `tf.compat.v1.train.RMSPropOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Hyperparameter,
        decay: Hyperparameter = 0.9,
        momentum: Hyperparameter = 0.0,
        epsilon: Hyperparameter = 1e-10,
        centered: bool = False,
        name: str = "RMSProp",
    ):
        hyperparameters = {
            "learning_rate": learning_rate,
            "decay": decay,
            "momentum": momentum,
            "epsilon": epsilon,
        }
        mean = {"mg": 0.0} if centered else {}
        super().__init__(
            rules.centered_rms_prop if centered else rules.rms_prop,
            {"rms": 1.0, **mean, "momentum": 0.0},
            hyperparameters,
            name,
        )


class Adagrad(Optimizer):
    """Adagrad; the formula is in `rules.adagrad`.

    Args:
        learning_rate: As for `GradientDescent`.
        initial_accumulator_value: The initial sum of squares; more than 0.
        name: The prefix of the names of the optimizer's variables.

    Raises:
        ValueError: `initial_accumulator_value` is not positive.

    TF: `tf.compat.v1.train.AdagradOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Hyperparameter,
        initial_accumulator_value: float = 0.1,
        name: str = "Adagrad",
    ):
        if initial_accumulator_value <= 0:
            raise ValueError(
                "initial_accumulator_value must be more than 0, because gradients are divided by "
                f"its root. Received: {initial_accumulator_value}"
            )
        super().__init__(
            rules.adagrad,
            {"accumulator": initial_accumulator_value},
            {"learning_rate": learning_rate},
            name,
        )


class Adadelta(Optimizer):
    """Adadelta; the formula is in `rules.adadelta`.

    Args:
        learning_rate: As for `GradientDescent`; 1 in the paper.
        rho: The decay of the means of squares; likewise.
        epsilon: Added to the means, under the roots; likewise.
        name: The prefix of the names of the optimizer's variables.

    TF: `tf.compat.v1.train.AdadeltaOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.001,
        rho: Hyperparameter = 0.95,
        epsilon: Hyperparameter = 1e-8,
        name: str = "Adadelta",
    ):
        super().__init__(
            rules.adadelta,
            {"accum": 0.0, "accum_update": 0.0},
            {"learning_rate": learning_rate, "rho": rho, "epsilon": epsilon},
            name,
        )


class Ftrl(Optimizer):
    """Follow the regularized leader; the formula is in `rules.ftrl`.

    Args:
        learning_rate: As for `GradientDescent`.
        learning_rate_power: The power of the sum of squares that divides the rate; at most 0.
        initial_accumulator_value: The initial sum of squares; at least 0.
        l1_regularization_strength: At least 0.
        l2_regularization_strength: At least 0.
        name: The prefix of the names of the optimizer's variables.
        accum_name: The prefix of the slot of the sum of squares. Default: `name`.
        linear_name: The prefix of the other slot. Default: `name`.
        l2_shrinkage_regularization_strength: The strength of a penalty on the current value; at
            least 0.
        beta: The paper's beta, which adds `beta / (2 learning_rate)` to the L2 strength.

    Raises:
        ValueError: A number is outside its range.

    TF: `tf.compat.v1.train.FtrlOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Hyperparameter,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float | None = None,
    ):
        if learning_rate_power > 0:
            raise ValueError(
                f"learning_rate_power must be at most 0. Received: {learning_rate_power}"
            )
        at_least_0 = {
            "initial_accumulator_value": initial_accumulator_value,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
            "l2_shrinkage_regularization_strength": l2_shrinkage_regularization_strength,
        }
        for argument, number in at_least_0.items():
            if number < 0:
                raise ValueError(f"{argument} must be at least 0. Received: {number}")
        super().__init__(
            rules.ftrl,
            {"accum": initial_accumulator_value, "linear": 0.0},
            {
                "learning_rate": learning_rate,
                "learning_rate_power": learning_rate_power,
                "l1": l1_regularization_strength,
                "l2": lambda: (
                    l2_regularization_strength
                    + (beta or 0.0) / (2 * jnp.maximum(_now(learning_rate), 1e-36))
                ),
                "shrinkage": l2_shrinkage_regularization_strength,
            },
            name,
            {"accum": accum_name or name, "linear": linear_name or name},
        )


def _now(value: Hyperparameter) -> Any:
    """Returns the current value of a hyperparameter."""
    return jnp.asarray(value() if callable(value) else value)
