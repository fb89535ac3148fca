"""The native extension: `exchange.cc` and its includes, built when the package is installed."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from unison.native import library_or_none, loaded_library
from unison.runtime.cores import available_cores

#: The names of the operations in XLA: between processes, and between the replicas of one.
TARGET, TARGET_IN_PROCESS = "unison_exchange", "unison_exchange_in_process"

#: The bytes that a replica transfers at a time: several chunks of all replicas fit into a core's
#: cache.
CHUNK_BYTES = 2**17

#: The number of polls of a replica before it sleeps, if each has a core: about 50 us; and where the
#: replicas of one process share the cores with the threads that launch their programs.
SPINS, _SPINS_IN_PROCESS = 2000, 100

#: Seconds after which a replica gives up waiting for another one of its process, which shares the
#: cores with it and may be slow.
_SECONDS_IN_PROCESS = 600.0

_FILE = Path(__file__).with_name("_exchange.so")


class Kind(enum.IntEnum):
    """The kind of an operation; see `Kind` in `buffers.h`."""

    SUM = 0
    MAX = 1
    MIN = 2
    GATHER = 3
    SUM_AND_SCATTER = 4
    PERMUTE = 5
    ALL_TO_ALL = 6
    PASS = 7
    BROADCAST = 8
    COMMIT = 9


class Ticket(enum.IntEnum):
    """The fields of a ticket; see `Ticket` in `exchange.cc`."""

    RANK = 0
    OPERATION = 1
    GROUP = 2
    FAILED = 3
    COMMITTED = 4


_NUMBER = ctypes.c_int64
_SIZES = ctypes.POINTER(ctypes.c_size_t)
_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_TICKET = ctypes.POINTER(ctypes.c_uint32)

#: The functions of the native extension: their result and argument types.
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "bytes": (ctypes.c_size_t, [ctypes.c_uint32, ctypes.c_size_t]),
    "join": (
        _NUMBER,
        [
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_size_t,
            ctypes.c_uint32,
            ctypes.c_double,
            ctypes.c_char_p,
        ],
    ),
    "form": (
        _NUMBER,
        [
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_uint32),
            ctypes.c_uint32,
            ctypes.c_uint32,
            ctypes.c_uint32,
            ctypes.POINTER(ctypes.c_int),
            ctypes.c_uint32,
            ctypes.c_size_t,
            ctypes.c_uint32,
            ctypes.c_double,
            ctypes.c_char_p,
        ],
    ),
    "run": (
        ctypes.c_int,
        [
            ctypes.c_int64,
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_int64),
            _TICKET,
            ctypes.c_int,
            ctypes.c_size_t,
            _POINTERS,
            _SIZES,
            _POINTERS,
            _SIZES,
        ],
    ),
    "abort": (None, [_NUMBER, ctypes.c_char_p]),
    "fail": (None, [_NUMBER, ctypes.c_char_p]),
    "recover": (None, [_NUMBER]),
    "close": (None, [_NUMBER]),
    "reason": (ctypes.c_int, [_NUMBER, ctypes.c_char_p, ctypes.c_size_t]),
}


@dataclasses.dataclass(frozen=True)
class InProcess:
    """The replicas of a program that are all in this process.

    Attributes:
        replicas: How many.
        program: The number of the program, if it may fail on one of them; else 0.
    """

    replicas: int
    program: int = 0


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the native extension; None if it was not built, or cannot be used."""
    return library_or_none(
        _FILE, _loaded, "Processes of a machine talk by sockets, and not through shared memory"
    )


def _loaded(file: Path) -> ctypes.CDLL:
    loaded = loaded_library(file)
    needed, offered = _version_of(loaded), _version_of_jaxlib()
    if needed > offered:
        raise RuntimeError(
            f"it was built for version {needed[0]}.{needed[1]} of XLA's FFI, and this jaxlib has "
            f"{offered[0]}.{offered[1]}"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, f"unison_exchange_{name}")
        function.restype = result
        function.argtypes = arguments
    for target in (TARGET, TARGET_IN_PROCESS):
        handler = jax.ffi.pycapsule(getattr(loaded, target))
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return loaded


def _version_of(loaded: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    loaded.unison_exchange_api(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _version_of_jaxlib() -> tuple[int, int]:
    """Returns the version of XLA's FFI in the installed jaxlib, from its headers.

    An operation that was built for a newer one must not be registered: XLA would refuse to start
    the CPU backend at all. An operation built for an older version is compatible.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", header, re.MULTILINE))
    return int(found["MAJOR"]), int(found["MINOR"])


def exchange(
    kind: Kind,
    words: str,
    ticket: jax.Array,
    operands: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
    in_place: Sequence[bool],
    senders: Sequence[int] = (),
    here: InProcess | None = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """Adds an operation to the program that is being traced.

    Args:
        kind: The kind of the operation.
        words: Its description in messages, which must be the same on all replicas.
        ticket: The ticket from this replica's previous operation; see `Ticket`.
        operands: Arrays of one dtype; for `GATHER`, `SUM_AND_SCATTER` and `ALL_TO_ALL` one, whose
            first axis is divided into blocks.
        shapes: The shapes of the results.
        in_place: For every operand, whether the result may overwrite it. If the operand is used
            afterwards, XLA copies it first.
        senders: For `PERMUTE`, the rank from which each rank receives; -1 for none.
        here: The replicas, if all are in this process, and exchange values between their buffers.

    Returns:
        The ticket of the next operation, and the results.
    """
    results = [
        jax.ShapeDtypeStruct(shape, operand.dtype)
        for shape, operand in zip(shapes, operands, strict=True)
    ]
    call = jax.ffi.ffi_call(
        TARGET if here is None else TARGET_IN_PROCESS,
        [jax.ShapeDtypeStruct(ticket.shape, ticket.dtype), *results],
        input_output_aliases={i: i for i, may in enumerate([True, *in_place]) if may},
    )
    attributes: dict[str, Any] = {
        "kind": np.int64(kind),
        "words": words,
        "senders": np.asarray(senders, np.int64),
    }
    if here is not None:
        attributes["program"] = np.int64(here.program)
        attributes["size"] = np.int64(here.replicas)
        attributes["spins"] = np.int64(
            _SPINS_IN_PROCESS if available_cores() >= here.replicas else 0
        )
        attributes["seconds"] = np.float64(_SECONDS_IN_PROCESS)
    ticket, *outputs = call(ticket, *operands, **attributes)
    return ticket, outputs
