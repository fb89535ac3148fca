"""TensorFlow's declarations of place and order: devices, name scopes, order of operations.

Operations run in the order in which they are written, so declarations of an order have no effect.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from unison.eager_fallback import needs_python
from unison.lifting import current_lift, outside_the_program
from unison.names import current_name_scope
from unison.runtime import device_strings
from unison.runtime.private_jax import nothing_is_traced
from unison.tf import config, dtypes
from unison.tf.device_spec import DeviceSpec
from unison.tf.tensors import cast, convert_to_tensor, tensor_dtype
from unison.thread_local import ThreadLocal

_is_in_init_scope = ThreadLocal(False)


def get_current_name_scope() -> str:
    """Returns the open name scopes, joined by slashes. TF: `tf.get_current_name_scope`."""
    return current_name_scope().rstrip("/")


def device(device_name: Any) -> AbstractContextManager[Any]:
    """Inside, new tensors are put on a device; None leaves the choice as it is.

    Inside a replica program it has no effect: each replica has its device. With soft placement
    (`tf.config.set_soft_device_placement`, on by default), a device that does not exist means the
    CPU.

    Args:
        device_name: What `unison.runtime.device_strings.resolve` takes, as "GPU:0", or a
            `tf.DeviceSpec`.

    Raises:
        UnknownDeviceError: No device has that name, without soft placement.

    TF: `tf.device`.
    """
    if isinstance(device_name, DeviceSpec):
        has_type = device_name.device_type is not None
        first = device_name.replace(device_index=device_name.device_index or 0)
        device_name = first.to_string() if has_type else None
    if device_name is None or device_name == "" or current_lift() is not None:
        return contextlib.nullcontext()
    is_soft = config.get_soft_device_placement()
    return jax.default_device(device_strings.resolve(device_name, soft=is_soft))


@contextlib.contextmanager
def control_dependencies(control_inputs: Any) -> Iterator[None]:
    """Does nothing: operations run in the order in which they are written.

    TF: `tf.control_dependencies`.
    """
    yield


@contextlib.contextmanager
def init_scope() -> Iterator[None]:
    """Inside, the thread computes at once, outside the program that is traced around it.

    TF: `tf.init_scope`.
    """
    with outside_the_program(), _is_in_init_scope.bound_to(True):
        yield


def executing_eagerly() -> bool:
    """Whether operations run at once: not in a compiled function. TF: `tf.executing_eagerly`."""
    return current_lift() is None and (_is_in_init_scope.value or nothing_is_traced())


def inside_function() -> bool:
    """Whether a compiled function is being traced. TF: `tf.inside_function`."""
    return not executing_eagerly()


def group(*inputs: Any, **kwargs: Any) -> None:
    """Does nothing: the operations have run already. TF: `tf.group`."""


def no_op(name: str | None = None) -> None:
    """Does nothing. TF: `tf.no_op`."""


def tuple(tensors: Any, control_inputs: Any = None, name: str | None = None) -> list[Any]:
    """Returns the tensors. TF: `tf.tuple`."""
    return [None if tensor is None else convert_to_tensor(tensor) for tensor in tensors]


def guarantee_const(input: Any, name: str | None = None) -> Any:
    """TF: `tf.guarantee_const`."""
    return convert_to_tensor(input)


def timestamp(name: str | None = None) -> Any:
    """Returns the seconds since 1970, as float64; in a compiled program, when it runs.

    TF: `tf.timestamp`.
    """
    if executing_eagerly():
        return convert_to_tensor(np.float64(time.time()))
    return numpy_function(lambda: np.float64(time.time()), [], dtypes.float64)


def get_logger() -> logging.Logger:
    """Returns the logger "tensorflow". TF: `tf.get_logger`."""
    return logging.getLogger("tensorflow")


# -- Python inside programs ----------------------------------------------------------------


def py_function(
    func: Callable[..., Any] | None = None,
    inp: Sequence[Any] | None = None,
    Tout: Any = None,  # noqa: N803  (TensorFlow's name)
    name: str | None = None,
) -> Any:
    """Calls a Python function of tensors, when the program runs.

    In a compiled program the results' shapes must be those of the arguments broadcast together:
    XLA requires them in advance. The result has no gradient there; use `tf.custom_gradient`.

    Args:
        func: A function of tensors that have `.numpy()`.
        inp: Its arguments.
        Tout: The dtype of its result, or a list of those of several.
        name: Without effect.

    TF: `tf.py_function`.
    """
    return _called(func, inp, Tout, convert_to_tensor)


def numpy_function(
    func: Callable[..., Any] | None = None,
    inp: Sequence[Any] | None = None,
    Tout: Any = None,  # noqa: N803  (TensorFlow's name)
    stateful: bool = True,
    name: str | None = None,
) -> Any:
    """Calls a Python function of NumPy arrays, when the program runs; see `py_function`.

    TF: `tf.numpy_function`.
    """
    return _called(func, inp, Tout, lambda tensor: np.asarray(tensor)[()])


def _called(func: Any, inp: Any, dtype: Any, as_argument: Callable[[Any], Any]) -> Any:
    needs_python("tf.py_function")
    arguments = [convert_to_tensor(argument) for argument in inp or ()]
    has_several = isinstance(dtype, list | builtins.tuple)
    dtypes_wanted = list(dtype) if has_several else [dtype]

    def call(*values: Any) -> list[Any]:
        result = func(*(as_argument(value) for value in values))
        results = list(result) if has_several else [result]
        if len(results) != len(dtypes_wanted):
            raise ValueError(f"func returns {len(results)} values, Tout has {len(dtypes_wanted)}.")
        return results

    if executing_eagerly() or not _depend_on_program(arguments):
        results = [
            _as(d, result) for d, result in zip(dtypes_wanted, call(*arguments), strict=True)
        ]
        return results if has_several else results[0]
    shape = np.broadcast_shapes(*(argument.shape for argument in arguments))
    avals = [jax.ShapeDtypeStruct(shape, tensor_dtype(wanted)) for wanted in dtypes_wanted]

    def on_host(*values: Any) -> list[np.ndarray]:
        pairs = zip(call(*values), avals, strict=True)
        return [np.asarray(result, aval.dtype).reshape(aval.shape) for result, aval in pairs]

    results = io_callback(on_host, avals, *arguments)
    return results if has_several else results[0]


def _depend_on_program(arguments: Sequence[Any]) -> bool:
    return not arguments or any(isinstance(value, jax.core.Tracer) for value in arguments)


def _as(dtype: Any, result: Any) -> Any:
    """Returns the function's result as a tensor of the dtype; nothing for None."""
    if dtype is None or (isinstance(dtype, list | builtins.tuple) and not dtype):
        return None
    return cast(result, dtype)
