"""Gradients: `tf.GradientTape` and related functions."""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unison.collectives.presence import combined_so_far, present_anywhere
from unison.interrupts import begin_block, end_block
from unison.runtime.private_jax import (
    Recording,
)
from unison.tf import nest
from unison.tf.dispatch import CompositeTensor
from unison.tf.tensors import convert_to_tensor, is_tensor, is_variable
from unison.tf.variable_reads import do_not_observe_reads, observe_reads, observing_all_reads

logger = logging.getLogger("unison")


class UnconnectedGradients(enum.Enum):
    """The gradient of a target that does not depend on a source.

    TF: `tf.UnconnectedGradients`.
    """

    NONE = "none"
    ZERO = "zero"


_UNBOUNDED_LOOP = (
    "A loop whose number of iterations is known only when the program runs has no gradient. State "
    "the most that there can be: tf.autograph.experimental.set_loop_options(maximum_iterations=...)"
    " as the first statement of its body, or tf.while_loop(..., maximum_iterations=...); or go "
    "through a tf.range of fixed length."
)


class GradientTape:
    """Records computations, for gradients.

    Values inside the block are ordinary tensors. The tape works eagerly, in a `tf.function`, in
    `jax.jit`, and inside `strategy.run`, where it computes the replica's gradients; tapes may be
    nested for higher orders. A compiled step with a tape is the program of the same step written
    with `jax.value_and_grad`.

    Args:
        persistent: Whether gradients may be taken more than once.
        watch_accessed_variables: Whether trainable variables are watched when they are read.

    Examples:
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
        begin_block(self._begin, self._end)
        return self

    def __exit__(self, *failure: Any) -> None:
        end_block(self._end)

    def _begin(self) -> None:
        self._is_on = True
        for recording in self._recordings:
            recording.switch_on()
        observe_reads(self._note_read)

    def _end(self) -> None:
        if self._is_on:
            self._switch_off(self._recordings)

    def _new_recording(self) -> Recording:
        return Recording()

    def _switch_off(self, recordings: Sequence[Recording]) -> None:
        for recording in reversed(recordings):
            recording.switch_off()
        do_not_observe_reads(self._note_read)
        self._is_on = False

    def watch(self, tensor: Any) -> None:
        """Makes `tensor`, a tensor or variable or a nest of them, a source of gradients.

        Raises:
            ValueError: Something in `tensor` is neither.
            RuntimeError: The tape's block has not been entered.
        """
        if not self._recordings:
            raise RuntimeError("tape.watch is called inside the tape's block: `with tape:`.")
        for leaf in map(values_of, nest.flatten(tensor)):
            if not is_tensor(leaf):
                raise ValueError(
                    "A gradient tape watches tensors and variables. Received: "
                    f"{leaf!r} of type {type(leaf).__name__}"
                )
            if not has_gradient(leaf.dtype):
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
        """Inside, this tape records nothing; other tapes, inside or around it, continue.

        Raises:
            ValueError: The tape does not record.
        """
        if not self._is_on:
            raise ValueError("stop_recording is for the inside of the tape's block.")
        recordings = self._recordings
        try:
            with _paused(recordings):
                do_not_observe_reads(self._note_read)
                self._is_on = False
                try:
                    yield
                finally:
                    observe_reads(self._note_read)
                    self._is_on = True
        finally:
            if self._recordings is not recordings:  # used up meanwhile
                self._switch_off(recordings)

    def reset(self) -> None:
        """Discards the recording, and the watched tensors.

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
            A nest like `sources`. Embeddings have dense gradients. On a replica without examples
            there are zeros where the others have gradients.

        Raises:
            RuntimeError: A tape that is not persistent was used before.
            TypeError: `target` is None.
        """
        unconnected = parse_unconnected(unconnected_gradients)
        if target is None:
            raise TypeError("The target must be a tensor or a nest of tensors. Received: None")
        targets = self._read_variables(list(map(values_of, nest.flatten(target))))
        for one in targets:
            if not has_gradient(one.dtype):
                logger.warning(
                    "Only floating-point tensors have gradients. Received: %s", one.dtype
                )
        given = nest.flatten(sources)
        flat_sources = list(map(values_of, given))
        gradients = self._flat_gradients(targets, flat_sources, output_gradients, unconnected)
        connected = present_anywhere([gradient is not None for gradient in gradients])
        gradients = [
            filled(gradient, source, UnconnectedGradients.ZERO) if is_connected else None
            for gradient, source, is_connected in zip(
                gradients, flat_sources, connected, strict=True
            )
        ]
        return nest.pack_sequence_as(sources, list(map(_in_rows_of, given, gradients)))

    def _flat_gradients(
        self,
        targets: Sequence[Any],
        sources: Sequence[Any],
        weights: Any,
        unconnected: UnconnectedGradients,
        constants: Sequence[Any] = (),
    ) -> list[Any]:
        combined = [value for value in combined_so_far() if has_gradient(value.dtype)]
        level, pull = self._pullback([*targets, *combined], sources, constants)
        zeros = list(map(jnp.zeros_like, combined))
        try:
            gradients = self._take(level, lambda: pull([*_weights(targets, weights), *zeros]))
        except ValueError as error:
            if "Reverse-mode differentiation does not work for lax.while_loop" in str(error):
                raise ValueError(_UNBOUNDED_LOOP) from error
            raise
        return [
            filled(gradient, source, unconnected)
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
        unconnected = parse_unconnected(unconnected_gradients)
        (target,) = self._read_variables([target])
        flat_sources = nest.flatten(sources)
        level, pull = self._pullback([target], flat_sources)
        basis = jnp.eye(target.size, dtype=target.dtype).reshape(target.size, *target.shape)
        rows = self._take(level, lambda: jax.vmap(lambda weights: pull([weights]))(basis))
        jacobians = [
            filled(None, source, unconnected, target.shape)
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
        parse_unconnected(unconnected_gradients)
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
        if not has_gradient(value.dtype):
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
        with observing_all_reads(self._note_read) if self._recordings else contextlib.nullcontext():
            return [as_tensor(target) for target in targets]

    def _pullback(
        self, targets: Sequence[Any], sources: Sequence[Any], constants: Sequence[Any] = ()
    ) -> tuple[int, Callable[[Sequence[Any]], list[Any]]]:
        """Returns the function from weights of the targets to gradients of the sources, and the
        number of the recording that it comes from.

        The gradients stop at `constants`.
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
                if is_source and has_gradient(target.dtype) and source_of(target) is None:
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


