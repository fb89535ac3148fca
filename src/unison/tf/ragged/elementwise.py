"""Operations on the values of ragged tensors, place by place, and Python's operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from unison.errors import InvalidArgumentError
from unison.program.assertions import require
from unison.tf import math
from unison.tf.dispatch import implementations
from unison.tf.ragged.partitions import Splits, lengths_of, rowids_of, same
from unison.tf.ragged.rows import at, implements, match_splits_dtypes
from unison.tf.ragged.tensor import RaggedTensor, is_ragged
from unison.tf.tensors import convert_to_tensor
from unison.tf.text import StringTensor

#: The operations of one tensor, by module, that are those of the values. The names that are missing
#: in a module are of another release.
_UNARY = {
    "tf.math": "abs acos acosh angle asin asinh atan atanh bessel_i0 bessel_i0e bessel_i1 "
    "bessel_i1e ceil conj cos cosh digamma erf erfc erfcinv erfinv exp expm1 floor imag is_finite "
    "is_inf is_nan lgamma log log1p log_sigmoid logical_not ndtri negative real reciprocal "
    "reciprocal_no_nan rint round rsqrt sigmoid sign sin sinh softplus softsign sqrt square tan "
    "tanh",
    "tf.nn": "relu relu6 elu selu gelu silu swish leaky_relu",
    "tf.tensors": "cast saturate_cast bitcast identity stop_gradient zeros_like ones_like",
    "tf.strings": "lower upper strip length to_number as_string regex_replace regex_full_match "
    "substr to_hash_bucket_fast unicode_transcode unicode_script to_hash_bucket",
    "tf.bitwise": "invert",
}

#: Those of two tensors.
_BINARY = {
    "tf.math": "add atan2 divide divide_no_nan equal floordiv floormod mod greater greater_equal "
    "less less_equal logical_and logical_or logical_xor maximum minimum multiply multiply_no_nan "
    "nextafter not_equal pow realdiv squared_difference subtract truediv truncatediv truncatemod "
    "xdivy xlog1py xlogy",
    "tf.bitwise": "bitwise_and bitwise_or bitwise_xor left_shift right_shift",
}


def _of_values(operation: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    return with_flat(x, operation(x.flat, *args, **kwargs))


def _unary(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if args and is_ragged(args[0]):
        return _of_values(operation, *args, **kwargs)
    first = next(iter(inspect.signature(operation).parameters))
    return _of_values(operation, kwargs.pop(first), *args, **kwargs)


def _binary(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(operation).bind(*args, **kwargs).arguments
    first, second = list(inspect.signature(operation).parameters)[:2]
    return binary(operation, bound[first], bound[second])


for _table, _implementation in ((_UNARY, _unary), (_BINARY, _binary)):
    for _module, _names in _table.items():
        for _name in _names.split():
            implementations[f"{_module}.{_name}"] = _implementation


def with_flat(ragged: RaggedTensor, flat: Any) -> RaggedTensor:
    """Returns the same rows with other values inside of all ragged axes, as many as before."""
    return RaggedTensor.of(flat, ragged.partitions, ragged.uniform_lengths, ragged.is_padded)


def binary(operation: Callable[..., Any], x: Any, y: Any) -> Any:
    """Returns the result of an operation on two tensors, of which at least one is ragged."""
    return elementwise(operation, x, y)


def elementwise(operation: Callable[..., Any], *operands: Any) -> RaggedTensor:
    """Returns the result of an operation on the values of tensors that are broadcast.

    Raises:
        InvalidArgumentError: The rows of two ragged tensors differ.
    """
    ragged = [operand for operand in operands if is_ragged(operand)]
    match_splits_dtypes(ragged)
    like = max(ragged, key=lambda tensor: (tensor.ragged_rank, tensor.rank))
    check_same_rows([tensor for tensor in ragged if tensor.ragged_rank == like.ragged_rank])
    flat = [_flat_like(operand, like) for operand in operands]
    return with_flat(like, operation(*flat))


def check_same_rows(ragged: Sequence[RaggedTensor]) -> None:
    """Raises unless ragged tensors have the same rows; in a program, when it runs.

    Raises:
        InvalidArgumentError: They differ.
    """
    first = ragged[0].partitions
    for other in ragged[1:]:
        are_same = same(first, other.partitions)
        if are_same is None:
            pairs = zip(first, other.partitions, strict=True)
            holds = [jnp.all(jnp.asarray(a) == jnp.asarray(b)) for a, b in pairs]
            require(jnp.stack(holds), lambda: _DIFFERENT)
        elif not are_same:
            raise InvalidArgumentError(
                message=f"{_DIFFERENT} Received row_splits {_lists(first)} and "
                f"{_lists(other.partitions)}."
            )


_DIFFERENT = "Ragged tensors that are combined must have rows of the same lengths."


def _lists(splits: Sequence[Splits]) -> str:
    return ", ".join(str(own.tolist()) if isinstance(own, np.ndarray) else "?" for own in splits)


def _flat_like(operand: Any, like: RaggedTensor) -> Any:
    """Returns the values of an operand for the values of a ragged tensor."""
    if is_ragged(operand):
        if operand.ragged_rank == like.ragged_rank:
            return operand.flat
        raise InvalidArgumentError(
            message="Ragged tensors with different numbers of ragged axes are not broadcast: "
            f"{operand.shape} and {like.shape}. Use tf.expand_dims and tf.gather, or to_tensor."
        )
    flat = like.flat
    if isinstance(operand, int | float | complex | bool | str | bytes):
        return operand
    dtype = None if isinstance(flat, StringTensor) else flat.dtype
    dense = convert_to_tensor(operand, dtype_hint=dtype)
    inner = flat.ndim - 1
    if dense.ndim <= inner:
        return dense
    if dense.ndim > like.rank:
        raise InvalidArgumentError(
            message=f"A tensor of shape {dense.shape} is not broadcast with one of {like.shape}."
        )
    sizes = (1,) * (like.rank - dense.ndim) + tuple(dense.shape)
    dense = dense.reshape(sizes)
    return dense[_indices(like, sizes)]


def _indices(like: RaggedTensor, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Returns, for every value of a ragged tensor, its place in a dense one that is broadcast."""
    levels: Any = like
    indices: list[Any] = []
    if sizes[0] not in (1, like.shape[0]):
        raise _not_broadcast(like, sizes)
    for axis in range(like.ragged_rank):
        splits, count = levels.partitions[0], levels.inner.shape[0]
        own = rowids_of(splits, count)
        own = np.minimum(own, splits.shape[0] - 2) if isinstance(own, np.ndarray) else own
        module: Any = np if isinstance(own, np.ndarray) else jnp
        indices = [own * (sizes[0] > 1)] if axis == 0 else [at(index, own) for index in indices]
        size = sizes[axis + 1]
        if size == 1:
            indices.append(module.zeros_like(own))
        else:
            _check_lengths(like, splits, size, sizes)
            indices.append(module.arange(count, dtype=own.dtype) - at(splits[:-1], own))
        levels = levels.inner
    return tuple(indices)


