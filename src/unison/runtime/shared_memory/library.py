"""The compiled part: `exchange.cc`, which is built when the package is installed."""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

logger = logging.getLogger("unison")

#: The name under which XLA knows the operation.
TARGET = "unison_exchange"

_FILE = Path(__file__).with_name("_exchange.so")


class Kind(enum.IntEnum):
    """What an operation does; see `Kind` in `exchange.cc`."""

    SUM = 0
    MAX = 1
    MIN = 2
    GATHER = 3
    SUM_AND_SCATTER = 4
    PERMUTE = 5
    ALL_TO_ALL = 6
    PASS = 7


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled part; None where it was not built, or cannot be used."""
    if not _FILE.exists():
        logger.debug("Processes of a machine talk by sockets: %s was not built", _FILE)
        return None
    try:
        return _loaded()
    except Exception as error:  # whatever a file makes of itself that was built for something else
        logger.warning(
            "Processes of a machine talk by sockets, and not through shared memory, because %s "
            "cannot be used: %s. Install unison again.",
            _FILE,
            error,
        )
        return None


def _loaded() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(_FILE))
    loaded.unison_exchange_source.restype = ctypes.c_char_p
    digest = hashlib.sha256(_FILE.with_name("exchange.cc").read_bytes()).hexdigest()
    if loaded.unison_exchange_source() != digest.encode():
        raise RuntimeError("it was built from another exchange.cc")
    loaded.unison_exchange_bytes.restype = ctypes.c_size_t
    loaded.unison_exchange_bytes.argtypes = [ctypes.c_uint32, ctypes.c_size_t]
    loaded.unison_exchange_join.restype = ctypes.c_int64
    loaded.unison_exchange_join.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_size_t,
        ctypes.c_uint32,
        ctypes.c_double,
        ctypes.c_char_p,
    ]
    loaded.unison_exchange_abort.restype = None
    loaded.unison_exchange_abort.argtypes = [ctypes.c_int64, ctypes.c_char_p]
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(loaded.unison_exchange), platform="cpu")
    return loaded


def exchange(
    group: int,
    kind: Kind,
    words: str,
    ticket: jax.Array,
    operands: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
    in_place: Sequence[bool],
    senders: Sequence[int] = (),
) -> tuple[jax.Array, list[jax.Array]]:
    """Performs an operation, in a program that is being traced.

    Args:
        group: The number of the group.
        kind: What it does.
        words: What it is called in messages. It must be the same on all replicas.
        ticket: This replica's rank in the group and the number of its operations so far.
        operands: Arrays of one dtype; for `GATHER`, `SUM_AND_SCATTER` and `ALL_TO_ALL` one, whose
            first axis is divided into blocks.
        shapes: The shapes of the results.
        in_place: For every operand, whether the result may be written over it. Where somebody
            needs it afterwards, XLA makes a copy before.
        senders: For `PERMUTE`, the rank from which each rank receives; -1 for nobody.

    Returns:
        The ticket of the next operation, and the results.
    """
    results = [
        jax.ShapeDtypeStruct(shape, operand.dtype)
        for shape, operand in zip(shapes, operands, strict=True)
    ]
    call = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(ticket.shape, ticket.dtype), *results],
        input_output_aliases={i: i for i, may in enumerate([True, *in_place]) if may},
    )
    attributes: dict[str, Any] = {
        "group": np.int64(group),
        "kind": np.int64(kind),
        "words": words,
        "senders": np.asarray(senders, np.int64),
    }
    ticket, *outputs = call(ticket, *operands, **attributes)
    return ticket, outputs
