"""Saved models as TensorFlow's SavedModel, which TensorFlow, TensorFlow Serving and others run.

The programs stay StableHLO: `jax2tf` wraps each one in an operation of TensorFlow, `XlaCallModule`,
and its gradient in another one. TensorFlow's own `tf.saved_model.save` writes the folder, so that
TensorFlow must be installed here; what serves the model needs neither JAX nor Unison.
"""

from __future__ import annotations

import importlib
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from unison.saving.calling import SavedFunction, SavedSignature
from unison.saving.program import SavedProgram
from unison.saving.saved_object import SavedObject
from unison.saving.specs import ArraySpec, DoesNotFitError, shown
from unison.train.graph import is_variable

#: Characters with which names in TensorFlow may not begin, and that they may not hold.
_NO_NAME = re.compile(r"^[^A-Za-z0-9.]|[^\w./\\>-]")


def require_tensorflow() -> ModuleType:
    """Returns TensorFlow.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise ImportError(
            "TensorFlow writes its SavedModels, and is not installed here: pip install tensorflow. "
            'format="stablehlo" needs no TensorFlow; where TensorFlow is installed, what was saved '
            'so can be loaded, and saved with format="tensorflow".'
        ) from error


def write_tensorflow(saved: SavedObject, path: str) -> None:
    """Writes an object into a folder as a SavedModel; needs TensorFlow.

    Args:
        saved: The object.
        path: The folder.

    TF: `tf.saved_model.save`.
    """
    tf = require_tensorflow()
    with tf.device("CPU"):
        root, signatures = _Counterparts(tf, saved).of_root()
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
        tf.saved_model.save(root, path, signatures, options)


class _Counterparts:
    """TensorFlow's counterparts of an object and its parts.

    Args:
        tf: TensorFlow.
        saved: The object.
    """

    def __init__(self, tf: ModuleType, saved: SavedObject):
        self._tf = tf
        self._saved = saved
        self._made = {
            number: self._variable(number, owner)
            for number, owner in enumerate(saved.objects)
            if is_variable(owner)
        }
        self._variables = {id(saved.objects[number]): made for number, made in self._made.items()}
        self._runs = {id(program): _differentiable(tf, program) for program in saved.programs()}

    def of_root(self) -> tuple[Any, dict[str, Any]]:
        """Returns the counterpart of the object itself, and its signatures by name."""
        signatures = {name: self._signature(each) for name, each in self._saved.signatures.items()}
        return self._object(0), signatures

    def _signature(self, signature: SavedSignature) -> Any:
        """Returns the function of TensorFlow of named tensors."""
        specs = signature.structured_input_signature[1]
        names = _valid_names(specs)

        def called(**tensors: Any) -> Any:
            # Programs take named arrays in the order of their own names.
            return self._run(signature.program, [tensors[names[key]] for key in sorted(specs)])

        tensors = {names[key]: self._tensor(specs[key], names[key]) for key in specs}
        return self._tf.function(called, autograph=False).get_concrete_function(**tensors)

    def _variable(self, number: int, owner: Any) -> Any:
        value = self._saved.arrays[str(self._saved.nodes[number].variable)]
        name = _NO_NAME.sub("_", owner.cell.name).lstrip("_")
        return self._tf.Variable(value, trainable=bool(owner.trainable), name=name or None)

    def _object(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        owner, children = self._saved.objects[number], self._saved.nodes[number].children
        if isinstance(owner, list | tuple):
            places = map(str, range(len(owner)))
            items = [self._object(children[p]) if p in children else None for p in places]
            return items if isinstance(owner, list) else tuple(items)
        if isinstance(owner, dict):
            return {name: self._object(child) for name, child in children.items()}
        made = self._made[number] = self._tf.__internal__.tracking.AutoTrackable()
        for name, child in children.items():
            setattr(made, name, self._object(child))
        for name, function in self._saved.functions.get(number, {}).items():
            setattr(made, name, self._traced(function))
        return made

    def _traced(self, function: SavedFunction | SavedSignature) -> Any:
        """Returns a function that TensorFlow saves for all signatures."""
        if isinstance(function, SavedSignature):
            return self._signature(function)
        made = self._function(function)
        for program in function.programs:
            args, kwargs = jax.tree.map(self._tensor, program.inputs)
            made.get_concrete_function(*args, **kwargs)
        return made

    def _tensor(self, leaf: Any, name: str | None = None) -> Any:
        is_array = isinstance(leaf, ArraySpec)
        return self._tf.TensorSpec(leaf.shape, leaf.dtype, name or leaf.name) if is_array else leaf

    def _function(self, function: SavedFunction) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            program, tensors = function.program_for(args, kwargs, _fitting)
            return self._run(program, tensors)

        called.__name__ = function.__name__
        called.__signature__ = function.parameters  # type: ignore[attr-defined]
        return self._tf.function(called, autograph=False)

    def _run(self, program: SavedProgram, tensors: Sequence[Any]) -> Any:
        """Runs a program on tensors, as `SavedProgram.run` does on arrays."""
        values = [self._variables[id(variable)].read_value() for variable in program.variables]
        results = list(self._runs[id(program)](*values, *tensors))
        count = len(results) - len(program.assigned)
        for variable, value in zip(program.assigned, results[count:], strict=True):
            self._variables[id(variable)].assign(value)
        return jax.tree.unflatten(jax.tree.structure(program.outputs), results[:count])


def _valid_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the names of arguments by which TensorFlow knows arrays of any names."""
    valid: dict[str, str] = {}
    for name in names:
        made = re.sub(r"[^0-9A-Za-z_]", "_", name)
        if not made[:1].isalpha():
            made = f"arg_{made.lstrip('_')}"
        while keyword.iskeyword(made) or made == "self" or made in valid.values():
            made += "_"
        valid[name] = made
    return valid


