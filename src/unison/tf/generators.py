"""`tf.random.Generator`: a stream of random numbers that is an object."""

from __future__ import annotations

import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.cells import Cell
from unison.lifting import current_lift, outside_the_program
from unison.module import Tracked
from unison.runtime.placement import Placement, placement_in_scope
from unison.tf import dtypes
from unison.tf.random_draws import draw_normal, draw_truncated_normal, draw_uniform
from unison.tf.random_keys import stream_cell
from unison.tf.tensors import convert_to_tensor, sizes, start_devices, tensor_dtype


class StreamState:
    """The variable that a generator's state is in, for checkpoints.

    Args:
        cell: Where it is stored.
    """

    shape = (2,)
    dtype = np.dtype(np.uint32)
    trainable = False

    def __init__(self, cell: Cell):
        self.cell = cell
        self.name = cell.name


class Generator(Tracked):
    """A stream of random numbers. Make one with `from_seed`, `from_state` or `split`.

    In the programs of a strategy it gives every replica numbers of its own. One that was made
    outside of scopes belongs to the first strategy of several replicas that uses it. The numbers
    are not TensorFlow's. A checkpoint that is given the generator saves where it is.

    Args:
        copy_from: A generator to start from where it is.
        state: What another one's `state` is: two integers.
        alg: Without effect: JAX has one algorithm.

    Examples:
        >>> generator = Generator.from_seed(1)
        >>> generator.normal([2]).shape, generator.make_seeds(3).shape
        ((2,), (2, 3))

    TF: `tf.random.Generator`.
    """

    def __init__(self, copy_from: Generator | None = None, state: Any = None, alg: Any = None):
        if (copy_from is None) == (state is None):
            raise ValueError(
                "Expected either copy_from or state. Use Generator.from_seed(seed) for a new one."
            )
        start_devices()
        with outside_the_program():
            given = copy_from.state if copy_from is not None else convert_to_tensor(state)
            if given.shape != (2,):
                raise ValueError(f"A generator's state has the shape (2,). Received: {given.shape}")
            self._cell = stream_cell(
                placement_in_scope(), np.asarray(given).astype(np.uint32), "tf.random.Generator"
            )
        self._state_var = StreamState(self._cell)  # by TensorFlow's name

    @classmethod
    def from_seed(cls, seed: Any, alg: Any = None) -> Generator:
        """Returns the generator that a number, or several, determine."""
        numbers = np.atleast_1d(np.asarray(seed)).astype(np.uint64)
        return cls(state=np.array([np.bitwise_xor.reduce(numbers) & 0xFFFFFFFF, 0], np.uint32))

    @classmethod
    def from_non_deterministic_state(cls, alg: Any = None) -> Generator:
        """Returns a generator with an unpredictable seed."""
        return cls(state=np.array([secrets.randbits(32), 0], np.uint32))

    @classmethod
    def from_state(cls, state: Any, alg: Any = None) -> Generator:
        return cls(state=state)

    @classmethod
    def from_key_counter(cls, key: Any, counter: Any, alg: Any = None) -> Generator:
        first = np.atleast_1d(np.asarray(counter)).astype(np.uint64)[0]
        return cls(state=np.array([np.uint64(key) & 0xFFFFFFFF, first & 0xFFFFFFFF], np.uint32))

    @property
    def state(self) -> jax.Array:
        """The seed and the counter; on a replica, its own."""
        lift = current_lift()
        if lift is not None:
            self._move_to(lift.placement)
            return lift.read(self._cell)
        value = self._cell.read()
        assert value is not None
        return value

    @property
    def key(self) -> jax.Array:
        """The seed."""
        return self.state[0]

    @property
    def algorithm(self) -> str:
        return "threefry"

    def reset(self, state: Any) -> None:
        """Goes to `state`."""
        self._assign(convert_to_tensor(state).astype(jnp.uint32))

    def reset_from_seed(self, seed: int) -> None:
        """Goes to where `from_seed(seed)` starts."""
        self._assign(jnp.array([int(seed) & 0xFFFFFFFF, 0], jnp.uint32))

    def reset_from_key_counter(self, key: int, counter: int) -> None:
        self._assign(jnp.array([int(key) & 0xFFFFFFFF, int(counter) & 0xFFFFFFFF], jnp.uint32))

    def skip(self, delta: Any) -> jax.Array:
        """Leaves out `delta` draws; returns the state before."""
        state = self.state
        step = convert_to_tensor(delta).astype(jnp.uint32)
        self._assign(state + jnp.stack([jnp.zeros((), jnp.uint32), step]))
        return state

    def _assign(self, state: jax.Array) -> None:
        lift = current_lift()
        if lift is not None:
            self._move_to(lift.placement)
            lift.assign(self._cell, state)
        else:
            self._cell.assign(state)

    def _move_to(self, placement: Placement) -> None:
        """Moves a state of one copy to the replicas of `placement`, if there are several."""
        if not self._cell.is_alone or placement.num_replicas == 1:
            return
        with outside_the_program():
            moved = stream_cell(placement, self._cell.numpy(), self._cell.name)
        self._cell.discard()
        self._cell = self._state_var.cell = moved

    def _next_key(self) -> jax.Array:
        state = self.skip(1)
        return jax.random.fold_in(jax.random.key(state[0]), state[1])

    def make_seeds(self, count: int = 1) -> jax.Array:
        """Returns seeds for the stateless functions, as the columns of a matrix."""
        return jax.random.bits(self._next_key(), (2, count), jnp.uint32).astype(
            tensor_dtype(dtypes.int64)
        )

    def split(self, count: int = 1) -> list[Generator]:
        """Returns generators that do not overlap with this, nor with each other."""
        seeds = np.asarray(jax.random.bits(self._next_key(), (count,), jnp.uint32))
        return [Generator.from_seed(int(seed)) for seed in seeds]

    def normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = dtypes.float32,
        name: str | None = None,
    ) -> jax.Array:
        return draw_normal(self._next_key(), shape, mean, stddev, dtype)

    def truncated_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = dtypes.float32,
        name: str | None = None,
    ) -> jax.Array:
        return draw_truncated_normal(self._next_key(), shape, mean, stddev, dtype)

    def uniform(
        self,
        shape: Any,
        minval: Any = 0,
        maxval: Any = None,
        dtype: Any = dtypes.float32,
        name: str | None = None,
    ) -> jax.Array:
        return draw_uniform(self._next_key(), shape, minval, maxval, dtype)

    def uniform_full_int(
        self, shape: Any, dtype: Any = dtypes.uint64, name: str | None = None
    ) -> jax.Array:
        """Returns integers from all that the dtype has."""
        width = 8 * dtypes.named(dtype).itemsize
        bits = jax.random.bits(self._next_key(), sizes(shape), np.dtype(f"uint{width}"))
        return bits.astype(tensor_dtype(dtype))

    def binomial(
        self,
        shape: Any,
        counts: Any,
        probs: Any,
        dtype: Any = dtypes.int32,
        name: str | None = None,
    ) -> jax.Array:
        counts, probs = convert_to_tensor(counts), convert_to_tensor(probs)
        key = self._next_key()
        drawn = jax.random.binomial(key, counts.astype(probs.dtype), probs, sizes(shape))
        return drawn.astype(tensor_dtype(dtype))

    def __repr__(self) -> str:
        return f"<unison.tf.random.Generator on {self._cell.placement}>"


_global_generator: Generator | None = None


def get_global_generator() -> Generator:
    """Returns the process' generator, created at first use.

    TF: `tf.random.get_global_generator`.
    """
    global _global_generator
    if _global_generator is None:
        _global_generator = Generator.from_non_deterministic_state()
    return _global_generator


def set_global_generator(generator: Generator) -> None:
    """TF: `tf.random.set_global_generator`."""
    global _global_generator
    _global_generator = generator