def _check_lengths(like: RaggedTensor, splits: Splits, size: int, sizes: Sequence[int]) -> None:
    lengths = lengths_of(splits)
    if not isinstance(lengths, np.ndarray):
        require(lengths == size, lambda: str(_not_broadcast(like, sizes)))
    elif (lengths != size).any():
        raise _not_broadcast(like, sizes)


def _not_broadcast(like: RaggedTensor, sizes: Sequence[int]) -> InvalidArgumentError:
    return InvalidArgumentError(
        message=f"A tensor of shape {list(sizes)} is not broadcast with the rows of a ragged one "
        f"of shape {like.shape}: an axis has size 1, or that of all rows."
    )


# -- operators -----------------------------------------------------------------------------


def _operators() -> None:
    of_one = {"abs": math.abs, "neg": math.negative, "invert": math.logical_not}
    of_two = {
        "lt": math.less,
        "le": math.less_equal,
        "gt": math.greater,
        "ge": math.greater_equal,
        "eq": math.equal,
        "ne": math.not_equal,
        "add": math.add,
        "sub": math.subtract,
        "mul": math.multiply,
        "truediv": math.truediv,
        "floordiv": math.floordiv,
        "mod": math.floormod,
        "pow": math.pow,
        "and": math.logical_and,
        "or": math.logical_or,
        "xor": math.logical_xor,
    }
    for name, function in (of_one | of_two).items():
        implementations[f"operator {name}"] = function


_operators()


@implements("tf.math.add_n")
def add_n(operation: Callable[..., Any], inputs: Any, name: str | None = None) -> Any:
    """Returns the sum of ragged tensors of the same rows."""
    return elementwise(lambda *flat: operation(list(flat)), *inputs)


