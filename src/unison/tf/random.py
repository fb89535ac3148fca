"""`tf.random`: numbers from one stream a process, seeded by `set_seed`, and stateless draws.

In a compiled program the stream is a variable: every call of the program draws new numbers, and
each replica draws its own. Without `set_seed` the stream starts from 0, so that the workers of a
cluster agree. The numbers themselves are not TensorFlow's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.cells import Cell, VariableAggregation, VariableSynchronization
from unison.errors import InvalidArgumentError
from unison.lifting import current_lift, outside_the_program
from unison.runtime.placement import Placement
from unison.stepping import needs_python
from unison.tf import dtypes
from unison.tf.missing import names_missing_from
from unison.tf.tensors import (
    convert_to_tensor,
    full_width,
    is_tensor,
    known_value,
    like,
    sizes,
    start_devices,
    tensor_dtype,
)
from unison.tf.text import StringTensor

_hints = names_missing_from(__name__)

#: Sets the streams of programs apart from the one around them.
_IN_PROGRAMS = 0x70726F67

_lock = threading.Lock()
_seed = 0
_draws = 0
_cells: dict[Placement, Cell] = {}


def __getattr__(name: str) -> Any:
    if name in ("Generator", "get_global_generator", "set_global_generator"):
        from unison.tf import generators

        return getattr(generators, name)
    return _hints(name)


def set_seed(seed: int) -> None:
    """Seeds the stream and starts it anew, that of compiled programs too.

    TF: `tf.random.set_seed`.
    """
    global _seed, _draws
    needs_python("tf.random.set_seed")
    with _lock:
        _seed, _draws = int(seed), 0
        for cell in _cells.values():
            cell.assign(_start())


def _start() -> np.ndarray:
    return np.array([_seed & 0xFFFFFFFF, 0], np.uint32)


def next_key(seed: int | None) -> jax.Array:
    """Returns the stream's next key, set apart by `seed` if it is given."""
    global _draws
    start_devices()
    lift = current_lift()
    if lift is None:
        with _lock:
            key = jax.random.fold_in(jax.random.key(_seed), _draws)
            _draws += 1
    else:
        cell = _stream_of(lift.placement)
        state = lift.read(cell)
        lift.assign(cell, state + jnp.array([0, 1], jnp.uint32))
        key = jax.random.fold_in(
            jax.random.fold_in(jax.random.key(state[0]), _IN_PROGRAMS), state[1]
        )
    return key if seed is None else jax.random.fold_in(key, seed)


def _stream_of(placement: Placement) -> Cell:
    with _lock, outside_the_program():
        if placement not in _cells:
            _cells[placement] = stream_cell(placement, _start(), "tf.random")
        return _cells[placement]


def stream_cell(placement: Placement, state: Any, name: str) -> Cell:
    """Returns a variable for the state of a stream, `(seed, counter)`, from which every replica
    draws its own numbers.
    """
    return Cell(
        placement,
        state,
        synchronization=VariableSynchronization.AUTO,
        aggregation=VariableAggregation.NONE,
        name=name,
        stream=True,
    )


class _ProcessStream:
    """The stream of the process, with that of a placement's programs."""

    def get_state(self, placement: Placement | None) -> dict[str, Any]:
        with _lock:
            cell = None if placement is None else _cells.get(placement)
            of_programs = None if cell is None else cell.numpy()
            return {"seed": _seed, "draws": _draws, "of_programs": of_programs}

    def set_state(self, state: dict[str, Any], placement: Placement | None) -> None:
        global _seed, _draws
        with _lock:
            _seed, _draws = state["seed"], state["draws"]
        if placement is not None and state["of_programs"] is not None:
            _stream_of(placement).assign(state["of_programs"])


#: See `random_stream`.
process_stream = _ProcessStream()


# -- draws from the stream -----------------------------------------------------------------


def normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.random.normal`."""
    return draw_normal(next_key(seed), shape, mean, stddev, dtype)


def truncated_normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws from the normal distribution within two standard deviations.

    TF: `tf.random.truncated_normal`.
    """
    return draw_truncated_normal(next_key(seed), shape, mean, stddev, dtype)


def uniform(
    shape: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws from `[minval, maxval)`; integers need a `maxval`. TF: `tf.random.uniform`."""
    return draw_uniform(next_key(seed), shape, minval, maxval, dtype)


def gamma(
    shape: Any,
    alpha: Any,
    beta: Any = None,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `shape` numbers for every `alpha` and `beta`. TF: `tf.random.gamma`."""
    alpha = convert_to_tensor(alpha)
    rates = 1 if beta is None else convert_to_tensor(beta)
    return draw_gamma(next_key(seed), _each(shape, alpha, rates), alpha, beta, dtype)


def poisson(
    shape: Any,
    lam: Any,
    dtype: Any = dtypes.float32,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `shape` numbers for every `lam`. TF: `tf.random.poisson`."""
    lam = convert_to_tensor(lam)
    return draw_poisson(next_key(seed), _each(shape, lam), lam, dtype)


def _each(shape: Any, *parameters: Any) -> tuple[int, ...]:
    """Returns `shape`, followed by that of the distributions' parameters."""
    return (*sizes(shape), *np.broadcast_shapes(*(jnp.shape(part) for part in parameters)))


def categorical(
    logits: Any,
    num_samples: Any,
    dtype: Any = None,
    seed: int | None = None,
    name: str | None = None,
) -> jax.Array:
    """Draws `num_samples` classes for every row of `logits`. TF: `tf.random.categorical`."""
    return draw_categorical(next_key(seed), logits, num_samples, dtype or dtypes.int64)


def shuffle(value: Any, seed: int | None = None, name: str | None = None) -> Any:
    """Shuffles along the first axis. TF: `tf.random.shuffle`."""
    return draw_shuffled(next_key(seed), value)


# -- stateless draws -----------------------------------------------------------------------


def stateless_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = dtypes.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> jax.Array:
    """Draws what the two integers of `seed` determine; they may be traced.

    TF: `tf.random.stateless_normal` (its numbers are others).
    """
    return draw_normal(key_of(seed), shape, mean, stddev, dtype)


def stateless_truncated_normal(
    shape: Any,
    seed: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = dtypes.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> jax.Array:
    """TF: `tf.random.stateless_truncated_normal`."""
    return draw_truncated_normal(key_of(seed), shape, mean, stddev, dtype)


def stateless_uniform(
    shape: Any,
    seed: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = dtypes.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> jax.Array:
    """Draws what the two integers of `seed` determine; they may be traced.

    With both limits None, integers are drawn from all that the dtype has.

    TF: `tf.random.stateless_uniform` (its numbers are others).
    """
    if minval is None and maxval is None:
        return jax.random.bits(key_of(seed), sizes(shape), _unsigned(dtype)).astype(
            tensor_dtype(dtype)
        )
    return draw_uniform(key_of(seed), shape, minval, maxval, dtype)


def _unsigned(dtype: Any) -> np.dtype:
    return np.dtype(f"uint{8 * dtypes.named(dtype).itemsize}")


def stateless_gamma(
    shape: Any,
    seed: Any,
    alpha: Any,
    beta: Any = None,
    dtype: Any = dtypes.float32,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.random.stateless_gamma`."""
    return draw_gamma(key_of(seed), shape, convert_to_tensor(alpha), beta, dtype)


def stateless_poisson(
    shape: Any, seed: Any, lam: Any, dtype: Any = dtypes.int32, name: str | None = None
) -> jax.Array:
    """TF: `tf.random.stateless_poisson`."""
    return draw_poisson(key_of(seed), shape, convert_to_tensor(lam), dtype)


def stateless_binomial(
    shape: Any,
    seed: Any,
    counts: Any,
    probs: Any,
    output_dtype: Any = dtypes.int32,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.random.stateless_binomial`."""
    counts, probs = convert_to_tensor(counts), convert_to_tensor(probs)
    drawn = jax.random.binomial(key_of(seed), counts.astype(probs.dtype), probs, sizes(shape))
    return drawn.astype(tensor_dtype(output_dtype))


def stateless_categorical(
    logits: Any,
    num_samples: Any,
    seed: Any,
    dtype: Any = dtypes.int64,
    name: str | None = None,
) -> jax.Array:
    """TF: `tf.random.stateless_categorical`."""
    return draw_categorical(key_of(seed), logits, num_samples, dtype)


def stateless_shuffle(
    value: Any, seed: Any, alg: str = "auto_select", name: str | None = None
) -> Any:
    """TF: `tf.random.experimental.stateless_shuffle`."""
    return draw_shuffled(key_of(seed), value)


def fold_in(seed: Any, data: Any, alg: str = "auto_select") -> jax.Array:
    """Returns a seed that two integers and another one determine. TF: `tf.random.fold_in`."""
    return _seeds_of(jax.random.fold_in(key_of(seed), data), 1, convert_to_tensor(seed).dtype)[0]


