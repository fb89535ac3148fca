"""`tf.function`: `unison.functions.Function` with TensorFlow's options and conventions."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import numpy as np

from unison.cells import has_cell
from unison.conversion import called, converting
from unison.errors import OutOfRangeError
from unison.functions import BoundFunction
from unison.functions import Function as CompiledFunction
from unison.lifting import current_lift
from unison.tf import config
from unison.tf.symbolic_gradients import with_gradients
from unison.tf.tensors import convert_to_tensor, is_tensor
from unison.tracebacks import filter_traceback
from unison.values import is_distributed

#: Options of `tf.function` for TensorFlow's creation of graphs, which do not exist here.
_OPTIONS_WITHOUT_EFFECT = frozenset(
    "jit_compile reduce_retracing experimental_implements "
    "experimental_autograph_options experimental_attributes experimental_relax_shapes "
    "experimental_compile experimental_follow_type_hints".split()
)


class Function(CompiledFunction):
    """A function that was decorated with `tf.function`.

    Attributes:
        python_function: What was decorated.
        input_signature: The specs that the arguments must fit; None: any arguments.
    """

    _option = "autograph"

    def __init__(
        self,
        python_function: Callable[..., Any],
        input_signature: Sequence[Any] | None = None,
        autograph: bool | None = None,
    ):
        if not callable(python_function):
            raise TypeError(f"tf.function needs a function. Received: {python_function!r}")
        super().__init__(python_function, converts=bool(autograph))
        self._autograph = autograph
        self.input_signature = None if input_signature is None else tuple(input_signature)

    @filter_traceback
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except StopIteration:
            if config.functions_run_eagerly():
                raise
            raise OutOfRangeError(message="End of sequence") from None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if current_lift() is not None and self.input_signature is None:
            return self._run(*args, **kwargs)
        if self.input_signature is not None:
            args, kwargs = self._conform(args, kwargs)
        call = self._run if config.functions_run_eagerly() else super().__call__
        return jax.tree.map(_as_output, call(*args, **kwargs), is_leaf=_is_output)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        function = functools.partial(called, self.python_function)
        with converting(False) if self._autograph is False else contextlib.nullcontext():
            return with_gradients(function, *args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)

    def experimental_get_tracing_count(self) -> int:
        """Returns the number of signatures for which the function was traced."""
        return self.trace_count

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """Returns the function of one signature.

        Args:
            args: A `tf.TensorSpec` or an example for every tensor, and the values of all other
                arguments. May be left out if the function has an `input_signature`.
            kwargs: Likewise.

        TF: `tf.types.experimental.PolymorphicFunction.get_concrete_function`.
        """
        return self._concrete(args, kwargs)

    @property
    def concrete_functions(self) -> list[ConcreteFunction]:
        """The function of its input signature, or else of each signature that it was compiled for.

        A saved model contains these.
        """
        return self._known()

    def _known(self, instance: Sequence[Any] = ()) -> list[ConcreteFunction]:
        if self.input_signature is not None:
            return [self._concrete((), {}, instance)]
        return [
            self._concrete(args[len(instance) :], kwargs, instance)
            for args, kwargs in self.signatures()
            if not instance or args[0] is instance[0]
        ]

    def _concrete(
        self, args: tuple, kwargs: dict[str, Any], instance: Sequence[Any] = ()
    ) -> ConcreteFunction:
        if not args and not kwargs and self.input_signature is not None:
            args = self.input_signature
        bound = self._signature.bind(*instance, *args, **kwargs)
        bound.apply_defaults()
        positional = bound.args[len(instance) :]
        names = list(bound.arguments)[len(instance) :]
        specs = tuple(_as_spec(value, name) for name, value in zip(names, positional, strict=False))
        specs += tuple(_as_spec(value, None) for value in positional[len(specs) :])
        keywords = {name: _as_spec(value, name) for name, value in bound.kwargs.items()}
        return ConcreteFunction(self, tuple(instance), (specs, keywords), names)

    @property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.python_function)

    def _conform(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments as the input signature has them.

        Raises:
            TypeError: They do not fit.
        """
        assert self.input_signature is not None
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}() with an input_signature: {error}") from None
        names = list(bound.arguments)
        # For a method, the instance comes first and has no spec.
        skipped = 1 if len(names) > len(self.input_signature) and names[0] == "self" else 0
        for name, spec in zip(names[skipped:], self.input_signature, strict=False):
            value = bound.arguments[name]
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                specs = self.input_signature[names.index(name) - skipped :]
                value = tuple(map(self._fit, value, specs))
            else:
                value = self._fit(value, spec)
            bound.arguments[name] = value
        return bound.args, bound.kwargs

    def _fit(self, value: Any, spec: Any) -> Any:
        is_spec = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")  # noqa: E731
        try:
            return jax.tree.map(
                lambda one, leaf: self._fit_leaf(leaf, one), spec, value, is_leaf=is_spec
            )
        except ValueError as error:
            raise TypeError(
                f"{self._name}() has the input_signature {self.input_signature}. Received an "
                f"argument of another structure: {value!r}"
            ) from error

    def _fit_leaf(self, value: Any, spec: Any) -> Any:
        if is_distributed(value) or not (hasattr(spec, "shape") and hasattr(spec, "dtype")):
            return value
        if not is_tensor(value):
            value = convert_to_tensor(value, spec.dtype)
        elif has_cell(value):
            value = value.value()
        if value.dtype != spec.dtype or not _is_compatible(value.shape, spec.shape):
            raise TypeError(
                f"{self._name}() has the input_signature {self.input_signature}. Received a tensor "
                f"of shape {value.shape} and dtype {value.dtype} for {spec}. Cast or reshape it."
            )
        return value


