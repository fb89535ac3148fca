"""Functions with gradients of their own: `tf.custom_gradient` and its kin."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unison.conversion import called
from unison.program.control_flow import converted_if_needed
from unison.program.tracing import current_holder
from unison.runtime.private_jax import is_recording, nothing_is_traced, with_gradient
from unison.tf import nest
from unison.tf.tape import as_tensor, conjugate, has_gradient
from unison.tf.tensors import convert_to_tensor
from unison.tf.variable_reads import observing_all_reads


def custom_gradient(f: Callable[..., Any] | None = None) -> Any:
    """Gives a function a gradient of its own; a decorator.

    Args:
        f: A function of tensors that returns its result and `grad_fn`, a function from the
            gradients of the result to those of the tensors. If `f` reads variables, `grad_fn`
            must take `variables=`, a list of them, and return the gradients of the tensors and a
            list of those of the variables.

    Examples:
        >>> import unison.tf as tf
        >>> @tf.custom_gradient
        ... def clipped(x):
        ...     return x, lambda upstream: tf.clip_by_value(upstream, -1.0, 1.0)
        >>> x = tf.constant(2.0)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = 5.0 * clipped(x)
        >>> tape.gradient(y, x)
        Array(1., dtype=float32)

    TF: `tf.custom_gradient`.
    """
    if f is None:
        return custom_gradient

    @functools.wraps(f)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        if is_recording() or nothing_is_traced():
            return _called_with_gradient(f, args, kwargs)
        return _traced_with_gradient(f, args, kwargs)

    return decorated


def _called_with_gradient(f: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls `f` directly, and passes the gradient function of its result to the tapes."""
    leaves = nest.flatten(args)
    with _trainable_reads() as read:
        result, grad_fn = called(f, *args, **kwargs)
    variables = [v for v in read.values() if not any(v is leaf for leaf in leaves)]
    _check_takes_variables(grad_fn, variables)
    results = [as_tensor(leaf) for leaf in nest.flatten(result)]
    arrays, values = [as_tensor(leaf) for leaf in leaves], [as_tensor(v) for v in variables]
    inputs = [*arrays, *values]
    outputs = [index for index, leaf in enumerate(results) if has_gradient(leaf.dtype)]

    def pull(*cotangents: jax.Array) -> list[jax.Array]:
        upstream = [jnp.zeros_like(leaf) for leaf in results]
        for index, cotangent in zip(outputs, cotangents, strict=True):
            upstream[index] = cotangent
        of_arrays, of_values = _pulled(grad_fn, upstream, arrays, values, variables)
        pairs = zip([*of_arrays, *of_values], inputs, strict=True)
        return [gradient for gradient, leaf in pairs if has_gradient(leaf.dtype)]

    copies = with_gradient(
        pull,
        [leaf for leaf in inputs if has_gradient(leaf.dtype)],
        [results[index] for index in outputs],
    )
    for index, copy in zip(outputs, copies, strict=True):
        results[index] = copy
    return nest.pack_sequence_as(result, results)


