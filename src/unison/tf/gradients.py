"""Gradients: `tf.GradientTape` and what goes with it."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unison.reads import observing_reads
from unison.runtime.private_jax import (
    Pushing,
    Recording,
    is_recording,
    nothing_is_traced,
    with_gradient,
)
from unison.tf import nest
from unison.tf.tensors import convert_to_tensor, is_tensor, is_variable

logger = logging.getLogger("unison")


class UnconnectedGradients(enum.Enum):
    """What the gradient is where a target does not depend on a source.

    TF: `tf.UnconnectedGradients`.
    """

    NONE = "none"
    ZERO = "zero"


class GradientTape:
    """Records what is computed, for gradients.

    Values inside the block are ordinary tensors. The tape works eagerly, in a `tf.function`, in
    `jax.jit`, and inside `strategy.run`, where it computes the replica's gradients; tapes may be
    nested for higher orders. A compiled step with a tape is the program of the same step written
    with `jax.value_and_grad`.

    Args:
        persistent: Whether gradients may be taken more than once.
        watch_accessed_variables: Whether trainable variables are watched when they are read.

    Example:
        >>> import unison.tf as tf
        >>> x = tf.constant(3.0)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = x * x
        >>> tape.gradient(y, x)
        Array(6., dtype=float32)

    TF: `tf.GradientTape`.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True):
        self._persistent = persistent
        self._watches_reads = watch_accessed_variables
        # The outermost first; see `_new_recordings`.
        self._recordings: list[Recording] = []
        self._is_on = False
        # By identity. All reads of a variable have one source in each recording.
        self._variables: dict[int, tuple[Any, list[Any]]] = {}

    def __enter__(self) -> GradientTape:
        if self._is_on:
            raise ValueError("The tape is recording already: its block was entered twice.")
        if not self._recordings:
            # What a recording computes to be able to go back is not in it, so that its own
            # gradients cannot be differentiated by it. For gradients that are taken inside the
            # block, a persistent tape has a second recording around the first.
            self._recordings = [self._new_recording() for _ in range(2 if self._persistent else 1)]
            self._variables = {}
        for recording in self._recordings:
            recording.switch_on()
        _observe_reads(self._note_read)
        self._is_on = True
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._is_on:
            self._switch_off(self._recordings)

    def _new_recording(self) -> Recording:
        return Recording()

    def _switch_off(self, recordings: Sequence[Recording]) -> None:
        for recording in reversed(recordings):
            recording.switch_off()
        _do_not_observe_reads(self._note_read)
        self._is_on = False

    def watch(self, tensor: Any) -> None:
        """Makes `tensor`, a tensor or variable or a nest of them, a source of gradients.

        Raises:
            ValueError: Something in `tensor` is neither.
            RuntimeError: The tape's block has not been entered.
        """
        if not self._recordings:
            raise RuntimeError("tape.watch is called inside the tape's block: `with tape:`.")
        for leaf in nest.flatten(tensor):
            if not is_tensor(leaf):
                raise ValueError(
                    "A gradient tape watches tensors and variables. Received: "
                    f"{leaf!r} of type {type(leaf).__name__}"
                )
            if not _has_gradient(leaf.dtype):
                logger.warning(
                    "A gradient tape can only watch floating-point tensors. Received: dtype %s",
                    leaf.dtype,
                )
            elif is_variable(leaf):
                self._sources_of_variable(leaf)
            else:
                for recording in self._recordings:
                    if recording.source_of(leaf) is None:
                        recording.follow(leaf, recording.new_source(leaf))

    def watched_variables(self) -> tuple[Any, ...]:
        """Returns the variables that are watched, in the order in which that began."""
        return tuple(variable for variable, _ in self._variables.values())

    @contextlib.contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Inside, this tape records nothing; others, inside or around it, go on.

        Raises:
            ValueError: The tape does not record.
        """
        if not self._is_on:
            raise ValueError("stop_recording is for the inside of the tape's block.")
        recordings = self._recordings
        try:
            with _paused(recordings):
                _do_not_observe_reads(self._note_read)
                self._is_on = False
                try:
                    yield
                finally:
                    _observe_reads(self._note_read)
                    self._is_on = True
        finally:
            if self._recordings is not recordings:  # used up meanwhile
                self._switch_off(recordings)

    def reset(self) -> None:
        """Forgets all that was recorded, and what is watched.

        Raises:
            ValueError: The tape does not record.
        """
        if not self._is_on:
            raise ValueError("reset is for the inside of the tape's block.")
        self._switch_off(self._recordings)
        self._recordings = []
        self.__enter__()

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the gradient of `target` with respect to `sources`.

        Args:
            target: A tensor or a nest of tensors; several are summed, as are their elements.
            sources: Tensors that were watched or computed in the block, and variables, in any
                nesting.
            output_gradients: Weights of the targets, of their shapes.
            unconnected_gradients: What to return where the target does not depend on a source:
                None, or zeros.

        Returns:
            A nest like `sources`. Embeddings have dense gradients.

        Raises:
            RuntimeError: A tape that is not persistent was used before.
            TypeError: `target` is None.
        """
        unconnected = _parse(unconnected_gradients)
        if target is None:
            raise TypeError("The target must be a tensor or a nest of tensors. Received: None")
        targets = self._read_variables(nest.flatten(target))
        for one in targets:
            if not _has_gradient(one.dtype):
                logger.warning(
                    "Only floating-point tensors have gradients. Received: %s", one.dtype
                )
        flat_sources = nest.flatten(sources)
        gradients = self._flat_gradients(targets, flat_sources, output_gradients, unconnected)
        return nest.pack_sequence_as(sources, gradients)

    def _flat_gradients(
        self,
        targets: Sequence[Any],
        sources: Sequence[Any],
        weights: Any,
        unconnected: UnconnectedGradients,
        constants: Sequence[Any] = (),
    ) -> list[Any]:
        level, pull = self._pullback(targets, sources, constants)
        gradients = self._take(level, lambda: pull(_weights(targets, weights)))
        return [
            _filled(gradient, source, unconnected)
            for gradient, source in zip(gradients, sources, strict=True)
        ]

    def jacobian(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Returns the derivatives of every element of `target` by every element of `sources`.

        Returns:
            A nest like `sources` of tensors of shape `target.shape + source.shape`.

        Raises:
            RuntimeError: A tape that is not persistent was used before.

        TF: `tf.GradientTape.jacobian`; the last two arguments have no effect.
        """
        del parallel_iterations, experimental_use_pfor
        unconnected = _parse(unconnected_gradients)
        (target,) = self._read_variables([target])
        flat_sources = nest.flatten(sources)
        level, pull = self._pullback([target], flat_sources)
        basis = jnp.eye(target.size, dtype=target.dtype).reshape(target.size, *target.shape)
        rows = self._take(level, lambda: jax.vmap(lambda weights: pull([weights]))(basis))
        jacobians = [
            _filled(None, source, unconnected, target.shape)
            if row is None
            else row.reshape(*target.shape, *source.shape)
            for row, source in zip(rows, flat_sources, strict=True)
        ]
        return nest.pack_sequence_as(sources, jacobians)

    def batch_jacobian(
        self,
        target: Any,
        source: Any,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Returns, for every example, the jacobian of its row of `target` by its row of `source`.

        Rows must not depend on the rows of other examples.

        Returns:
            A tensor of shape `[examples] + target.shape[1:] + source.shape[1:]`; zeros where the
            target does not depend on the source, for both values of `unconnected_gradients`.

        Raises:
            ValueError: The two have no or different numbers of examples.
            RuntimeError: A tape that is not persistent was used before.

        TF: `tf.GradientTape.batch_jacobian`; the last two arguments have no effect.
        """
        del parallel_iterations, experimental_use_pfor
        _parse(unconnected_gradients)
        if min(target.ndim, source.ndim) < 2 or target.shape[0] != source.shape[0]:
            raise ValueError(
                "batch_jacobian needs a target and a source of rank 2 or more with the same number "
                f"of examples. Received: shapes {target.shape} and {source.shape}"
            )
        examples, *row = target.shape
        level, pull = self._pullback([target], [source])
        size = math.prod(row)
        basis = jnp.eye(size, dtype=target.dtype).reshape(size, 1, *row)
        weights = jnp.broadcast_to(basis, (size, *target.shape))
        (pulled,) = self._take(level, lambda: jax.vmap(lambda weight: pull([weight]))(weights))
        if pulled is None:
            return jnp.zeros((examples, *row, *source.shape[1:]), source.dtype)
        return jnp.moveaxis(pulled, 0, 1).reshape(examples, *row, *source.shape[1:])

    def _note_read(self, variable: Any, value: jax.Array) -> jax.Array:
        if not _has_gradient(value.dtype):
            return value
        is_watched = id(variable) in self._variables
        if is_watched or (self._watches_reads and variable.trainable):
            sources = self._sources_of_variable(variable, value)
        else:
            sources = [None for _ in self._recordings]
        for recording, source in zip(self._recordings, sources, strict=True):
            value = recording.follow(value, source)
        return value

    def _sources_of_variable(self, variable: Any, value: Any = None) -> list[Any]:
        if id(variable) not in self._variables:
            like = (
                value
                if value is not None
                else jax.ShapeDtypeStruct(tuple(variable.shape), jnp.dtype(variable.dtype))
            )
            sources = [recording.new_source(like) for recording in self._recordings]
            self._variables[id(variable)] = (variable, sources)
        return self._variables[id(variable)][1]

    def _read_variables(self, targets: Sequence[Any]) -> list[Any]:
        with _observing_reads(self._note_read) if self._recordings else contextlib.nullcontext():
            return [_as_tensor(target) for target in targets]

    def _pullback(
        self, targets: Sequence[Any], sources: Sequence[Any], constants: Sequence[Any] = ()
    ) -> tuple[int, Callable[[Sequence[Any]], list[Any]]]:
        """Returns the function from weights of the targets to gradients of the sources, and the
        number of the recording that it comes from.

        The gradients do not go on beyond `constants`.
        """
        if not self._recordings:
            raise RuntimeError(
                "A gradient tape that is not persistent gives one set of gradients, after its "
                "block was entered. Use tf.GradientTape(persistent=True) for more."
            )
        recordings = self._recordings
        if not self._persistent:
            if self._is_on:
                self._switch_off(self._recordings)
            self._recordings = []

        # The inner recordings know more of what the outer ones do not, and the other way round.
        for level in reversed(range(len(recordings))):
            recording = recordings[level]

            def source_of(value: Any, level: int = level, recording: Recording = recording) -> Any:
                if is_variable(value):
                    return (
                        self._variables[id(value)][1][level]
                        if id(value) in self._variables
                        else None
                    )
                return recording.source_of(value)

            for target in targets:
                is_source = any(target is source for source in sources)
                if is_source and _has_gradient(target.dtype) and source_of(target) is None:
                    recording.follow(target, recording.new_source(target))
            recorded = [recording.source_of(target) for target in targets]
            found = [source_of(source) for source in sources]
            groups = (recorded, found, [source_of(constant) for constant in constants])
            pull = recording.pullback(
                *([source for source in group if source is not None] for group in groups)
            )
            if pull is not None:
                return level, functools.partial(_pulled_back, pull, recorded, found)
        raise RuntimeError(
            "Gradients that were taken inside the block of a persistent tape have been "
            "differentiated twice. Use a tape for each order, one inside the other."
        )

    def _take(self, level: int, gradients: Callable[[], list[Any]]) -> list[Any]:
        """Computes gradients by the recording `level`; inside the block, the ones around it record
        that.
        """
        if not self._is_on:
            return gradients()
        inner = self._recordings[level:]
        with _paused(inner):
            results = gradients()
        for recording in inner:
            for result in results:
                if result is not None:
                    recording.follow_unknown(result)
        return results


def _pulled_back(
    pull: Callable[..., Any], targets: Sequence[Any], sources: Sequence[Any], weights: Sequence[Any]
) -> list[Any]:
    """Returns the gradient of every source, None for those that were not recorded (None).

    TensorFlow's gradient by a complex number is the conjugate of JAX's.
    """
    pairs = zip(weights, targets, strict=True)
    pulled = iter(pull([_conjugate(weight) for weight, target in pairs if target is not None]))
    return [None if source is None else _conjugate(next(pulled)) for source in sources]


def _conjugate(value: Any) -> Any:
    return jnp.conj(value) if value is not None and jnp.iscomplexobj(value) else value


def _as_tensor(value: Any) -> Any:
    return value.__jax_array__() if is_variable(value) else convert_to_tensor(value)


@contextlib.contextmanager
def _paused(recordings: Sequence[Recording]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for recording in recordings:
            stack.enter_context(recording.paused())
        yield


# Told of a read, gives the value to use for it.
_Observer = Callable[[Any, jax.Array], Any]
_thread = threading.local()


def _observe_reads(observer: _Observer) -> None:
    """Calls `observer` for every variable that this thread reads, until told not to.

    Tapes may end in any order, so that they are no stack of context managers.
    """
    observers = vars(_thread).setdefault("observers", [])
    if not observers:
        _thread.observation = contextlib.ExitStack()
        _thread.observation.enter_context(_observing_reads(_tell_observers))
    observers.append(observer)


def _do_not_observe_reads(observer: _Observer) -> None:
    _thread.observers.remove(observer)
    if not _thread.observers:
        _thread.observation.close()


def _tell_observers(variable: Any, value: jax.Array) -> jax.Array:
    for observer in _thread.observers:
        value = observer(variable, value)
    return value


@contextlib.contextmanager
def _observing_reads(observer: _Observer) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if "keras" in sys.modules:
            from unison.keras.reads import noting_keras_reads

            stack.enter_context(noting_keras_reads())
        stack.enter_context(observing_reads(observer))
        yield


def _has_gradient(dtype: Any) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)


def _parse(unconnected: UnconnectedGradients | str) -> UnconnectedGradients:
    try:
        return UnconnectedGradients(unconnected)
    except ValueError:
        raise ValueError(
            "unconnected_gradients must be tf.UnconnectedGradients.NONE or ZERO, or 'none' or "
            f"'zero'. Received: {unconnected!r}"
        ) from None


def _weights(targets: Sequence[Any], output_gradients: Any) -> list[Any]:
    given = nest.flatten(output_gradients) if output_gradients is not None else [None]
    given = given * len(targets) if given == [None] else given
    if len(given) != len(targets):
        raise ValueError(
            f"output_gradients must have a weight for each of {len(targets)} targets. Received: "
            f"{len(given)}"
        )
    return [
        jnp.ones_like(target)
        if weight is None
        else jnp.broadcast_to(convert_to_tensor(weight), target.shape).astype(target.dtype)
        for target, weight in zip(targets, given, strict=True)
    ]


def _filled(
    gradient: Any,
    source: Any,
    unconnected: UnconnectedGradients,
    before: Sequence[int] = (),
    shape: Sequence[int] | None = None,
) -> Any:
    if gradient is not None or unconnected is UnconnectedGradients.NONE:
        return gradient
    shape = tuple(source.shape) if shape is None else tuple(shape)
    return jnp.zeros((*before, *shape), jnp.dtype(source.dtype))


class ForwardAccumulator:
    """Computes directional derivatives while the block runs (forward mode).

    Args:
        primals: A tensor or variable to differentiate by, or a nest of them.
        tangents: The direction: a nest like `primals`.

    Raises:
        ValueError: `primals` and `tangents` differ in structure or shape.

    Example:
        >>> import unison.tf as tf
        >>> x = tf.constant(3.0)
        >>> with tf.autodiff.ForwardAccumulator(x, tf.constant(2.0)) as accumulator:
        ...     y = x * x
        >>> accumulator.jvp(y)
        Array(12., dtype=float32)

    TF: `tf.autodiff.ForwardAccumulator`.
    """

    def __init__(self, primals: Any, tangents: Any):
        nest.assert_same_structure(primals, tangents)
        self._pushing: Pushing | None = None
        self._is_on = False
        pairs = zip(nest.flatten(primals), nest.flatten(tangents), strict=True)
        self._pairs = [(primal, convert_to_tensor(tangent)) for primal, tangent in pairs]
        for primal, tangent in self._pairs:
            if tuple(primal.shape) != tuple(tangent.shape):
                raise ValueError(
                    "A tangent must have the shape of its primal. Received: shapes "
                    f"{tuple(tangent.shape)} and {tuple(primal.shape)}"
                )

    def __enter__(self) -> ForwardAccumulator:
        if self._is_on:
            raise ValueError("The accumulator is at work already: its block was entered twice.")
        if self._pushing is None:
            self._pushing = Pushing()
        for primal, tangent in self._pairs:
            if not is_variable(primal):
                self._pushing.follow(primal, tangent)
        self._pushing.switch_on()
        _observe_reads(self._note_read)
        self._is_on = True
        return self

    def __exit__(self, *failure: Any) -> None:
        assert self._pushing is not None
        self._is_on = False
        _do_not_observe_reads(self._note_read)
        self._pushing.switch_off()

    def jvp(
        self,
        primals: Any,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the derivatives of `primals`, which the block computed, in the direction.

        Raises:
            ValueError: The block has not been entered.
        """
        unconnected = _parse(unconnected_gradients)
        if self._pushing is None:
            raise ValueError("Enter the accumulator's block before jvp is called.")
        pushing = self._pushing
        return nest.map_structure(
            lambda primal: _filled(pushing.tangent_of(primal), primal, unconnected), primals
        )

    def _note_read(self, variable: Any, value: jax.Array) -> jax.Array:
        assert self._pushing is not None
        tangents = (tangent for primal, tangent in self._pairs if primal is variable)
        return self._pushing.follow(value, next(tangents, None))


def custom_gradient(f: Callable[..., Any] | None = None) -> Any:
    """Gives a function a gradient of its own; a decorator.

    Args:
        f: A function of tensors that returns its result and `grad_fn`, a function from the
            gradients of the result to those of the tensors. If `f` reads variables, `grad_fn`
            must take `variables=`, a list of them, and return the gradients of the tensors and a
            list of those of the variables.

    Example:
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
    """Calls `f` as it is, and tells the tapes which gradient its result has."""
    leaves = nest.flatten(args)
    with _trainable_reads() as read:
        result, grad_fn = f(*args, **kwargs)
    variables = [v for v in read.values() if not any(v is leaf for leaf in leaves)]
    _check_takes_variables(grad_fn, variables)
    results = [_as_tensor(leaf) for leaf in nest.flatten(result)]
    arrays, values = [_as_tensor(leaf) for leaf in leaves], [_as_tensor(v) for v in variables]
    inputs = [*arrays, *values]
    outputs = [index for index, leaf in enumerate(results) if _has_gradient(leaf.dtype)]

    def pull(*cotangents: jax.Array) -> list[jax.Array]:
        upstream = [jnp.zeros_like(leaf) for leaf in results]
        for index, cotangent in zip(outputs, cotangents, strict=True):
            upstream[index] = cotangent
        of_arrays, of_values = _pulled(grad_fn, upstream, arrays, values, variables)
        pairs = zip([*of_arrays, *of_values], inputs, strict=True)
        return [gradient for gradient, leaf in pairs if _has_gradient(leaf.dtype)]

    copies = with_gradient(
        pull,
        [leaf for leaf in inputs if _has_gradient(leaf.dtype)],
        [results[index] for index in outputs],
    )
    for index, copy in zip(outputs, copies, strict=True):
        results[index] = copy
    return nest.pack_sequence_as(result, results)


def _traced_with_gradient(f: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls `f` in a function that JAX traces, and tells JAX which gradient its result has."""
    leaves = [convert_to_tensor(leaf) for leaf in nest.flatten(args)]

    def result_and_gradient(*arrays: jax.Array) -> tuple[Any, Callable[..., Any]]:
        return f(*nest.pack_sequence_as(args, list(arrays)), **kwargs)

    with _trainable_reads() as read:
        jax.eval_shape(lambda *arrays: nest.flatten(result_and_gradient(*arrays)[0]), *leaves)
    variables = list(read.values())

    @jax.custom_vjp
    def call(arrays: list[jax.Array], values: list[jax.Array]) -> Any:
        return result_and_gradient(*arrays)[0]

    def forward(arrays: list[jax.Array], values: list[jax.Array]) -> Any:
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


@contextlib.contextmanager
def _trainable_reads() -> Iterator[dict[int, Any]]:
    """Gives the trainable variables that are read inside, by their identity."""
    read: dict[int, Any] = {}

    def note(variable: Any, value: jax.Array) -> jax.Array:
        if variable.trainable:
            read[id(variable)] = variable
        return value

    with _observing_reads(note):
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
    upstream = [_conjugate(one) for one in upstream]
    if variables:
        gradients, of_variables = grad_fn(*upstream, variables=list(variables))
    else:
        gradients, of_variables = grad_fn(*upstream), []
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
    if gradient is None or not _has_gradient(array.dtype):
        return None
    return _conjugate(jnp.asarray(gradient, dtype=array.dtype))


def grad_pass_through(f: Callable[..., Any]) -> Callable[..., Any]:
    """Gives `f`, a function of one tensor, the gradient of the identity.

    TF: `tf.grad_pass_through`.
    """

    @custom_gradient
    def identity_in_gradients(*args: Any, **kwargs: Any) -> Any:
        def passed(*upstream: Any, variables: Any = None) -> Any:
            gradients = upstream[0] if len(upstream) == 1 else list(upstream)
            return (gradients, [None for _ in variables]) if variables else gradients

        return f(*args, **kwargs), passed

    return identity_in_gradients


def recompute_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the gradient of `f` compute what `f` computed again, rather than keep it in memory.

    TF: `tf.recompute_grad`.
    """

    @functools.wraps(f)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return jax.checkpoint(lambda *arrays: f(*arrays, **kwargs))(*args)

    return recomputed


_functions = threading.local()


class RecordingWanted(BaseException):
    """Ends a call of a `tf.function` that asks for symbolic gradients; see `with_gradients`."""


def with_gradients(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the body of a `tf.function`, in which `tf.gradients` works.

    Symbolic gradients need a record of all that the function computes. It is made only if they
    are asked for: the function is then called again.
    """
    outer = getattr(_functions, "tape", None)
    if outer is not None:
        return function(*args, **kwargs)
    try:
        _functions.tape = _NotRecording
        return function(*args, **kwargs)
    except RecordingWanted:
        with _EverythingTape() as tape:
            _functions.tape = tape
            return function(*args, **kwargs)
    finally:
        _functions.tape = outer


class _NotRecording:
    """Stands for the tape of a function that has not asked for gradients."""


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
        from unison.collectives.aggregation import AggregationMethod

        AggregationMethod.parse(aggregation_method)
    tape = getattr(_functions, "tape", None)
    if tape is None:
        raise RuntimeError(
            "tf.gradients works inside a tf.function. Outside, record with tf.GradientTape."
        )
    if tape is _NotRecording:
        raise RecordingWanted
    constants = [] if stop_gradients is None else nest.flatten(stop_gradients)
    return tape._flat_gradients(
        nest.flatten(ys), nest.flatten(xs), grad_ys, _parse(unconnected_gradients), constants
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
    tape = _functions.tape
    return [
        None if first is None else tape.jacobian(first, x)
        for first, x in zip(firsts, flat_xs, strict=True)
    ]
