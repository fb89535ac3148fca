"""`tf.math`: elementwise operations, products and reductions on `jax.Array`s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax import lax

from unison.errors import InvalidArgumentError
from unison.runtime.precision import device_dtype
from unison.tf import dtypes, vanishing
from unison.tf.dispatch import dispatch_on_ragged
from unison.tf.host import HostTensor, ShapeTensor, size_tensor, without_axes
from unison.tf.missing import names_missing_from
from unison.tf.selecting import (
    bincount,
    confusion_matrix,
    in_top_k,
    segment_max,
    segment_mean,
    segment_min,
    segment_prod,
    segment_sum,
    top_k,
    unsorted_segment_max,
    unsorted_segment_mean,
    unsorted_segment_min,
    unsorted_segment_prod,
    unsorted_segment_sqrt_n,
    unsorted_segment_sum,
)
from unison.tf.tensors import (
    array_module,
    convert_to_tensor,
    full_width,
    get_static_value,
    invalid_arguments,
    like,
    operands,
    tensor_dtype,
)
from unison.tf.tensors import axes as axis_numbers
from unison.tf.text import StringTensor
from unison.tf.ties import clipped, larger, magnitude, smaller
from unison.tf.vanishing import one_if_zero, unless_zero

__all__ = [
    "bincount",
    "confusion_matrix",
    "in_top_k",
    "segment_max",
    "segment_mean",
    "segment_min",
    "segment_prod",
    "segment_sum",
    "top_k",
    "unsorted_segment_max",
    "unsorted_segment_mean",
    "unsorted_segment_min",
    "unsorted_segment_prod",
    "unsorted_segment_sqrt_n",
    "unsorted_segment_sum",
]  # and all functions below

__getattr__ = names_missing_from(__name__)

# -- elementwise ---------------------------------------------------------------------------


def _unary(name: str, function: Callable[[Any], jax.Array]) -> Callable[..., jax.Array]:
    def operation(x: Any, name: str | None = None) -> jax.Array:
        return function(convert_to_tensor(x))

    return _documented(operation, name)


def _unary_of_input(name: str, function: Callable[[Any], jax.Array]) -> Callable[..., jax.Array]:
    def operation(input: Any, name: str | None = None) -> jax.Array:
        return function(convert_to_tensor(input))

    return _documented(operation, name)


def _binary(
    name: str,
    function: Callable[[Any, Any], jax.Array],
    of_sizes: np.ufunc | None = None,
) -> Callable[..., jax.Array]:
    """Returns an operation; `of_sizes` is the same function of NumPy, for shapes."""
    qualified = f"tf.math.{name}"

    def operation(x: Any, y: Any, name: str | None = None) -> jax.Array:
        x, y = operands(x, y)
        with invalid_arguments(qualified):
            known = _sizes(of_sizes, x, y)
            return function(*_arrays(x, y)) if known is None else known

    return _documented(operation, name)


#: NumPy's functions of sizes that are symbols, where they are not those of other objects.
_OF_SYMBOLS: dict[np.ufunc, np.ufunc] = {
    np.maximum: np.frompyfunc(jax.core.max_dim, 2, 1),
    np.minimum: np.frompyfunc(jax.core.min_dim, 2, 1),
}

#: A shape has few sizes. Larger tensors are computed in the program.
_MOST_SIZES = 64


def _sizes(function: np.ufunc | None, x: Any, y: Any) -> Any:
    """Returns a function of shapes or sizes, which are known while a program is traced, as such.

    None if the operands are no sizes, or NumPy's answer is not that of the program.
    """
    are_symbols = isinstance(x, ShapeTensor) or isinstance(y, ShapeTensor)
    are_sizes = are_symbols or isinstance(x, HostTensor) or isinstance(y, HostTensor)
    if function is None or not are_sizes:
        return None
    if are_symbols:
        known = [get_static_value(value) for value in (x, y)]
        function = _OF_SYMBOLS.get(function, function)
    else:
        known = [value if isinstance(value, HostTensor | int) else None for value in (x, y)]
    kinds = "iO" if are_symbols else "i"  # text has objects, too
    if any(value is None or not _is_of_sizes(np.asarray(value), kinds) for value in known):
        return None
    if function in (np.floor_divide, np.mod) and 0 in np.ravel(known[1]).tolist():
        return None
    try:
        with np.errstate(all="ignore"):
            result = function(*(np.asarray(value)[()] for value in known))
    except OverflowError:  # a number that the dtype of the sizes does not hold
        return None
    if are_symbols:
        return without_axes(size_tensor(result))
    return np.asarray(result).view(HostTensor)


def _is_of_sizes(array: np.ndarray, kinds: str) -> bool:
    return array.dtype.kind in kinds and array.size <= _MOST_SIZES


def _arrays(*operands: Any) -> Any:
    """Returns operands of which shapes with symbols are arrays of the program."""
    return [
        operand.__jax_array__() if isinstance(operand, ShapeTensor) else operand
        for operand in operands
    ]


def _documented(operation: Callable[..., jax.Array], name: str) -> Callable[..., jax.Array]:
    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"TF: `tf.math.{name}`."
    return operation


abs = _unary("abs", magnitude)
acos = _unary("acos", jnp.arccos)
acosh = _unary("acosh", jnp.arccosh)
angle = _unary_of_input("angle", jnp.angle)
asin = _unary("asin", jnp.arcsin)
asinh = _unary("asinh", jnp.arcsinh)
atan = _unary("atan", jnp.arctan)
atanh = _unary("atanh", jnp.arctanh)
bessel_i0 = _unary("bessel_i0", jsp.i0)
bessel_i0e = _unary("bessel_i0e", jsp.i0e)
bessel_i1 = _unary("bessel_i1", jsp.i1)
bessel_i1e = _unary("bessel_i1e", jsp.i1e)
ceil = _unary("ceil", jnp.ceil)
conj = _unary("conj", jnp.conj)
cos = _unary("cos", jnp.cos)
cosh = _unary("cosh", jnp.cosh)
digamma = _unary("digamma", jsp.digamma)
erf = _unary("erf", lax.erf)
erfc = _unary("erfc", lax.erfc)
erfinv = _unary("erfinv", lax.erf_inv)
exp = _unary("exp", jnp.exp)
expm1 = _unary("expm1", jnp.expm1)
floor = _unary("floor", jnp.floor)
imag = _unary_of_input("imag", jnp.imag)
is_finite = _unary("is_finite", jnp.isfinite)
is_inf = _unary("is_inf", jnp.isinf)
is_nan = _unary("is_nan", jnp.isnan)
lgamma = _unary("lgamma", lax.lgamma)
log = _unary("log", jnp.log)
log1p = _unary("log1p", jnp.log1p)
log_sigmoid = _unary("log_sigmoid", jax.nn.log_sigmoid)
logical_not = _unary("logical_not", jnp.logical_not)
ndtri = _unary("ndtri", jsp.ndtri)
negative = _unary("negative", jnp.negative)
real = _unary_of_input("real", jnp.real)
reciprocal = _unary("reciprocal", vanishing.reciprocal)
rint = _unary("rint", jnp.round)
round = _unary("round", jnp.round)
rsqrt = _unary("rsqrt", vanishing.rsqrt)
sigmoid = _unary("sigmoid", jax.nn.sigmoid)
sign = _unary("sign", jnp.sign)
sin = _unary("sin", jnp.sin)
sinh = _unary("sinh", jnp.sinh)
sqrt = _unary("sqrt", vanishing.sqrt)
square = _unary("square", jnp.square)
tan = _unary("tan", jnp.tan)
tanh = _unary("tanh", jnp.tanh)

divide_no_nan = _binary(
    "divide_no_nan", lambda x, y: unless_zero(y, jnp.divide(x, one_if_zero(y, y)))
)
floordiv = _binary("floordiv", jnp.floor_divide, np.floor_divide)
floormod = mod = _binary("floormod", jnp.mod, np.mod)
greater = _binary("greater", jnp.greater)
greater_equal = _binary("greater_equal", jnp.greater_equal)
less = _binary("less", jnp.less)
less_equal = _binary("less_equal", jnp.less_equal)
logical_and = _binary("logical_and", jnp.logical_and)
logical_or = _binary("logical_or", jnp.logical_or)
logical_xor = _binary("logical_xor", jnp.logical_xor)
maximum = _binary("maximum", larger, np.maximum)
minimum = _binary("minimum", smaller, np.minimum)
multiply = _binary("multiply", jnp.multiply, np.multiply)
multiply_no_nan = _binary("multiply_no_nan", lambda x, y: unless_zero(y, jnp.multiply(x, y)))
pow = _binary("pow", jnp.power)
squared_difference = _binary("squared_difference", lambda x, y: _squared(x - y))
subtract = _binary("subtract", jnp.subtract, np.subtract)
truncatediv = _binary("truncatediv", lambda x, y: _truncated(x, y)[0])
truncatemod = _binary("truncatemod", lambda x, y: _truncated(x, y)[1])
xdivy = _binary("xdivy", vanishing.xdivy)
xlog1py = _binary("xlog1py", vanishing.xlog1py)
xlogy = _binary("xlogy", vanishing.xlogy)


def _squared(x: jax.Array) -> jax.Array:
    return x * jnp.conj(x)


def _truncated(x: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    x, y = jnp.broadcast_arrays(x, y)
    remainder = lax.rem(x, y.astype(x.dtype))
    return (x - remainder) // y, remainder


def add(x: Any, y: Any, name: str | None = None) -> Any:
    """Returns the sum; of strings, one after the other. TF: `tf.math.add`."""
    x, y = operands(x, y)
    with invalid_arguments("tf.math.add"):
        known = _sizes(np.add, x, y)
        if known is not None:
            return known
        return x + y if isinstance(x, StringTensor) else jnp.add(*_arrays(x, y))


def equal(x: Any, y: Any, name: str | None = None) -> Any:
    """Whether the elements are equal. TF: `tf.math.equal`."""
    x, y = operands(x, y)
    with invalid_arguments("tf.math.equal"):
        return x == y if isinstance(x, StringTensor) else jnp.equal(*_arrays(x, y))


def not_equal(x: Any, y: Any, name: str | None = None) -> Any:
    """Whether the elements differ. TF: `tf.math.not_equal`."""
    x, y = operands(x, y)
    with invalid_arguments("tf.math.not_equal"):
        return x != y if isinstance(x, StringTensor) else jnp.not_equal(*_arrays(x, y))


def divide(x: Any, y: Any, name: str | None = None) -> jax.Array:
    """Returns the quotient; of integers of 32 or 64 bits as float64, of smaller ones as float32.

    (The operator `/` of arrays gives float32 for all of them, by JAX's rule.)

    TF: `tf.math.divide`.
    """
    x, y = _arrays(*operands(x, y))
    dtype = jnp.result_type(x, y)
    with invalid_arguments("tf.math.divide"):
        if not jnp.issubdtype(dtype, jnp.inexact):
            wide = np.float64 if dtype.itemsize > 2 else np.float32
            x, y = (jnp.asarray(part).astype(device_dtype(wide)) for part in (x, y))
        return jnp.divide(x, y)


truediv = divide
realdiv = divide


def atan2(y: Any, x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.atan2`."""
    return jnp.arctan2(*operands(y, x))


def betainc(a: Any, b: Any, x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.betainc`."""
    return lax.betainc(*(convert_to_tensor(part) for part in (a, b, x)))


def igamma(a: Any, x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.igamma`."""
    return jsp.gammainc(*operands(a, x))


def igammac(a: Any, x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.igammac`."""
    return jsp.gammaincc(*operands(a, x))


def polygamma(a: Any, x: Any, name: str | None = None) -> jax.Array:
    """Returns the a-th derivative of the digamma function, for whole `a`; else NaN.

    TF: `tf.math.polygamma`.
    """
    order, x = operands(a, x)
    whole = jnp.round(order)
    return jnp.where(order == whole, jsp.polygamma(whole.astype(jnp.int32), x), jnp.nan)


def zeta(x: Any, q: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.zeta`."""
    return jsp.zeta(*operands(x, q))


def lbeta(x: Any, name: str | None = None) -> jax.Array:
    """Returns `log Beta` over the last axis. TF: `tf.math.lbeta`."""
    x = convert_to_tensor(x)
    return jnp.sum(lax.lgamma(x), -1) - lax.lgamma(jnp.sum(x, -1))


def erfcinv(x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.erfcinv`."""
    return lax.erf_inv(1 - convert_to_tensor(x))


def nextafter(x1: Any, x2: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.nextafter`."""
    return jnp.nextafter(*operands(x1, x2))


def softplus(features: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.softplus`."""
    return jax.nn.softplus(convert_to_tensor(features))


def softsign(features: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.softsign`."""
    return jax.nn.soft_sign(convert_to_tensor(features))


def softmax(logits: Any, axis: int | None = None, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.softmax`."""
    return jax.nn.softmax(convert_to_tensor(logits), -1 if axis is None else axis)


def log_softmax(logits: Any, axis: int | None = None, name: str | None = None) -> jax.Array:
    """TF: `tf.nn.log_softmax`."""
    return jax.nn.log_softmax(convert_to_tensor(logits), -1 if axis is None else axis)


def scalar_mul(scalar: Any, x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.scalar_mul`."""
    return multiply(scalar, x)


def reciprocal_no_nan(x: Any, name: str | None = None) -> jax.Array:
    """Returns `1 / x`, and 0 for 0. TF: `tf.math.reciprocal_no_nan`."""
    return divide_no_nan(jnp.ones((), convert_to_tensor(x).dtype), x)


def polyval(coeffs: Sequence[Any], x: Any, name: str | None = None) -> jax.Array:
    """Returns the polynomial with these coefficients, the highest first, at `x`.

    TF: `tf.math.polyval`.
    """
    x = convert_to_tensor(x)
    value = jnp.zeros_like(x)
    for coefficient in coeffs:
        value = value * x + convert_to_tensor(coefficient)
    return value


def clip_by_value(
    t: Any, clip_value_min: Any, clip_value_max: Any, name: str | None = None
) -> jax.Array:
    """TF: `tf.clip_by_value`."""
    t = convert_to_tensor(t)
    return clipped(t, operands(t, clip_value_min)[1], operands(t, clip_value_max)[1])


def complex(real: Any, imag: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.complex`."""
    return lax.complex(*operands(convert_to_tensor(real), convert_to_tensor(imag)))


def add_n(inputs: Any, name: str | None = None) -> jax.Array:
    """Returns the sum of tensors of one shape. TF: `tf.math.add_n`."""
    total, *rest = [convert_to_tensor(tensor) for tensor in inputs]
    with invalid_arguments("tf.math.add_n"):
        if any(tensor.shape != total.shape for tensor in rest):
            raise ValueError(f"shapes must be equal, not {[t.shape for t in (total, *rest)]}")
        for tensor in rest:
            total += tensor
    return total


def accumulate_n(
    inputs: Any, shape: Any = None, tensor_dtype: Any = None, name: str | None = None
) -> jax.Array:
    """TF: `tf.math.accumulate_n`."""
    return add_n(inputs)


def invert_permutation(x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.invert_permutation`."""
    x = convert_to_tensor(x)
    return jnp.argsort(x).astype(x.dtype)


def is_non_decreasing(x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.is_non_decreasing`."""
    x = convert_to_tensor(x).ravel()
    return jnp.all(x[1:] >= x[:-1])


def is_strictly_increasing(x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.math.is_strictly_increasing`."""
    x = convert_to_tensor(x).ravel()
    return jnp.all(x[1:] > x[:-1])


# -- products ------------------------------------------------------------------------------


def matmul(
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    output_type: Any = None,
    grad_a: bool = False,
    grad_b: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the (batched) product of matrices; vectors are refused, as in TensorFlow.

    TF: `tf.linalg.matmul`.
    """
    a, b = operands(convert_to_tensor(a), convert_to_tensor(b))
    with invalid_arguments("tf.linalg.matmul"):
        if a.ndim < 2 or b.ndim < 2:
            raise ValueError(f"expected matrices, not the shapes {a.shape} and {b.shape}")
        a = jnp.conj(a.mT) if adjoint_a else a.mT if transpose_a else a
        b = jnp.conj(b.mT) if adjoint_b else b.mT if transpose_b else b
        wanted = None if output_type is None else tensor_dtype(output_type)
        return jnp.matmul(a, b, preferred_element_type=wanted)


def tensordot(a: Any, b: Any, axes: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.tensordot`."""
    chosen = axes if isinstance(axes, int) else np.asarray(axes).tolist()
    with invalid_arguments("tf.tensordot"):
        return jnp.tensordot(*operands(convert_to_tensor(a), convert_to_tensor(b)), chosen)


def einsum(equation: str, *inputs: Any, **kwargs: Any) -> jax.Array:
    """Returns the sum of products that `equation` states, as in "ij,jk->ik".

    Args:
        equation: What `numpy.einsum` takes.
        inputs: The tensors.
        kwargs: TensorFlow's `optimize` and `name`, without effect.

    TF: `tf.einsum`.
    """
    unknown = sorted(kwargs.keys() - {"optimize", "name"})
    if unknown:
        raise TypeError(f"tf.einsum takes optimize and name. Received: {unknown}")
    with invalid_arguments("tf.einsum"):
        return jnp.einsum(equation, *(convert_to_tensor(tensor) for tensor in inputs))


# -- reductions ----------------------------------------------------------------------------


def reduce_sum(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.math.reduce_sum`."""
    tensor = _number_tensor(input_tensor)
    with invalid_arguments("tf.math.reduce_sum"):
        return jnp.sum(tensor, axis_numbers(axis), keepdims=bool(keepdims), dtype=tensor.dtype)


def reduce_mean(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the mean, in the tensor's own dtype: of integers, summed in 64 bits, it is rounded
    towards zero.

    TF: `tf.math.reduce_mean`.
    """
    tensor = _number_tensor(input_tensor)
    with invalid_arguments("tf.math.reduce_mean"):
        if jnp.issubdtype(tensor.dtype, jnp.inexact):
            return jnp.mean(tensor, axis_numbers(axis), keepdims=bool(keepdims))
        is_signed = jnp.issubdtype(tensor.dtype, jnp.signedinteger)
        with full_width("int64"):
            wide = jnp.int64 if is_signed else jnp.uint64
            total = jnp.sum(tensor, axis_numbers(axis), keepdims=bool(keepdims), dtype=wide)
            count = jnp.asarray(tensor.size // max(total.size, 1), wide)
            return _truncated(total, count)[0].astype(tensor.dtype)


def reduce_prod(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.math.reduce_prod`."""
    tensor = _number_tensor(input_tensor)
    product = array_module(tensor).prod
    dtype = None if isinstance(tensor, ShapeTensor) else tensor.dtype
    with invalid_arguments("tf.math.reduce_prod"):
        return like(
            tensor,
            product(tensor, axis_numbers(axis), keepdims=bool(keepdims), dtype=dtype),
        )


def _number_tensor(value: Any) -> jax.Array:
    tensor = convert_to_tensor(value)
    if tensor.dtype in (np.bool_, np.object_):
        raise InvalidArgumentError(
            message=f"Expected numbers. Received: a tensor of dtype {tensor.dtype}. Use tf.cast."
        )
    return tensor


def reduce_max(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the largest element; of none, the lowest of the dtype. TF: `tf.math.reduce_max`."""
    tensor = convert_to_tensor(input_tensor)
    lowest = -np.inf if jnp.issubdtype(tensor.dtype, jnp.inexact) else _limits(tensor).min
    with invalid_arguments("tf.math.reduce_max"), full_width(tensor.dtype):
        return jnp.max(tensor, axis_numbers(axis), keepdims=bool(keepdims), initial=lowest)


def reduce_min(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the smallest element; of none, the highest of the dtype. TF: `tf.math.reduce_min`."""
    tensor = convert_to_tensor(input_tensor)
    highest = np.inf if jnp.issubdtype(tensor.dtype, jnp.inexact) else _limits(tensor).max
    with invalid_arguments("tf.math.reduce_min"), full_width(tensor.dtype):
        return jnp.min(tensor, axis_numbers(axis), keepdims=bool(keepdims), initial=highest)


def _limits(tensor: jax.Array) -> Any:
    return jnp.iinfo(tensor.dtype)


def reduce_all(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.math.reduce_all`."""
    with invalid_arguments("tf.math.reduce_all"):
        return jnp.all(convert_to_tensor(input_tensor), axis_numbers(axis), keepdims=bool(keepdims))


def reduce_any(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.math.reduce_any`."""
    with invalid_arguments("tf.math.reduce_any"):
        return jnp.any(convert_to_tensor(input_tensor), axis_numbers(axis), keepdims=bool(keepdims))


def reduce_logsumexp(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.math.reduce_logsumexp`."""
    tensor = convert_to_tensor(input_tensor)
    return jsp.logsumexp(tensor, axis_numbers(axis), keepdims=bool(keepdims))


def reduce_variance(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the mean square distance from the mean.

    Raises:
        TypeError: Of integers.

    TF: `tf.math.reduce_variance`.
    """
    return jnp.var(_inexact(input_tensor), axis_numbers(axis), keepdims=bool(keepdims))


def reduce_std(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the root of the variance.

    Raises:
        TypeError: Of integers.

    TF: `tf.math.reduce_std`.
    """
    return vanishing.standard_deviation(_inexact(input_tensor), axis_numbers(axis), bool(keepdims))


def _inexact(value: Any) -> jax.Array:
    tensor = convert_to_tensor(value)
    if not jnp.issubdtype(tensor.dtype, jnp.inexact):
        raise TypeError(
            f"Input must be either real or complex. Received: dtype {tensor.dtype}. Use tf.cast."
        )
    return tensor


def reduce_euclidean_norm(
    input_tensor: Any, axis: Any = None, keepdims: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.math.reduce_euclidean_norm`."""
    tensor = convert_to_tensor(input_tensor)
    total = jnp.sum(jnp.square(tensor), axis_numbers(axis), keepdims=bool(keepdims))
    return vanishing.sqrt(total).astype(tensor.dtype)


def count_nonzero(
    input: Any,
    axis: Any = None,
    keepdims: bool | None = None,
    dtype: Any = dtypes.int64,
    name: str | None = None,
) -> jax.Array:
    """Counts the elements that are not 0, or not empty strings. TF: `tf.math.count_nonzero`."""
    tensor = convert_to_tensor(input)
    if isinstance(tensor, StringTensor):
        is_there = convert_to_tensor(tensor.numpy() != b"")
    else:
        is_there = tensor != 0
    return jnp.sum(is_there, axis_numbers(axis), keepdims=bool(keepdims), dtype=tensor_dtype(dtype))


def zero_fraction(value: Any, name: str | None = None) -> jax.Array:
    """Returns the share of zeros, as float32. TF: `tf.math.zero_fraction`."""
    return jnp.mean((convert_to_tensor(value) == 0).astype(jnp.float32))


def argmax(
    input: Any, axis: Any = None, output_type: Any = dtypes.int64, name: str | None = None
) -> jax.Array:
    """Returns the index of the largest element along `axis`, by default the first axis.

    TF: `tf.math.argmax`.
    """
    return _position(jnp.argmax, input, axis, output_type)


def argmin(
    input: Any, axis: Any = None, output_type: Any = dtypes.int64, name: str | None = None
) -> jax.Array:
    """Returns the index of the smallest element along `axis`, by default the first axis.

    TF: `tf.math.argmin`.
    """
    return _position(jnp.argmin, input, axis, output_type)


def _position(find: Callable[..., jax.Array], input: Any, axis: Any, dtype: Any) -> jax.Array:
    tensor = convert_to_tensor(input)
    with invalid_arguments(f"tf.math.{find.__name__}"):
        if tensor.ndim == 0:
            raise ValueError("expected a tensor of at least one axis, not a scalar")
        axis = 0 if axis is None else axis_numbers(axis)
        if tensor.dtype in (np.int64, np.uint64):
            # JAX does not compile its search through 64-bit integers.
            best = (reduce_max if find is jnp.argmax else reduce_min)(tensor, axis, keepdims=True)
            return jnp.argmax(tensor == best, axis).astype(tensor_dtype(dtype))
        return find(tensor, axis).astype(tensor_dtype(dtype))


# -- running totals ------------------------------------------------------------------------


def cumsum(
    x: Any, axis: int = 0, exclusive: bool = False, reverse: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the running sum; without the element itself if `exclusive`.

    TF: `tf.math.cumsum`.
    """
    return _running(lax.cumsum, 0, x, axis, exclusive, reverse)


def cumprod(
    x: Any, axis: int = 0, exclusive: bool = False, reverse: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.math.cumprod`."""
    return _running(lax.cumprod, 1, x, axis, exclusive, reverse)


def cumulative_logsumexp(
    x: Any, axis: int = 0, exclusive: bool = False, reverse: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.math.cumulative_logsumexp`."""
    x = convert_to_tensor(x)
    return _running(lax.cumlogsumexp, float(jnp.finfo(x.dtype).min), x, axis, exclusive, reverse)


def _running(
    scan: Callable[..., jax.Array],
    start: Any,
    x: Any,
    axis: Any,
    exclusive: bool,
    reverse: bool,
) -> jax.Array:
    x = convert_to_tensor(x)
    axis = int(axis) % max(x.ndim, 1)
    total = scan(x, axis=axis, reverse=bool(reverse))
    if not exclusive:
        return total
    # Each place gets what its neighbour, on the side that the sum comes from, ended with.
    empty = jnp.full_like(lax.slice_in_dim(x, 0, 1, axis=axis), start)
    if reverse:
        return jnp.concatenate([lax.slice_in_dim(total, 1, None, axis=axis), empty], axis)
    return jnp.concatenate([empty, lax.slice_in_dim(total, 0, -1, axis=axis)], axis)


# -- norms ---------------------------------------------------------------------------------


def l2_normalize(
    x: Any, axis: Any = None, epsilon: float = 1e-12, name: str | None = None, dim: Any = None
) -> jax.Array:
    """Returns `x / sqrt(max(sum(x ** 2), epsilon))` along `axis`. TF: `tf.math.l2_normalize`."""
    x = convert_to_tensor(x)
    total = jnp.sum(jnp.square(x), axis_numbers(dim if axis is None else axis), keepdims=True)
    return x * lax.rsqrt(jnp.maximum(total, epsilon))


def norm(
    tensor: Any,
    ord: Any = "euclidean",
    axis: Any = None,
    keepdims: bool | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the norm of vectors (one `axis`), of matrices (two), or of all elements (None).

    TF: `tf.norm`.
    """
    tensor = convert_to_tensor(tensor)
    axis = axis_numbers(axis)
    kept = bool(keepdims)
    is_matrix = isinstance(axis, tuple)
    with invalid_arguments("tf.norm"):
        if axis is None and kept:
            flat = norm(tensor.ravel(), ord, 0)
            return flat.reshape((1,) * tensor.ndim)
        if axis is None:
            tensor, axis = tensor.ravel(), 0
        order = {"euclidean": None if is_matrix else 2, "fro": "fro"}.get(ord, ord)
        return vanishing.norm(tensor, order, axis, kept)


def global_norm(t_list: Any, name: str | None = None) -> jax.Array:
    """Returns the norm of all tensors together; None is skipped. TF: `tf.linalg.global_norm`."""
    tensors = [convert_to_tensor(t) for t in t_list if t is not None]
    return vanishing.sqrt(sum(jnp.sum(jnp.square(t)) for t in tensors))


def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: str | None = None) -> jax.Array:
    """Returns `t`, scaled down to the norm `clip_norm` if its own is larger.

    TF: `tf.clip_by_norm`.
    """
    t = convert_to_tensor(t)
    squares = jnp.sum(jnp.square(t), axis_numbers(axes), keepdims=True)
    # A norm of zero has no gradient: where all is zero, the root is that of one.
    length = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), squares)
    return t * clip_norm / jnp.maximum(length, clip_norm)


def clip_by_global_norm(
    t_list: Any, clip_norm: Any, use_norm: Any = None, name: str | None = None
) -> tuple[list[Any], jax.Array]:
    """Scales tensors down together, to the global norm `clip_norm`, if theirs is larger.

    Returns the tensors (None stays None) and the global norm they had.

    TF: `tf.clip_by_global_norm`.
    """
    total = global_norm(t_list) if use_norm is None else convert_to_tensor(use_norm)
    # As TensorFlow: a norm that is not finite makes everything NaN.
    scale = jnp.where(jnp.isfinite(total), clip_norm / jnp.maximum(total, clip_norm), jnp.nan)
    clipped = [None if t is None else _scaled(convert_to_tensor(t), scale) for t in t_list]
    return clipped, total


def _scaled(tensor: jax.Array, scale: jax.Array) -> jax.Array:
    return tensor * scale.astype(tensor.dtype)


dispatch_on_ragged(globals())