def _traced_with_gradient(f: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls `f` in a function that JAX traces, and passes the gradient function to JAX."""
    leaves = [convert_to_tensor(leaf) for leaf in nest.flatten(args)]

    def result_and_gradient(*arrays: jax.Array) -> tuple[Any, Callable[..., Any]]:
        return called(f, *nest.pack_sequence_as(args, list(arrays)), **kwargs)

    with _trainable_reads() as read:
        jax.eval_shape(lambda *arrays: nest.flatten(result_and_gradient(*arrays)[0]), *leaves)
    variables = list(read.values())

    @jax.custom_vjp
    def call(arrays: list[jax.Array], values: list[jax.Array]) -> Any:
        with _having(variables, values):
            return result_and_gradient(*arrays)[0]

    def forward(arrays: list[jax.Array], values: list[jax.Array]) -> Any:
        with _having(variables, values):
            result, grad_fn = result_and_gradient(*arrays)
            _check_takes_variables(grad_fn, variables)
            pull, constants = jax.closure_convert(
                lambda *upstream: _pulled(grad_fn, upstream, arrays, values, variables),
                *nest.flatten(result),
            )
        return result, (jax.tree_util.Partial(pull), constants)

    def backward(residuals: Any, upstream: Any) -> Any:
        pull, constants = residuals
        return pull(*nest.flatten(upstream), *constants)

    call.defvjp(forward, backward)
    return call(leaves, [variable.__jax_array__() for variable in variables])


def _having(
    variables: Sequence[Any], values: Sequence[jax.Array]
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which variables that a scope of Keras holds have these values."""
    holder = current_holder()
    if holder is None:
        return contextlib.nullcontext()
    held = [pair for pair in zip(variables, values, strict=True) if holder.has(pair[0])]
    return holder.inside([variable for variable, _ in held], [value for _, value in held])


@contextlib.contextmanager
def _trainable_reads() -> Iterator[dict[int, Any]]:
    """Gives the trainable variables that are read inside, by their identity."""
    read: dict[int, Any] = {}

    def note(variable: Any, value: jax.Array) -> jax.Array:
        if variable.trainable:
            read[id(variable)] = variable
        return value

    with observing_all_reads(note):
        yield read


def _check_takes_variables(grad_fn: Callable[..., Any], variables: Sequence[Any]) -> None:
    parameters = inspect.signature(grad_fn).parameters.values()
    if variables and not any(p.name == "variables" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(
            "A function with a custom gradient reads variables, so its grad_fn must take the "
            "argument variables=None and return their gradients, too. It reads: "
            f"{[variable.name for variable in variables]}"
        )


def _pulled(
    grad_fn: Callable[..., Any],
    upstream: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    values: Sequence[jax.Array],
    variables: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of `arrays` and of the variables' `values`, as `grad_fn` has them."""
    upstream = [conjugate(one) for one in upstream]
    if variables:
        gradients, of_variables = called(grad_fn, *upstream, variables=list(variables))
    else:
        gradients, of_variables = called(grad_fn, *upstream), []
    return _like(gradients, arrays), _like(of_variables, values)


def _like(gradients: Any, arrays: Sequence[jax.Array]) -> list[Any]:
    given = nest.flatten(gradients)
    if len(given) != len(arrays):
        raise ValueError(
            f"grad_fn must return a gradient for each of {len(arrays)} tensors. Received: "
            f"{len(given)}"
        )
    return [_cotangent(*pair) for pair in zip(given, arrays, strict=True)]


def _cotangent(gradient: Any, array: Any) -> Any:
    """Returns a gradient by `array` as JAX has it."""
    if gradient is None or not has_gradient(array.dtype):
        return None
    return conjugate(jnp.asarray(gradient, dtype=array.dtype))


def grad_pass_through(f: Callable[..., Any]) -> Callable[..., Any]:
    """Gives `f`, a function of one tensor, the gradient of the identity.

    TF: `tf.grad_pass_through`.
    """

    @custom_gradient
    def identity_in_gradients(*args: Any, **kwargs: Any) -> Any:
        def passed(*upstream: Any, variables: Any = None) -> Any:
            gradients = upstream[0] if len(upstream) == 1 else list(upstream)
            return (gradients, [None for _ in variables]) if variables else gradients

        return called(f, *args, **kwargs), passed

    return identity_in_gradients


def recompute_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the gradient of `f` recompute its intermediate values instead of storing them.

    TF: `tf.recompute_grad`.
    """

    @functools.wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        def traced() -> Any:
            return jax.checkpoint(lambda *arrays: called(f, *arrays, **kwargs))(*args)

        is_outside = is_recording() or nothing_is_traced()
        return converted_if_needed(traced) if is_outside else traced()

    return recomputed