def _fitting(value: Any, spec: ArraySpec) -> Any:
    """Returns a tensor if it fits the spec. Raises: DoesNotFitError."""
    if not hasattr(value, "dtype") or not spec.fits(value):
        raise DoesNotFitError(f"Received: {shown(value)}")
    return value


def _differentiable(tf: ModuleType, program: SavedProgram) -> Callable[..., Sequence[Any]]:
    """Returns a program as a function of tensors: variables' values, and its arrays."""
    of_any, of_none = program.exported(False), program.exported(True)
    assert of_any is not None
    first = len(program.variables)
    specs = [leaf for leaf in jax.tree.leaves(program.inputs) if isinstance(leaf, ArraySpec)]
    batches = [first + place for place, spec in enumerate(specs) if spec.is_batch]

    def by_batch(converted: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
        """Returns the function that `converted` makes of the program for a batch's size."""
        for_any = converted(tf, of_any)
        if of_none is None:
            return for_any
        for_none = converted(tf, of_none)

        def run(*tensors: Any) -> Sequence[Any]:
            is_none = tf.reduce_any([tf.equal(tf.shape(tensors[place])[0], 0) for place in batches])
            return tf.cond(is_none, lambda: for_none(*tensors), lambda: for_any(*tensors))

        return run

    if not of_any.out_avals:
        return lambda *tensors: ()
    forward = by_batch(_forward)
    if not of_any.has_vjp():
        return forward  # which tells who asks for the gradient that there is none
    backward = by_batch(_backward)
    inputs, outputs = _floating(of_any.in_avals), _floating(of_any.out_avals)

    @tf.custom_gradient
    def run(*tensors: Any) -> Any:
        results = tuple(forward(*tensors))

        def gradient(*cotangents: Any) -> list[Any]:
            given = [cotangents[place] for place in outputs]
            gradients = dict(zip(inputs, backward(*tensors, *given), strict=True))
            return [gradients.get(place) for place in range(len(tensors))]

        return results, gradient

    return run


def _floating(avals: Sequence[Any]) -> list[int]:
    """Returns the places of the values that have gradients."""
    return [place for place, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]


def _forward(tf: ModuleType, exported: export.Exported) -> Callable[..., Any]:
    """Returns a program as a function of its flat arguments, for TensorFlow."""
    return _converted(tf, exported, _flat(exported), exported.in_avals)


def _backward(tf: ModuleType, exported: export.Exported) -> Callable[..., Any]:
    """Returns the gradients of a program: a function of its arguments and of cotangents."""
    call = _flat(exported)
    inputs, outputs = _floating(exported.in_avals), _floating(exported.out_avals)
    count = len(exported.in_avals)

    def gradients(*arrays: jax.Array) -> Sequence[jax.Array]:
        def of(*differentiated: jax.Array) -> list[jax.Array]:
            given = dict(enumerate(arrays[:count])) | dict(zip(inputs, differentiated, strict=True))
            results = call(*given.values())
            return [results[place] for place in outputs]

        _, pull_back = jax.vjp(of, *[arrays[place] for place in inputs])
        return pull_back(list(arrays[count:]))

    cotangents = [exported.out_avals[place] for place in outputs]
    return _converted(tf, exported, gradients, [*exported.in_avals, *cotangents])


def _flat(exported: export.Exported) -> Callable[..., list[jax.Array]]:
    def call(*arrays: jax.Array) -> list[jax.Array]:
        args, kwargs = jax.tree.unflatten(exported.in_tree, arrays)
        return jax.tree.leaves(exported.call(*args, **kwargs))

    return call


def _converted(
    tf: ModuleType, exported: export.Exported, function: Callable[..., Any], avals: Sequence[Any]
) -> Callable[..., Any]:
    """Returns a function of arrays with the sizes of `avals` as one of tensors."""
    from jax.experimental import jax2tf

    converted = jax2tf.convert(
        function,
        polymorphic_shapes=[str(aval.shape) for aval in avals],
        with_gradient=False,
        native_serialization_platforms=exported.platforms,
    )
    shapes = [[size if isinstance(size, int) else None for size in aval.shape] for aval in avals]

    def call(*tensors: Any) -> Any:
        # In a branch for empty batches, TensorFlow does not know that a size is zero.
        pairs = zip(tensors, shapes, strict=True)
        with jax.enable_x64(True):  # programs have the dtypes that they were saved with
            return converted(*[tf.ensure_shape(tensor, shape) for tensor, shape in pairs])

    return call
