"""Keys of random numbers: those of the process's stream, and those that a seed determines.

In a compiled program the stream is a variable: every call of the program draws new numbers, and
each replica draws its own. Without `set_seed` the stream starts from 0, so that the workers of a
cluster agree.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unison.captured import note_captured
from unison.cells import Cell, VariableAggregation, VariableSynchronization
from unison.eager_fallback import needs_python
from unison.errors import InvalidArgumentError
from unison.lifting import current_lift, outside_the_program
from unison.runtime.placement import Placement
from unison.tf.tensors import convert_to_tensor, start_devices

#: Sets the streams of programs apart from the one around them.
_IN_PROGRAMS = 0x70726F67

_lock = threading.Lock()
_seed = 0
_draws = 0
_cells: dict[Placement, Cell] = {}


def set_seed(seed: int | None) -> None:
    """Seeds the stream, which restarts, as does that of compiled programs.

    Args:
        seed: None: the stream of a program that sets no seed.

    TF: `tf.random.set_seed`.
    """
    global _seed, _draws
    needs_python("tf.random.set_seed")
    with _lock:
        _seed, _draws = int(seed or 0), 0
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
        note_captured("the stream of tf.random")
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


def key_of(seed: Any) -> jax.Array:
    """Returns the key that the two integers of `seed` determine.

    Raises:
        InvalidArgumentError: `seed` is not two integers.
    """
    seed = convert_to_tensor(seed)
    if seed.shape != (2,):
        raise InvalidArgumentError(message=f"seed must have the shape (2,). Received: {seed.shape}")
    return jax.random.fold_in(jax.random.key(seed[0]), seed[1])
