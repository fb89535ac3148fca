"""Programs of `jax.export`, which are checked before they are compiled.

`jax.export.deserialize` requires trusted bytes: they may call any function that is
registered with XLA, including those that call an address given as a number. A saved model is data.
So only programs as our saving writes them are accepted: for one device, of the
operations of StableHLO, without effects, with no other custom calls than those that `jax.export`
itself writes.

A program can still use as much time and memory as its operations require.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from jax import export

from unison.errors import InvalidArgumentError
from unison.runtime.private_jax import (
    module_of_exported,
    modules_of_exported,
    tables_of_exported,
    targets_of_stable_calls,
)
from unison.saving.module_decoder import ModuleDecoder
from unison.storage.decoding import decoding, whole_number

#: The platforms of saved programs.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

#: Stable calls that contain a kernel or a graph of their own, which would be run: our saving writes
#: for all platforms, and none of these exists on all of them.
_CARRY_CODE = {"tf.call_tf_function", "tpu_custom_call", "mosaic_gpu_v2"}

#: The dialects of JAX's lowering; without the operations that access the host or other devices.
_DIALECTS = ("builtin", "chlo", "func", "sdy", "stablehlo")
_REFUSED = re.compile(
    r"stablehlo\.(infeed|outfeed|send|recv|all_gather|all_reduce|all_to_all|collective_\w+"
    r"|reduce_scatter|partition_id|replica_id)"
)

#: The program, and its gradient.
_MOST_TABLES = 2

#: In a table: the arguments and results, the nodes around them, and the text of a size.
_MOST_VALUES = 1 << 16
_LONGEST_SIZE = 1000
#: JAX multiplies a size by itself as often as its exponent says.
_SIZE = re.compile(r"[\w\s(),*+-]*(\^\d{1,2}(?!\d)[\w\s(),*+-]*)*")

#: The kinds of nodes: a leaf, None, a tuple, a list, a dictionary. A program's own classes are
#: decoded by its own functions.
_KINDS_OF_NODES = range(5)

#: The maximum number of bytes of constants beyond those in the file.
_CONSTANTS = 1 << 26

_REMEDY = "Save the model again."


def read_exported(data: bytes, where: str, decoder: ModuleDecoder | None = None) -> export.Exported:
    """Returns an exported program, if our saving could have written it.

    Args:
        data: The result of the serialization by `jax.export`.
        where: Its origin, for messages.
        decoder: Decodes its modules first, with limits of time and memory; without it, the bytes
            must be from this job.

    Raises:
        DataLossError: It is corrupt.
        InvalidArgumentError: It calls what `jax.export` does not guarantee, accesses the host,
            or is for several devices.
    """
    with decoding(where, _REMEDY):
        _check_tables(data)
        if decoder is not None:
            decoder.check(modules_of_exported(data))
        exported = export.deserialize(bytearray(data))
        program: export.Exported | None = exported
        while program is not None:
            _check(program, len(data), where)
            program = program.vjp() if program.has_vjp() else None
        return exported


def _check_tables(data: bytes) -> None:
    """Checks that the time of decoding is proportional to the data. Raises: ValueError."""
    for number, table in enumerate(tables_of_exported(data)):
        if number == _MOST_TABLES:
            raise ValueError("a program has more than one derivative")
        for length in (
            table.InAvalsLength(),
            table.OutAvalsLength(),
            table.UniqueAvalsLength(),
            table.UniqueAbstractMeshesLength(),
            table.UniqueNamedShardingsLength(),
            table.InAvalsIdxsLength(),
            table.OutAvalsIdxsLength(),
            table.InShardingsLength(),
            table.OutShardingsLength(),
            table.OrderedEffectsLength(),
            table.UnorderedEffectsLength(),
            table.DisabledChecksLength(),
            table.PlatformsLength(),
        ):
            whole_number(length, most=_MOST_VALUES)
        for tree in (table.InTree(), table.OutTree()):
            _check_tree(tree)
        for aval in _avals_of(table):
            _check_sizes(aval)


def _check_tree(tree: Any) -> None:
    waiting, count = [tree], 0
    while waiting:
        node = waiting.pop()
        count += 1 + whole_number(node.ChildrenLength(), most=_MOST_VALUES)
        if count > _MOST_VALUES or node.Kind() not in _KINDS_OF_NODES:
            raise ValueError("the arguments or results of a program are not lists and dictionaries")
        waiting += [node.Children(index) for index in range(node.ChildrenLength())]


def _avals_of(table: Any) -> Iterator[Any]:
    yield from map(table.InAvals, range(table.InAvalsLength()))
    yield from map(table.OutAvals, range(table.OutAvalsLength()))
    yield from map(table.UniqueAvals, range(table.UniqueAvalsLength()))


def _check_sizes(aval: Any) -> None:
    for axis in range(whole_number(aval.ShapeLength(), most=64)):
        size = aval.Shape(axis).decode()
        if len(size) > _LONGEST_SIZE or not _SIZE.fullmatch(size):
            raise ValueError(f"expected the size of an axis, received {size[:80]!r}")


def _check(program: export.Exported, size: int, where: str) -> None:
    allowed = targets_of_stable_calls() - _CARRY_CODE
    constants = 0
    with module_of_exported(program) as module:
        names = [each.attributes["sym_name"].value for each in module.body if _is_function(each)]
        if "main" not in names:
            raise ValueError(f"expected a function main, received {names[:8]}")
        for operation in _operations_in(module.operation):
            name = operation.name
            if name.split(".")[0] not in _DIALECTS or _REFUSED.fullmatch(name):
                raise _refused(where, f"has the operation {name}")
            if name == "stablehlo.custom_call":
                target = operation.attributes["call_target_name"].value
                if target not in allowed:
                    raise _refused(where, f"calls {target!r}")
            elif name == "stablehlo.constant":
                constants += _bytes_of(operation.results[0].type)
                if constants > size + _CONSTANTS:
                    raise ValueError(f"its constants take {constants} bytes, and it has {size}")
    if program.nr_devices != 1 or not {*program.platforms} <= {*PLATFORMS}:
        raise _refused(where, f"is for {program.nr_devices} devices, {program.platforms}")
    effects = [*program.ordered_effects, *program.unordered_effects]
    if effects or program.disabled_safety_checks:
        raise _refused(where, f"has the effects {effects}, or goes without checks of JAX")


def _is_function(operation: Any) -> bool:
    return bool(operation.operation.name == "func.func")


def _operations_in(operation: Any) -> Iterator[Any]:
    """Yields an operation and all nested ones, without recursion."""
    waiting = [operation]
    while waiting:
        found = waiting.pop()
        yield found
        for region in found.regions:
            for block in region:
                waiting += [inner.operation for inner in block]


def _bytes_of(kind: Any) -> int:
    bits = getattr(kind.element_type, "width", 128)
    return math.prod(kind.shape) * bits // 8


def _refused(where: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        message=f"{where} holds a program that {what}, and is not run. Expected StableHLO for one "
        "device, with no other custom calls than those that jax.export guarantees. Save the model "
        "again from its source, without callbacks and kernels of its own."
    )