class BoundMethod(BoundFunction):
    """A `tf.function` of one instance."""

    __func__: Function

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """Returns the method of one signature; see `Function.get_concrete_function`."""
        return self.__func__._concrete(args, kwargs, (self.__self__,))

    @property
    def concrete_functions(self) -> list[ConcreteFunction]:
        """The method of its input signature, or else of each that it was compiled for."""
        return self.__func__._known((self.__self__,))


class ConcreteFunction:
    """A `tf.function` of one signature.

    Attributes:
        function: The function.
        python_function: What was decorated; of a method, bound to its instance.
        structured_input_signature: `(args, kwargs)` with a `tf.TensorSpec` for every tensor.

    TF: `tf.types.experimental.ConcreteFunction`.
    """

    def __init__(
        self,
        function: Function,
        instance: tuple,
        signature: tuple[tuple, dict[str, Any]],
        names: Sequence[str],
    ):
        self.function = function
        self.structured_input_signature = signature
        self._instance = instance
        self._names = list(names)

    @property
    def python_function(self) -> Callable[..., Any]:
        if self._instance:
            return self.function.python_function.__get__(self._instance[0])
        return self.function.python_function

    @property
    def name(self) -> str:
        return getattr(self.python_function, "__name__", repr(self.python_function))

    @property
    def inputs(self) -> list[Any]:
        """The specs of the tensors, in order."""
        return [leaf for leaf in jax.tree.leaves(self.structured_input_signature) if _is_spec(leaf)]

    @property
    def structured_outputs(self) -> Any:
        """The shapes and dtypes of its results, for inputs whose sizes are all known."""
        from unison.tf.tensor_spec import TensorSpec

        args, kwargs = jax.tree.map(_example_of, self.structured_input_signature)
        outputs = self.function.shapes_of_result(*self._instance, *args, **kwargs)
        return jax.tree.map(lambda leaf: TensorSpec(leaf.shape, leaf.dtype), outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        specs, keywords = self.structured_input_signature
        values = dict(zip(self._names, specs, strict=False)) | keywords
        given = dict(zip(self._names, args, strict=False)) | kwargs
        unknown = sorted(given.keys() - values.keys())
        if unknown or len(args) > len(specs):
            raise TypeError(f"{self.name} takes {self._names}. Received: {args}, {kwargs}")
        for name, value in given.items():
            values[name] = self._checked(name, values[name], value)
        missing = [name for name, value in values.items() if _is_spec(value)]
        if missing:
            raise TypeError(f"{self.name} of one signature misses a tensor for: {missing}")
        positional = [values.pop(name) for name in self._names[: len(specs)]]
        return self.function(*self._instance, *positional, **values)

    def _checked(self, name: str, spec: Any, value: Any) -> Any:
        if jax.tree.leaves(spec) and all(_is_spec(leaf) for leaf in jax.tree.leaves(spec)):
            return self.function._fit(value, spec)
        if value is not spec and value != spec:
            raise TypeError(f"{self.name} was made for {name}={spec!r}. Received: {value!r}")
        return value

    def __repr__(self) -> str:
        return f"<ConcreteFunction {self.name} {self.structured_input_signature}>"


def _is_spec(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not is_tensor(value)


def _as_spec(value: Any, name: str | None) -> Any:
    """Returns `value` with a spec in place of every tensor."""
    from unison.tf.tensor_spec import TensorSpec

    def of_leaf(leaf: Any) -> Any:
        if _is_spec(leaf) and not isinstance(leaf, np.ndarray | np.generic):
            return TensorSpec(leaf.shape, leaf.dtype, name=getattr(leaf, "name", None) or name)
        if (is_tensor(leaf) and not has_cell(leaf)) or isinstance(leaf, np.ndarray):
            return TensorSpec(leaf.shape, leaf.dtype, name=name)
        return leaf

    return jax.tree.map(of_leaf, value)


def _example_of(value: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(value.shape), value.dtype) if _is_spec(value) else value


def _is_compatible(shape: Sequence[int], spec: Any) -> bool:
    wanted = None if getattr(spec, "rank", 0) is None or spec is None else tuple(spec)
    return wanted is None or (
        len(wanted) == len(shape)
        and all(want in (None, size) for want, size in zip(wanted, shape, strict=True))
    )


def _is_output(value: Any) -> bool:
    return has_cell(value) or is_distributed(value)


def _as_output(leaf: Any) -> Any:
    """Returns one leaf of a function's result as TensorFlow returns it: a tensor."""
    if has_cell(leaf):
        return leaf.value()
    is_value = isinstance(leaf, int | float | complex | str | bytes | np.ndarray | np.generic)
    return convert_to_tensor(leaf) if is_value else leaf


@overload
def function(
    func: Callable[..., Any],
    input_signature: Sequence[Any] | None = None,
    autograph: bool | None = None,
    **options: Any,
) -> Function: ...


@overload
def function(
    func: None = None,
    input_signature: Sequence[Any] | None = None,
    autograph: bool | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[Any] | None = None,
    autograph: bool | None = None,
    **options: Any,
) -> Any:
    """Makes a function a part of compiled programs; a decorator with or without arguments.

    Outside strategies the function is compiled, with the variables that it reads and assigns;
    inside `strategy.run` it is part of the replica program. A function that itself runs a
    strategy or takes batches from a dataset runs step by step; see `unison.functions.Function`.

    Args:
        func: The function.
        input_signature: A nest of `tf.TensorSpec`s that the arguments must fit.
        autograph: Whether Python's control flow over tensors is converted (see `tf.autograph`),
            where the function is compiled for itself. Default: it is where the function is part of
            another program (`strategy.run`, a saved model); otherwise the function runs step by
            step, as Python does.
        options: `jit_compile=`, `reduce_retracing=` and the others of TensorFlow; without effect.

    Raises:
        TypeError: An option that `tf.function` does not have; later, arguments that do not fit
            the `input_signature`.

    Examples:
        >>> @function(jit_compile=True)
        ... def double(x):
        ...     return 2 * x
        >>> double(3)
        Array(6, dtype=int32)

    TF: `tf.function`.
    """
    unknown = sorted(options.keys() - _OPTIONS_WITHOUT_EFFECT)
    if unknown:
        raise TypeError(
            f"tf.function takes input_signature and {sorted(_OPTIONS_WITHOUT_EFFECT)}. "
            f"Received: {', '.join(unknown)}"
        )
    if func is None:
        return lambda function: Function(function, input_signature, autograph)
    return Function(func, input_signature, autograph)
