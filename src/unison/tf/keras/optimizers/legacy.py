"""`tf.keras.optimizers.legacy`: the optimizers of Keras 2, with their arguments and formulas.

They take `lr`, `decay` and positional arguments in Keras 2's order, and differ from Keras 3's in
where `epsilon` stands (`Adagrad`, `RMSprop`) and in the momentum schedule (`Nadam`).
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from unison.tf.missing import names_missing_from

Optimizer = keras.optimizers.Optimizer

_registered = keras.saving.register_keras_serializable("unison.legacy")


class _Decaying(keras.optimizers.Optimizer):
    """Divides the learning rate by `1 + decay * iterations`.

    Args:
        learning_rate: A number, schedule or function.
        lr: Another name of it.
        decay: How fast it decays.
        kwargs: The arguments of Keras 3's optimizer.
    """

    def __init__(
        self, learning_rate: Any, *, lr: Any = None, decay: float = 0.0, **kwargs: Any
    ) -> None:
        rate = learning_rate if lr is None else lr
        super().__init__(rate if callable(rate) else float(rate), **kwargs)
        self.decay = decay

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if self.decay:
            steps = ops.cast(self.iterations, "float32")
            learning_rate = learning_rate / (1.0 + self.decay * steps)
        super().update_step(gradient, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "decay": self.decay}


@_registered
class SGD(_Decaying, keras.optimizers.SGD):
    """TF: `tf.keras.optimizers.legacy.SGD`."""

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        name: str = "SGD",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, momentum=momentum, nesterov=nesterov, name=name, **kwargs)


@_registered
class Adam(_Decaying, keras.optimizers.Adam):
    """TF: `tf.keras.optimizers.legacy.Adam`."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str = "Adam",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            name=name,
            **kwargs,
        )


@_registered
class Adamax(_Decaying, keras.optimizers.Adamax):
    """TF: `tf.keras.optimizers.legacy.Adamax`."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str = "Adamax",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, name=name, **kwargs
        )


@_registered
class Adadelta(_Decaying, keras.optimizers.Adadelta):
    """TF: `tf.keras.optimizers.legacy.Adadelta`."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        name: str = "Adadelta",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, rho=rho, epsilon=epsilon, name=name, **kwargs)


@_registered
class Ftrl(_Decaying, keras.optimizers.Ftrl):
    """TF: `tf.keras.optimizers.legacy.Ftrl`."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        name: str = "Ftrl",
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            learning_rate_power=learning_rate_power,
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
            beta=beta,
            name=name,
            **kwargs,
        )


class _AdagradOfKeras2(keras.optimizers.Adagrad):
    """Divides by `sqrt(accumulator) + epsilon`."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        gradient = ops.cast(gradient, variable.dtype)
        accumulator = self._accumulators[self._get_variable_index(variable)]
        self.assign_add(accumulator, ops.square(gradient))
        denominator = ops.sqrt(accumulator.value) + self.epsilon
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * gradient / denominator)


@_registered
class Adagrad(_Decaying, _AdagradOfKeras2):
    """TF: `tf.keras.optimizers.legacy.Adagrad`."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        name: str = "Adagrad",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            initial_accumulator_value=initial_accumulator_value,
            epsilon=epsilon,
            name=name,
            **kwargs,
        )


class _RMSpropOfKeras2(keras.optimizers.RMSprop):
    """Without momentum, divides by `sqrt(mean square) + epsilon`."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if self.momentum > 0:
            super().update_step(gradient, variable, learning_rate)
            return
        gradient = ops.cast(gradient, variable.dtype)
        index = self._get_variable_index(variable)
        mean_square = self._velocities[index]
        self.assign(mean_square, self.rho * mean_square + (1 - self.rho) * ops.square(gradient))
        variance = mean_square.value
        if self.centered:
            mean = self._average_gradients[index]
            self.assign(mean, self.rho * mean + (1 - self.rho) * gradient)
            variance = variance - ops.square(mean)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * gradient / (ops.sqrt(variance) + self.epsilon))


@_registered
class RMSprop(_Decaying, _RMSpropOfKeras2):
    """TF: `tf.keras.optimizers.legacy.RMSprop`."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        name: str = "RMSprop",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            rho=rho,
            momentum=momentum,
            epsilon=epsilon,
            centered=centered,
            name=name,
            **kwargs,
        )


@_registered
class Nadam(keras.optimizers.Nadam):
    """Nesterov Adam whose momentum warms up slowly: `beta_1 * (1 - 0.5 * 0.96**(decay * t))`.

    TF: `tf.keras.optimizers.legacy.Nadam`, whose `decay` is that of the momentum, 0.004.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str = "Nadam",
        *,
        lr: Any = None,
        schedule_decay: float = 0.004,
        **kwargs: Any,
    ) -> None:
        rate = float(learning_rate if lr is None else lr)
        super().__init__(rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, name=name, **kwargs)
        self.schedule_decay = schedule_decay

    def _momentum_at(self, step: Any) -> Any:
        return self.beta_1 * (1.0 - 0.5 * ops.power(0.96, self.schedule_decay * step))

    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        step = ops.cast(self.iterations + 1, self._u_product.dtype)
        self.assign(self._u_product, self._u_product * self._momentum_at(step))
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            self.update_step(gradient, variable, learning_rate)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        gradient = ops.cast(gradient, variable.dtype)
        index = self._get_variable_index(variable)
        step = ops.cast(self.iterations + 1, variable.dtype)
        now, following = self._momentum_at(step), self._momentum_at(step + 1)
        product = ops.cast(self._u_product, variable.dtype)
        mean, mean_square = self._momentums[index], self._velocities[index]
        self.assign(mean, self.beta_1 * mean + (1 - self.beta_1) * gradient)
        self.assign(mean_square, self.beta_2 * mean_square + (1 - self.beta_2) * gradient**2)
        ahead = (1 - now) * gradient / (1 - product) + following * mean / (1 - product * following)
        variance = mean_square / (1 - ops.power(self.beta_2, step))
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * ahead / (ops.sqrt(variance) + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "schedule_decay": self.schedule_decay}


__getattr__ = names_missing_from(__name__)