def values_of(leaf: Any) -> Any:
    """Returns what gradients are taken by: of a ragged tensor, its values."""
    return leaf.flat_values if isinstance(leaf, CompositeTensor) else leaf


def _in_rows_of(source: Any, gradient: Any) -> Any:
    """Returns the gradient by a ragged tensor in its rows, and any other as it is."""
    if gradient is None or not isinstance(source, CompositeTensor):
        return gradient
    return source.of_parts([gradient, *list(source.parts())[1:]])


def _pulled_back(
    pull: Callable[..., Any], targets: Sequence[Any], sources: Sequence[Any], weights: Sequence[Any]
) -> list[Any]:
    """Returns the gradient of every source, None for those that were not recorded (None).

    TensorFlow's gradient by a complex number is the conjugate of JAX's.
    """
    pairs = zip(weights, targets, strict=True)
    pulled = iter(pull([conjugate(weight) for weight, target in pairs if target is not None]))
    return [None if source is None else conjugate(next(pulled)) for source in sources]


def conjugate(value: Any) -> Any:
    """Returns the conjugate of a complex gradient, and any other as it is."""
    return jnp.conj(value) if value is not None and jnp.iscomplexobj(value) else value


def as_tensor(value: Any) -> Any:
    """Returns a variable's value, or a value that can be converted, as a tensor."""
    return value.__jax_array__() if is_variable(value) else convert_to_tensor(value)


@contextlib.contextmanager
def _paused(recordings: Sequence[Recording]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for recording in recordings:
            stack.enter_context(recording.paused())
        yield


def has_gradient(dtype: Any) -> bool:
    """Whether there are gradients of tensors of a dtype."""
    return jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)


def parse_unconnected(unconnected: UnconnectedGradients | str) -> UnconnectedGradients:
    """Returns the behaviour for unconnected gradients, given by itself or its name."""
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


def filled(
    gradient: Any,
    source: Any,
    unconnected: UnconnectedGradients,
    before: Sequence[int] = (),
    shape: Sequence[int] | None = None,
) -> Any:
    """Returns a gradient, or the replacement for a missing one: None, or zeros.

    Args:
        gradient: The gradient; None if it is missing.
        source: What it is the gradient by.
        unconnected: Which of the two.
        before: The axes in front of the source's.
        shape: The source's axes, if they are not its shape.
    """
    if gradient is not None or unconnected is UnconnectedGradients.NONE:
        return gradient
    shape = tuple(source.shape) if shape is None else tuple(shape)
    return jnp.zeros((*before, *shape), jnp.dtype(source.dtype))
