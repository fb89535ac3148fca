"""The attributes of Keras 2's optimizers that Keras 3's do not have; `patches` adds them."""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from unison.collectives import ReduceOp
from unison.keras.optimizers import apply_statelessly, are_of_keras
from unison.lifting import current_lift
from unison.strategies import get_replica_context
from unison.strategies.context import in_cross_replica_context
from unison.tf.control_flow import cond


class OptimizerMethods:
    """For `keras.optimizers.Optimizer`."""

    @property
    def lr(self: Any) -> Any:
        """The learning rate. TF: `tf.keras.optimizers.Optimizer.lr` (Keras 2)."""
        return self.learning_rate

    @lr.setter
    def lr(self: Any, value: Any) -> None:
        self.learning_rate = value

    @property
    def weights(self: Any) -> list[keras.Variable]:
        """The optimizer's variables."""
        return self.variables

    def get_weights(self: Any) -> list[Any]:
        """Returns the values of the optimizer's variables."""
        return [variable.numpy() for variable in self.variables]

    def apply_gradients(
        self: Any,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Applies gradients; in a replica program, their sums over the replicas.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.
            name: Without effect.
            skip_gradients_aggregation: Whether the gradients are summed already.
            experimental_aggregate_gradients: The opposite, as `optimizers.legacy` calls it.

        Returns:
            The number of iterations, a variable.

        Raises:
            RuntimeError: In cross-replica context, where replicas' gradients do not exist.

        TF: `tf.keras.optimizers.Optimizer.apply_gradients` (Keras 2).
        """
        del name
        if in_cross_replica_context():
            raise RuntimeError(
                "apply_gradients() cannot be called in cross-replica context. Call it in the "
                "function that strategy.run runs."
            )
        gradients, variables = zip(*grads_and_vars, strict=True)
        gradients = tuple(_scaled_again(self, gradients))
        are_summed = skip_gradients_aggregation or not experimental_aggregate_gradients
        with _of_summed_gradients(self) if are_summed else contextlib.nullcontext():
            self.apply(gradients, variables)
        return self.iterations

    def aggregate_gradients(self: Any, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Returns the pairs with the gradients summed over the replicas.

        TF: `tf.keras.optimizers.Optimizer.aggregate_gradients` (Keras 2).
        """
        gradients, variables = zip(*grads_and_vars, strict=True)
        context = get_replica_context()
        if context is None:
            raise RuntimeError("aggregate_gradients() must be called in a replica's context.")
        return list(zip(context.all_reduce(ReduceOp.SUM, gradients), variables, strict=True))

    def compute_gradients(self: Any, loss: Any, var_list: Any, tape: Any = None) -> list[Any]:
        """Returns pairs of a gradient of `loss` and its variable.

        Args:
            loss: A function of no arguments, or, with `tape`, a tensor that it recorded.
            var_list: The variables, or a function that returns them.
            tape: The `tf.GradientTape` in which `loss` was computed.

        Raises:
            ValueError: `loss` is a tensor, and there is no tape.

        TF: `tf.keras.optimizers.Optimizer.compute_gradients` (Keras 2).
        """
        if tape is None and not callable(loss):
            raise ValueError(
                f"A loss that is no function needs the tape that recorded it. Received: {loss!r}"
            )
        if callable(loss):
            from unison.tf.tape import GradientTape

            tape = tape or GradientTape()
            with tape:
                loss = loss()
        variables = var_list() if callable(var_list) else var_list
        variables = keras.tree.flatten(variables)
        return list(zip(tape.gradient(loss, variables), variables, strict=True))

    def minimize(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Updates the variables of `var_list` once, by the gradients of `loss`.

        The arguments are those of `compute_gradients`.

        TF: `tf.keras.optimizers.Optimizer.minimize` (Keras 2).
        """
        return self.apply_gradients(self.compute_gradients(loss, var_list, tape))


@contextlib.contextmanager
def _of_summed_gradients(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, `optimizer` applies gradients as Keras does.

    The method that first sums them is on the object (see `unison.keras.optimizers`), and is
    restored.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    summing = [
        (vars(owner), name, vars(owner).pop(name))
        for owner in {id(optimizer): optimizer, id(inner): inner}.values()
        for name in ("apply", "stateless_apply")
        if name in vars(owner)
    ]
    lift = current_lift()
    try:
        with lift.equal_writes() if lift is not None else contextlib.nullcontext():
            yield
    finally:
        for attributes, name, method in summing:
            attributes[name] = method


def init_taking_lr(original: Callable[..., None]) -> Callable[..., None]:
    """Returns an optimizer's `__init__` that takes `lr`, and any number as learning rate."""

    @functools.wraps(original)
    def init(self: Any, learning_rate: Any, *args: Any, lr: Any = None, **kwargs: Any) -> None:
        rate = learning_rate if lr is None else lr
        is_number = isinstance(rate, numbers.Real) and not isinstance(rate, float)
        original(self, float(rate) if is_number else rate, *args, **kwargs)

    return init


class LossScaleMethods:
    """For `keras.mixed_precision.LossScaleOptimizer`.

    In Keras 2 the program unscales the gradients, in Keras 3 `apply` does. Of gradients that
    `get_unscaled_gradients` returned, `apply_gradients` takes the scale in again.
    """

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Applies gradients; where some are not finite, only the loss scale changes.

        Keras' own assigns variables in the branches of a conditional, which JAX does not allow.
        """
        variables = list(trainable_variables or self._trainable_variables)
        if are_of_keras(variables):
            apply_statelessly(self, self.stateless_apply, grads, trainable_variables)
            return
        if not self.built:
            self.build(variables)
        counter, scale = self.step_counter.value, self.dynamic_scale.value

        def apply() -> None:
            unscaled = [None if grad is None else grad / scale for grad in grads]
            self.inner_optimizer.apply(unscaled, variables)
            grows = counter == self.dynamic_growth_steps - 1
            self.dynamic_scale.assign(keras.ops.where(grows, 2 * scale, scale))
            self.step_counter.assign(keras.ops.where(grows, 0, counter + 1))

        def skip() -> None:
            self.dynamic_scale.assign(scale / 2)
            self.step_counter.assign(0)

        cond(self.check_finite(grads), apply, skip)

    @property
    def loss_scale(self: Any) -> Any:
        """The present factor of the loss."""
        return self.dynamic_scale.value if self.built else self.initial_scale

    def get_scaled_loss(self: Any, loss: Any) -> Any:
        """Returns `loss` times the scale, or a function that returns it.

        TF: `tf.keras.mixed_precision.LossScaleOptimizer.get_scaled_loss` (Keras 2).
        """
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self: Any, grads: Sequence[Any]) -> list[Any]:
        """Returns the gradients of a scaled loss divided by the scale.

        TF: `tf.keras.mixed_precision.LossScaleOptimizer.get_unscaled_gradients` (Keras 2).
        """
        vars(self)["_unison_unscales"] = True
        scale = self.loss_scale
        return [None if grad is None else grad / scale for grad in grads]


def accumulating(original: Callable[..., None]) -> Callable[..., None]:
    """Returns Keras' `_backend_apply_gradients`, which accumulates those of `tf.Variable`s, too."""

    @functools.wraps(original)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        steps = self.gradient_accumulation_steps
        if not steps or self.use_ema or are_of_keras(trainable_variables):
            original(self, grads, trainable_variables)
            return
        accumulators = [
            self._accumulated_gradients[self._get_variable_index(variable)]
            for variable in trainable_variables
        ]
        sums = [grad + sum_.value for grad, sum_ in zip(grads, accumulators, strict=True)]

        def update() -> None:
            means = self._clip_gradients([total / steps for total in sums])
            self._apply_weight_decay(trainable_variables)
            self._backend_update_step(means, trainable_variables, self.learning_rate)
            for accumulator in accumulators:
                accumulator.assign(keras.ops.zeros_like(accumulator))

        def accumulate() -> None:
            for accumulator, total in zip(accumulators, sums, strict=True):
                accumulator.assign(total)

        cond((self._iterations + 1) % steps == 0, update, accumulate)

    return apply


def _scaled_again(optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]) -> Sequence[Any]:
    """Undoes `get_unscaled_gradients`, for an `apply` that unscales."""
    if not vars(optimizer).get("_unison_unscales"):
        return gradients
    scale = optimizer.loss_scale
    return [None if grad is None else grad * scale for grad in gradients]
