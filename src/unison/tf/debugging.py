"""`tf.debugging`: assertions about tensors.

Where the values are known, what does not hold raises at once. In a compiled program they are
looked at when it runs: its results, or the next use of them, raise then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.identity_key import Reference
from unison.program.assertions import require
from unison.tf import dtypes
from unison.tf.dispatch import dispatch_on_ragged
from unison.tf.dtypes import DType, as_dtype, named
from unison.tf.missing import names_missing_from
from unison.tf.tensor_spec import TensorShape
from unison.tf.tensors import convert_to_tensor, is_tensor, known_value, operands
from unison.tf.text import StringTensor

__getattr__ = names_missing_from(__name__)


def Assert(  # noqa: N802  (TensorFlow's name)
    condition: Any, data: Sequence[Any], summarize: int | None = None, name: str | None = None
) -> None:
    """Raises unless `condition` holds; `data` is shown.

    Raises:
        InvalidArgumentError: It does not hold.

    TF: `tf.debugging.Assert`.
    """
    require(
        convert_to_tensor(condition),
        lambda *shown: f"Expected 'False' to be true. Summarized data: {' '.join(map(str, shown))}",
        *(np.asarray(part) if isinstance(part, str) else convert_to_tensor(part) for part in data),
    )


# -- comparisons ---------------------------------------------------------------------------


def _compare(
    sign: str, holds: Callable[[Any, Any], Any], x: Any, y: Any, message: str | None
) -> None:
    x, y = operands(convert_to_tensor(x), convert_to_tensor(y))

    def describe(x: np.ndarray, y: np.ndarray) -> str:
        x, y = np.broadcast_arrays(x, y)
        wrong = np.argwhere(~np.asarray(holds(x, y), bool))
        first = wrong[:3]
        places = tuple(first.T)
        return (
            f"{message or ''}\nCondition x {sign} y did not hold.\nIndices of first {len(first)} "
            f"different values:\n{first.tolist()}\nCorresponding x values:\n"
            f"{_listed(x[places])}\nCorresponding y values:\n{_listed(y[places])}"
        )

    require(holds(x, y), describe, x, y)


def _listed(values: Any) -> list[Any]:
    return list(np.asarray(values).reshape(-1).tolist())


def assert_equal(
    x: Any,
    y: Any,
    message: str | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> None:
    """TF: `tf.debugging.assert_equal`."""
    _compare("==", lambda a, b: a == b, x, y, message)


def assert_none_equal(
    x: Any,
    y: Any,
    summarize: int | None = None,
    message: str | None = None,
    name: str | None = None,
) -> None:
    """TF: `tf.debugging.assert_none_equal`."""
    _compare("!=", lambda a, b: a != b, x, y, message)


def assert_less(
    x: Any,
    y: Any,
    message: str | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> None:
    """TF: `tf.debugging.assert_less`."""
    _compare("<", lambda a, b: a < b, x, y, message)


def assert_less_equal(
    x: Any,
    y: Any,
    message: str | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> None:
    """TF: `tf.debugging.assert_less_equal`."""
    _compare("<=", lambda a, b: a <= b, x, y, message)


def assert_greater(
    x: Any,
    y: Any,
    message: str | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> None:
    """TF: `tf.debugging.assert_greater`."""
    _compare(">", lambda a, b: a > b, x, y, message)


def assert_greater_equal(
    x: Any,
    y: Any,
    message: str | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> None:
    """TF: `tf.debugging.assert_greater_equal`."""
    _compare(">=", lambda a, b: a >= b, x, y, message)


def assert_positive(
    x: Any, message: str | None = None, summarize: int | None = None, name: str | None = None
) -> None:
    """TF: `tf.debugging.assert_positive`."""
    _compare(">", lambda a, b: a > b, x, 0, message)


def assert_negative(
    x: Any, message: str | None = None, summarize: int | None = None, name: str | None = None
) -> None:
    """TF: `tf.debugging.assert_negative`."""
    _compare("<", lambda a, b: a < b, x, 0, message)


def assert_non_negative(
    x: Any, message: str | None = None, summarize: int | None = None, name: str | None = None
) -> None:
    """TF: `tf.debugging.assert_non_negative`."""
    _compare(">=", lambda a, b: a >= b, x, 0, message)


def assert_non_positive(
    x: Any, message: str | None = None, summarize: int | None = None, name: str | None = None
) -> None:
    """TF: `tf.debugging.assert_non_positive`."""
    _compare("<=", lambda a, b: a <= b, x, 0, message)


def assert_near(
    x: Any,
    y: Any,
    rtol: Any = None,
    atol: Any = None,
    message: str | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> None:
    """Raises unless `|x - y| <= atol + rtol * |y|`; by default both are ten times the dtype's
    precision.

    TF: `tf.debugging.assert_near`.
    """
    x, y = operands(convert_to_tensor(x), convert_to_tensor(y))
    precision = 10 * float(jnp.finfo(x.dtype).eps)
    relative = precision if rtol is None else rtol
    absolute = precision if atol is None else atol
    _compare("≈", lambda a, b: abs(a - b) <= absolute + relative * abs(b), x, y, message)


def assert_all_finite(x: Any, message: str, name: str | None = None) -> Any:
    """Returns `x`, after checking that no element is infinite or NaN.

    TF: `tf.debugging.assert_all_finite`.
    """
    return check_numerics(x, message)


def check_numerics(tensor: Any, message: str, name: str | None = None) -> Any:
    """Returns the tensor, after checking that no element is infinite or NaN.

    Raises:
        InvalidArgumentError: One is.

    TF: `tf.debugging.check_numerics`.
    """
    tensor = convert_to_tensor(tensor)

    def describe(values: np.ndarray) -> str:
        wrong = "NaN" if np.isnan(values.astype(np.float64)).any() else "Inf"
        return f"{message} : Tensor had {wrong} values"

    require(jnp.isfinite(tensor), describe, tensor)
    return tensor


# -- shapes and dtypes ---------------------------------------------------------------------


def assert_rank(x: Any, rank: Any, message: str | None = None, name: str | None = None) -> None:
    """TF: `tf.debugging.assert_rank`.

    Raises:
        ValueError: The tensor has another number of axes.
    """
    wanted = int(known_value(rank))
    _require_rank(x, lambda found: found == wanted, f"rank {wanted}", message)


def assert_rank_at_least(
    x: Any, rank: Any, message: str | None = None, name: str | None = None
) -> None:
    """TF: `tf.debugging.assert_rank_at_least`.

    Raises:
        ValueError: The tensor has fewer axes.
    """
    least = int(known_value(rank))
    _require_rank(x, lambda found: found >= least, f"rank at least {least}", message)


def assert_rank_in(
    x: Any, ranks: Sequence[Any], message: str | None = None, name: str | None = None
) -> None:
    """TF: `tf.debugging.assert_rank_in`.

    Raises:
        ValueError: The rank of the tensor is not one of these.
    """
    wanted = tuple(int(known_value(rank)) for rank in ranks)
    _require_rank(x, lambda found: found in wanted, f"rank in {wanted}", message)


def _require_rank(x: Any, fits: Callable[[int], bool], what: str, message: str | None) -> None:
    tensor = convert_to_tensor(x)
    if not fits(tensor.ndim):
        raise ValueError(
            f"{message or ''} Tensor must have {what}. Received rank {tensor.ndim}, shape "
            f"{tensor.shape}"
        )


def assert_scalar(tensor: Any, message: str | None = None, name: str | None = None) -> Any:
    """TF: `tf.debugging.assert_scalar`.

    Raises:
        ValueError: The tensor has axes.
    """
    tensor = convert_to_tensor(tensor)
    if tensor.ndim:
        raise ValueError(f"{message or ''}Expected scalar shape, saw shape: {tensor.shape}.")
    return tensor


def assert_shapes(
    shapes: Any,
    data: Any = None,
    summarize: int | None = None,
    message: str | None = None,
    name: str | None = None,
) -> None:
    """Raises unless tensors have the shapes stated, with equal sizes where symbols are equal.

    Args:
        shapes: Pairs, or a dictionary, of a tensor (or its `ref()`) and its shape: numbers,
            symbols, None or "." for any size, `...` or "*" in the first place for any axes.
        data: Without effect.
        summarize: Without effect.
        message: What the error begins with.
        name: Without effect.

    Raises:
        ValueError: A shape differs.

    TF: `tf.debugging.assert_shapes`.
    """
    sizes: dict[Any, int] = {}
    pairs = shapes.items() if isinstance(shapes, Mapping) else shapes
    for tensor, stated in pairs:
        tensor = tensor.deref() if isinstance(tensor, Reference) else tensor
        found = convert_to_tensor(tensor).shape
        wanted = list(stated) if isinstance(stated, list | tuple | str) else [stated]
        if wanted and wanted[0] in (..., "*"):
            wanted = wanted[1:]
            found = found[len(found) - len(wanted) :]
        if len(found) != len(wanted):
            raise ValueError(
                f"{message or ''} Tensor must have {len(wanted)} axes. Received the shape {found}"
            )
        for size, symbol in zip(found, wanted, strict=True):
            if symbol in (None, "."):
                continue
            expected = symbol if isinstance(symbol, int) else sizes.setdefault(symbol, size)
            if size != expected:
                raise ValueError(
                    f"{message or ''} Tensor dimension {symbol!r} must have size {expected}. "
                    f"Received size {size}, shape {found}"
                )


def assert_type(
    tensor: Any, tf_type: Any, message: str | None = None, name: str | None = None
) -> None:
    """TF: `tf.debugging.assert_type`.

    Raises:
        TypeError: The tensor has another dtype.
    """
    found = as_dtype(convert_to_tensor(tensor).dtype)
    if found != as_dtype(tf_type):
        raise TypeError(
            f"{message or ''}tensor must be of type {as_dtype(tf_type)!r}; got {found!r}"
        )


def assert_integer(x: Any, message: str | None = None, name: str | None = None) -> None:
    """TF: `tf.debugging.assert_integer`.

    Raises:
        TypeError: The tensor's dtype is not an integer dtype.
    """
    found = as_dtype(convert_to_tensor(x).dtype)
    if not found.is_integer:
        raise TypeError(
            f'{message or ""}Expected "x" to be integer type. Found: tensor of dtype {found}'
        )


def assert_same_float_dtype(tensors: Any = None, dtype: Any = None) -> DType:
    """Returns the dtype that all tensors have, float32 for none.

    Raises:
        ValueError: They differ, or it is not a floating dtype.

    TF: `tf.debugging.assert_same_float_dtype`.
    """
    found = {as_dtype(convert_to_tensor(tensor).dtype) for tensor in tensors or ()}
    if dtype is not None:
        found.add(as_dtype(dtype))
    if len(found) > 1 or not all(one.is_floating for one in found):
        raise ValueError(f"Expected floating point tensors of the same type. Received: {found}")
    return next(iter(found), dtypes.float32)


def assert_proper_iterable(values: Any) -> None:
    """TF: `tf.debugging.assert_proper_iterable`.

    Raises:
        TypeError: `values` is a tensor, array or text, or not iterable.
    """
    if is_tensor(values) or isinstance(values, np.ndarray | str | bytes | TensorShape):
        raise TypeError(
            f'Expected argument "values" to be a "proper" iterable. Found: {type(values)}'
        )
    if not hasattr(values, "__iter__"):
        raise TypeError(f'Expected argument "values" to be iterable. Found: {type(values)}')


def is_numeric_tensor(tensor: Any) -> bool:
    """Whether `tensor` is one, of numbers. TF: `tf.debugging.is_numeric_tensor`."""
    if not is_tensor(tensor) or isinstance(tensor, StringTensor):
        return False
    return named(tensor.dtype) != np.bool_


# -- settings ------------------------------------------------------------------------------


def enable_check_numerics(stack_height_limit: int = 30, path_length_limit: int = 50) -> None:
    """Makes NaN and infinity raise a `FloatingPointError` that ends where the operation is called.

    Outside compiled programs, the result of each operation is looked at. Of a compiled program
    (`tf.function`, `strategy.run`, `fit`) the results and the new values of variables are: an
    infinity that no result shows, such as a mask's, is no error. Variables keep their values.

    Args:
        stack_height_limit: Has no effect: the traceback is that of any error.
        path_length_limit: Has no effect.

    TF: `tf.debugging.enable_check_numerics`.
    """
    jax.config.update("jax_debug_nans", True)
    jax.config.update("jax_debug_infs", True)


def disable_check_numerics() -> None:
    """TF: `tf.debugging.disable_check_numerics`."""
    jax.config.update("jax_debug_nans", False)
    jax.config.update("jax_debug_infs", False)


def enable_traceback_filtering() -> None:
    """Leaves JAX's own frames out of tracebacks. TF: `tf.debugging.enable_traceback_filtering`."""
    jax.config.update("jax_traceback_filtering", "auto")


def disable_traceback_filtering() -> None:
    """TF: `tf.debugging.disable_traceback_filtering`."""
    jax.config.update("jax_traceback_filtering", "off")


def is_traceback_filtering_enabled() -> bool:
    """TF: `tf.debugging.is_traceback_filtering_enabled`."""
    return jax.config.values["jax_traceback_filtering"] != "off"


_logs_placement = False


def set_log_device_placement(enabled: bool) -> None:
    """Stored for compatibility with TF, and ignored: `array.device` and `array.sharding` show where
    things are.

    TF: `tf.debugging.set_log_device_placement`.
    """
    global _logs_placement
    _logs_placement = bool(enabled)


def get_log_device_placement() -> bool:
    """TF: `tf.debugging.get_log_device_placement`."""
    return _logs_placement


dispatch_on_ragged(
    globals(),
    [
        "assert_equal",
        "assert_none_equal",
        "assert_less",
        "assert_less_equal",
        "assert_greater",
        "assert_greater_equal",
    ],
)