def split(seed: Any, num: int = 2, alg: str = "auto_select") -> jax.Array:
    """Returns `num` seeds, as the rows of a matrix. TF: `tf.random.split`."""
    return _seeds_of(key_of(seed), num, convert_to_tensor(seed).dtype)


def _seeds_of(key: jax.Array, num: int, dtype: Any) -> jax.Array:
    return jax.random.bits(key, (num, 2), jnp.uint32).astype(dtype)


def key_of(seed: Any) -> jax.Array:
    """Returns the key that the two integers of `seed` determine.

    Raises:
        InvalidArgumentError: `seed` is not two integers.
    """
    seed = convert_to_tensor(seed)
    if seed.shape != (2,):
        raise InvalidArgumentError(message=f"seed must have the shape (2,). Received: {seed.shape}")
    return jax.random.fold_in(jax.random.key(seed[0]), seed[1])


# -- draws by key --------------------------------------------------------------------------


def _drawn(draw: Callable[..., jax.Array], key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
    dtype = tensor_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"Expected a floating dtype. Received: {dtype}")
    with full_width(dtype):
        return draw(key, sizes(shape), dtype)


def draw_normal(key: jax.Array, shape: Any, mean: Any, stddev: Any, dtype: Any) -> jax.Array:
    """Returns normal numbers; see `normal`."""
    drawn = _drawn(jax.random.normal, key, shape, dtype)
    return (drawn * _parameter(stddev, drawn) + _parameter(mean, drawn)).astype(drawn.dtype)


def draw_truncated_normal(
    key: jax.Array, shape: Any, mean: Any, stddev: Any, dtype: Any
) -> jax.Array:
    """Returns normal numbers within two standard deviations."""

    def within_two(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return jax.random.truncated_normal(key, -2, 2, shape, dtype)

    drawn = _drawn(within_two, key, shape, dtype)
    return (drawn * _parameter(stddev, drawn) + _parameter(mean, drawn)).astype(drawn.dtype)


def _parameter(value: Any, drawn: jax.Array) -> Any:
    return convert_to_tensor(value).astype(drawn.dtype)


def draw_uniform(key: jax.Array, shape: Any, minval: Any, maxval: Any, dtype: Any) -> jax.Array:
    """Returns numbers from `[minval, maxval)`; see `uniform`."""
    dtype = tensor_dtype(dtype)
    low = convert_to_tensor(minval).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        if maxval is None:
            raise ValueError(f"Must specify maxval for integer dtype {dtype}. Received: None")
        with full_width(dtype):
            high = convert_to_tensor(maxval).astype(dtype)
            return jax.random.randint(key, sizes(shape), low, high, dtype)
    high = convert_to_tensor(1 if maxval is None else maxval).astype(dtype)
    # In [0, 1) the last digit is uniform, too; scaled, TensorFlow's way.
    return _drawn(jax.random.uniform, key, shape, dtype) * (high - low) + low


def draw_gamma(key: jax.Array, shape: Any, alpha: Any, beta: Any, dtype: Any) -> jax.Array:
    """Returns numbers of the gamma distribution with shape `alpha` and rate `beta`."""

    def standard(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return jax.random.gamma(key, alpha.astype(dtype), shape, dtype)

    drawn = _drawn(standard, key, shape, dtype)
    return drawn if beta is None else drawn / _parameter(beta, drawn)


def draw_poisson(key: jax.Array, shape: Any, lam: Any, dtype: Any) -> jax.Array:
    """Returns numbers of the Poisson distribution with the mean `lam`."""
    return jax.random.poisson(key, lam, sizes(shape)).astype(tensor_dtype(dtype))


def draw_categorical(key: jax.Array, logits: Any, num_samples: Any, dtype: Any) -> jax.Array:
    """Returns classes, one row of `num_samples` for every row of `logits`."""
    logits = convert_to_tensor(logits)
    shape = (int(known_value(num_samples)), *logits.shape[:-1])
    return jax.random.categorical(key, logits, shape=shape).T.astype(tensor_dtype(dtype))


def draw_shuffled(key: jax.Array, value: Any) -> Any:
    """Returns the slices along the first axis in another order."""
    tensor = value if is_tensor(value) else convert_to_tensor(value)
    if isinstance(tensor, StringTensor):
        order = np.asarray(jax.random.permutation(key, len(tensor)))
        return like(tensor, tensor[order])
    return jax.random.permutation(key, convert_to_tensor(tensor))
