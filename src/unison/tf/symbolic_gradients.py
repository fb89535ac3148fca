"""Gradients inside a `tf.function`, by name: `tf.gradients` and `tf.hessians`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unison.runtime.private_jax import Recording
from unison.tf import nest
from unison.tf.tape import GradientTape, UnconnectedGradients, parse_unconnected
from unison.thread_local import ThreadLocal

#: The tape of the `tf.function` that the thread calls.
_tape: ThreadLocal[Any] = ThreadLocal(None)


class RecordingWanted(BaseException):
    """Ends a call of a `tf.function` that asks for symbolic gradients; see `with_gradients`."""


def with_gradients(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the body of a `tf.function`, in which `tf.gradients` works.

    Symbolic gradients need a record of all that the function computes. It is made only if they
    are requested: the function is then called again.
    """
    if _tape.value is not None:
        return function(*args, **kwargs)
    try:
        with _tape.bound_to(_NotRecording):
            return function(*args, **kwargs)
    except RecordingWanted:
        with _EverythingTape() as tape, _tape.bound_to(tape):
            return function(*args, **kwargs)


class _NotRecording:
    """The tape of a function for which gradients have not been requested."""


class _EverythingTape(GradientTape):
    """A tape for which every tensor that is computed with is a source."""

    def __init__(self) -> None:
        super().__init__(persistent=True)

    def _new_recording(self) -> Recording:
        return Recording(follows_all=True)


def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    name: str = "gradients",
    gate_gradients: bool = False,
    aggregation_method: Any = None,
    stop_gradients: Any = None,
    unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
) -> list[Any]:
    """Returns the gradients of the sum of `ys` by each of `xs`, inside a `tf.function`.

    Args:
        ys: A tensor or a list of tensors.
        xs: A tensor or variable, or a list of them.
        grad_ys: Weights of the `ys`.
        name: Without effect.
        gate_gradients: Without effect.
        aggregation_method: An `AggregationMethod`; how the terms of one gradient are added up in
            one replica is XLA's choice, so that it is only checked. Optimizers combine the
            replicas' gradients by it.
        stop_gradients: Tensors to take as constants.
        unconnected_gradients: What to return where the `ys` do not depend on an x.

    Raises:
        RuntimeError: Outside a `tf.function`, as in TensorFlow.

    TF: `tf.gradients`.
    """
    del name, gate_gradients
    if aggregation_method is not None:
        from unison.collectives import AggregationMethod

        AggregationMethod.parse(aggregation_method)
    tape = _tape.value
    if tape is None:
        raise RuntimeError(
            "tf.gradients works inside a tf.function. Outside, record with tf.GradientTape."
        )
    if tape is _NotRecording:
        raise RecordingWanted
    constants = [] if stop_gradients is None else nest.flatten(stop_gradients)
    return tape._flat_gradients(
        nest.flatten(ys),
        nest.flatten(xs),
        grad_ys,
        parse_unconnected(unconnected_gradients),
        constants,
    )


def hessians(
    ys: Any,
    xs: Any,
    gate_gradients: bool = False,
    aggregation_method: Any = None,
    name: str = "hessians",
) -> list[Any]:
    """Returns the second derivatives of the sum of `ys` by each of `xs`, inside a `tf.function`.

    Returns:
        For each x, a tensor of shape `x.shape + x.shape`.

    Raises:
        RuntimeError: Outside a `tf.function`, as in TensorFlow.

    TF: `tf.hessians`.
    """
    flat_xs = nest.flatten(xs)
    firsts = gradients(ys, flat_xs, None, name, gate_gradients, aggregation_method)
    tape = _tape.value
    return [
        None if first is None else tape.jacobian(first, x)
        for first, x in zip(firsts, flat_xs, strict=True)
    ]