@implements("tf.math.clip_by_value", "tf.shaping.clip_by_value")
def clip_by_value(
    operation: Callable[..., Any],
    t: Any,
    clip_value_min: Any,
    clip_value_max: Any,
    name: str | None = None,
) -> Any:
    """Returns the values within bounds, which may be ragged, too."""
    return elementwise(operation, t, clip_value_min, clip_value_max)


@implements("tf.selecting.where")
def where(
    operation: Callable[..., Any], condition: Any, x: Any = None, y: Any = None, name: Any = None
) -> Any:
    """Returns the values of `x` or `y`; of a condition alone, the places where it holds."""
    if x is None and y is None:
        return implementations["places"](condition)
    return elementwise(operation, condition, x, y)


@implements("tf.selecting.one_hot")
def one_hot(operation: Callable[..., Any], indices: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns a vector for every index; the new axis is the last one."""
    axis = kwargs.pop("axis", args[3] if len(args) > 3 else None)
    if axis not in (None, -1, indices.rank):
        raise ValueError(f"tf.one_hot of a RaggedTensor: axis must be -1. Received: {axis}")
    return with_flat(indices, operation(indices.flat, *args[:3], *args[4:], **kwargs))


@implements("tf.nn.dropout")
def dropout(
    operation: Callable[..., Any],
    x: Any,
    rate: Any,
    noise_shape: Any = None,
    seed: Any = None,
    name: Any = None,
) -> Any:
    """Drops values of a ragged tensor."""
    if noise_shape is not None:
        raise ValueError("noise_shape is not supported for RaggedTensor x")
    return with_flat(x, operation(x.flat, rate, seed=seed))


@implements("tf.nn.stateless_dropout")
def stateless_dropout(
    operation: Callable[..., Any], x: Any, rate: Any, seed: Any, *args: Any, **kwargs: Any
) -> Any:
    """Drops values of a ragged tensor."""
    if any(given is not None for given in (*args[1:2], kwargs.pop("noise_shape", None))):
        raise ValueError("noise_shape is not supported for RaggedTensor x")
    return with_flat(x, operation(x.flat, rate, seed, **kwargs))


@implements("tf.nn.embedding_lookup")
def embedding_lookup(
    operation: Callable[..., Any],
    params: Any,
    ids: Any,
    max_norm: Any = None,
    name: Any = None,
) -> Any:
    """Returns the rows of a table for the ids of a ragged tensor."""
    return with_flat(ids, operation(params, ids.flat, max_norm))


@implements("tf.strings.join")
def join(
    operation: Callable[..., Any], inputs: Any, separator: str = "", name: str | None = None
) -> Any:
    """Joins the strings of several tensors, place by place."""
    return elementwise(lambda *flat: operation(list(flat), separator), *inputs)


def map_flat_values(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Applies a function to the values of ragged tensors, inside of all ragged axes.

    Args:
        op: Maps tensors to one with as many rows.
        args: Its arguments; ragged tensors, also in lists and dictionaries, are passed as their
            values, and must have the same rows.
        kwargs: Likewise.

    Raises:
        InvalidArgumentError: The ragged tensors have different rows.
        ValueError: The result has another number of rows.

    TF: `tf.ragged.map_flat_values`.
    """
    found: list[RaggedTensor] = []

    def flat(value: Any) -> Any:
        if is_ragged(value):
            found.append(value)
            return value.flat
        if isinstance(value, list | tuple):
            return type(value)(map(flat, value))
        return {key: flat(item) for key, item in value.items()} if type(value) is dict else value

    own_args, own_kwargs = flat(args), flat(kwargs)
    if not found:
        return op(*args, **kwargs)
    match_splits_dtypes(found)
    if len({tensor.ragged_rank for tensor in found}) > 1:
        raise ValueError("All ragged inputs must have the same ragged_rank.")
    check_same_rows(found)
    result = op(*own_args, **own_kwargs)
    count = found[0].flat.shape[0]
    if not is_ragged(result):
        result = convert_to_tensor(result)
    if result.shape[:1] != (count,) and result.shape[0] != count:
        raise ValueError(
            "tf.ragged.map_flat_values requires that the output of `op` have the same "
            f"outer-dimension size as flat_values of any ragged inputs. (output shape: "
            f"{result.shape}; expected outer dimension size: {count})"
        )
    if is_ragged(result):
        return found[0].with_flat_values(result)
    return with_flat(found[0], result)
