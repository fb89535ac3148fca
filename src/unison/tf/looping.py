"""`tf.map_fn`, `tf.vectorized_map`, `tf.foldl`, `tf.foldr` and `tf.scan`.

Outside compiled programs they call the function for one slice after the other; inside, the loop
is part of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from unison import branches
from unison.conversion import called
from unison.lifting import current_lift
from unison.tf import nest
from unison.tf.dispatch import dispatch_on_ragged
from unison.tf.shaping import stack
from unison.tf.tensors import cast, convert_to_tensor


def map_fn(
    fn: Callable[[Any], Any],
    elems: Any,
    dtype: Any = None,
    parallel_iterations: int | None = None,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    name: str | None = None,
    fn_output_signature: Any = None,
) -> Any:
    """Applies `fn` to the slices along the first axis, and stacks its results.

    Args:
        fn: A function of one slice, or of a nest of them.
        elems: A tensor, or a nest of tensors with first axes of one size.
        dtype: The same as `fn_output_signature`, its old name.
        parallel_iterations: Without effect.
        back_prop: Without effect.
        swap_memory: Without effect.
        infer_shape: Without effect.
        name: Without effect.
        fn_output_signature: The dtype of the result, or a nest of dtypes or specifications.
            Default: that of the result of `fn`.

    Examples:
        >>> map_fn(lambda x: x * x, convert_to_tensor([1, 2, 3])).tolist()
        [1, 4, 9]

    TF: `tf.map_fn`.
    """
    elements = nest.map_structure(convert_to_tensor, elems)
    wanted = dtype if fn_output_signature is None else fn_output_signature

    def one(slices: Any) -> Any:
        return _of_dtypes(called(fn, slices), wanted)

    if _is_traced(elements):
        return branches.scan(lambda _, slices: ((), one(slices)), (), elements)[1]
    return _stacked([one(slices) for slices in _slices(elements)])


def _of_dtypes(result: Any, wanted: Any) -> Any:
    if wanted is None:
        return nest.map_structure(convert_to_tensor, result)
    return nest.map_structure(
        lambda spec, leaf: cast(leaf, getattr(spec, "dtype", spec)),
        wanted,
        result,
        check_types=False,
    )


def vectorized_map(
    fn: Callable[[Any], Any], elems: Any, fallback_to_while_loop: bool = True, warn: bool = True
) -> Any:
    """Applies `fn` to all slices along the first axis at once: `jax.vmap`.

    TF: `tf.vectorized_map`.
    """
    elements = nest.map_structure(convert_to_tensor, elems)
    return jax.vmap(lambda slices: nest.map_structure(convert_to_tensor, called(fn, slices)))(
        elements
    )


def foldl(
    fn: Callable[[Any, Any], Any],
    elems: Any,
    initializer: Any = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    name: str | None = None,
) -> Any:
    """Returns `fn(...fn(fn(initializer, first), second)..., last)`.

    Args:
        fn: Maps the value so far and a slice of `elems` to the next value.
        elems: A tensor, or a nest of tensors with first axes of one size.
        initializer: The value to begin with. Default: the first slice.
        parallel_iterations: Without effect.
        back_prop: Without effect.
        swap_memory: Without effect.
        name: Without effect.

    TF: `tf.foldl`.
    """
    return _folded(fn, elems, initializer, reverse=False)[0]


def foldr(
    fn: Callable[[Any, Any], Any],
    elems: Any,
    initializer: Any = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    name: str | None = None,
) -> Any:
    """Returns the result of `foldl` from the last slice to the first. TF: `tf.foldr`."""
    return _folded(fn, elems, initializer, reverse=True)[0]


def scan(
    fn: Callable[[Any, Any], Any],
    elems: Any,
    initializer: Any = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    reverse: bool = False,
    name: str | None = None,
) -> Any:
    """Returns all intermediate values of `foldl`, stacked; without an initializer the first is
    the first slice.

    TF: `tf.scan`.
    """
    return _folded(fn, elems, initializer, reverse)[1]


def _folded(
    fn: Callable[[Any, Any], Any], elems: Any, initializer: Any, reverse: bool
) -> tuple[Any, Any]:
    """Returns the last value, and all values stacked in the order of the slices."""
    elements = nest.map_structure(convert_to_tensor, elems)
    if initializer is not None:
        value = nest.map_structure(convert_to_tensor, initializer)
        values = []
    else:
        first = -1 if reverse else 0
        rest = slice(None, -1) if reverse else slice(1, None)
        value = nest.map_structure(lambda tensor: tensor[first], elements)
        values = [value]
        elements = nest.map_structure(lambda tensor: tensor[rest], elements)

    def step(value: Any, slices: Any) -> Any:
        return nest.map_structure(convert_to_tensor, called(fn, value, slices))

    if _is_traced(elements) or _is_traced(value):

        def twice(value: Any, slices: Any) -> tuple[Any, Any]:
            new = step(value, slices)
            return new, new

        last, later = branches.scan(twice, value, elements, reverse)
        if not values:
            return last, later
        joined = [nest.map_structure(lambda tensor: tensor[None], value), later]
        return last, _joined(joined[::-1] if reverse else joined)
    slices = list(_slices(elements))
    for part in reversed(slices) if reverse else slices:
        value = step(value, part)
        values.append(value)
    return value, _stacked(values[::-1] if reverse else values)


def _is_traced(elements: Any) -> bool:
    leaves = nest.flatten(elements)
    return current_lift() is not None or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _slices(elements: Any) -> Iterator[Any]:
    for parts in zip(*nest.flatten(elements), strict=True):
        yield nest.pack_sequence_as(elements, parts)


def _stacked(results: list[Any]) -> Any:
    return nest.map_structure(lambda *parts: stack(parts), *results)


def _joined(parts: list[Any]) -> Any:
    return nest.map_structure(lambda *leaves: jax.numpy.concatenate(leaves), *parts)


dispatch_on_ragged(globals(), ["map_fn"])
