"""A function of one signature as a portable program, with the variables that it uses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

# Given a jax.ShapeDtypeStruct, JAX would trace a 64-bit argument as one of 32 bits.
from jax.core import ShapedArray

from unison.cells import Cell
from unison.conversion import called
from unison.lifting import Lift
from unison.program.control_flow import converted_if_needed
from unison.program.tracing import called_on
from unison.runtime.placement import REPLICA_AXIS
from unison.saving.exported import PLATFORMS, read_exported
from unison.saving.module_decoder import ModuleDecoder
from unison.saving.specs import ArraySpec, arrays_for, filled
from unison.storage.decoding import decoding
from unison.strategies.default import default_strategy

logger = logging.getLogger("unison")


@dataclasses.dataclass
class SavedProgram:
    """A program with the variables that it uses.

    Attributes:
        data: The program, as `jax.export` writes it.
        data_for_none: The same for an empty batch, for which `jax.export` needs a separate
            program; None if there is none.
        inputs: `(args, kwargs)` with an `ArraySpec` for every array.
        outputs: The structure of the result, with an `ArraySpec` for every array.
        variables: The variables whose values the program gets.
        assigned: The variables that it assigns, in the order of its last results.
    """

    data: bytes
    data_for_none: bytes | None
    inputs: Any
    outputs: Any
    variables: list[Any]
    assigned: list[Any]

    def __post_init__(self) -> None:
        self._exported: dict[bool, export.Exported] = {}
        self._calls: dict[bool, Callable[..., Any]] = {}

    def check(self, where: str, decoder: ModuleDecoder) -> None:
        """Checks that the program could have been saved, before it is compiled.

        Args:
            where: Its origin, for messages.
            decoder: Decodes its modules first, with limits of time and memory.

        Raises:
            DataLossError: It is corrupt, or has other arguments and results.
            InvalidArgumentError: It calls what no program from a file may call.
        """
        for is_none, data in ((False, self.data), (True, self.data_for_none)):
            if data is not None:
                self._exported[is_none] = read_exported(data, where, decoder)
                with decoding(where):
                    self._check_signature(self._exported[is_none])

    def _check_signature(self, exported: export.Exported) -> None:
        specs = [leaf for leaf in jax.tree.leaves(self.inputs) if isinstance(leaf, ArraySpec)]
        results = jax.tree.leaves(self.outputs)
        trees = (
            jax.tree.structure((([0] * len(self.variables), [0] * len(specs)), {})),
            jax.tree.structure(([0] * len(results), [0] * len(self.assigned))),
        )
        if (exported.in_tree, exported.out_tree) != trees:
            raise ValueError("its arguments or results are others than its description says")

    @property
    def structured_input_signature(self) -> Any:
        """`inputs`, by their names in functions of one signature."""
        return self.inputs

    def python_function(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program on arguments of the structure of `inputs`."""
        return self.run(arrays_for(self.inputs, (args, kwargs)))

    def run(self, arrays: Sequence[Any]) -> Any:
        """Runs the program on the arrays of `inputs`, in order."""
        values = [variable.value() for variable in self.variables]
        results, new_values = self._call_for(arrays)(values, list(arrays))
        for variable, value in zip(self.assigned, new_values, strict=True):
            variable.assign(value)
        return jax.tree.unflatten(jax.tree.structure(self.outputs), results)

    def exported(self, is_none: bool) -> export.Exported | None:
        """Returns the program for a batch, or for one without examples; None if it has none."""
        data = self.data_for_none if is_none else self.data
        if data is not None and is_none not in self._exported:
            self._exported[is_none] = export.deserialize(bytearray(data))
        return self._exported.get(is_none)

    def _call_for(self, arrays: Sequence[Any]) -> Callable[..., Any]:
        specs = (leaf for leaf in jax.tree.leaves(self.inputs) if isinstance(leaf, ArraySpec))
        is_none = any(
            spec.is_batch and not array.shape[0] for spec, array in zip(specs, arrays, strict=True)
        )
        if is_none not in self._calls:
            exported = self.exported(is_none)
            if exported is None:
                raise ValueError("The function was saved for batches of one example or more.")
            self._calls[is_none] = jax.jit(exported.call)
        return self._calls[is_none]


def export_program(
    function: Callable[..., Any], inputs: tuple[tuple, dict[str, Any]], variables: Iterable[Any]
) -> SavedProgram:
    """Exports `function` for one signature.

    Args:
        function: A function of arrays, which may read and assign variables.
        inputs: `(args, kwargs)` with an `ArraySpec` for every array.
        variables: The variables that it may use.

    Raises:
        AssertionError: It uses another variable.
        ValueError: It cannot be exported, as one that takes text.
    """
    by_cell = {variable.cell: variable for variable in variables}
    specs = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, ArraySpec)]
    program = _Traceable(function, inputs)
    name = getattr(function, "__qualname__", repr(function))
    for spec in specs:
        if spec.dtype.hasobject:
            raise ValueError(
                f"Function {name} cannot be saved for {spec}: expected arrays of numbers. Text is "
                "computed on the host, and is no part of the program that is saved. Save the "
                "function of the numbers that are made of the text (of tokens, say), and make "
                "those outside of it; or save a Keras model with its layers for text, by "
                "model.save('model.keras')."
            )
    failure: Exception | None = None
    for arguments in _symbolic(specs):
        try:
            return converted_if_needed(
                functools.partial(_exported, program, inputs, by_cell, arguments)
            )
        except (TypeError, ValueError, jax.errors.InconclusiveDimensionOperation) as error:
            failure = failure or error
    raise ValueError(
        f"Function {name} cannot be saved for the arguments {specs}: {failure}. Where a size is "
        "None, the program must work for any size: if that is what fails, give the size."
    ) from failure


def _exported(
    program: _Traceable,
    inputs: tuple[tuple, dict[str, Any]],
    by_cell: dict[Cell, Any],
    arguments: Sequence[Any],
) -> SavedProgram:
    """Exports a program for arguments with sizes that may be symbols."""
    everything = list(by_cell)
    jax.jit(program.of(everything)).trace(_avals(everything), arguments)
    touched = [cell for cell in by_cell if cell in program.touched]
    data = _serialized(program.of(touched), _avals(touched), arguments)
    outputs = program.outputs
    specs = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, ArraySpec)]
    return SavedProgram(
        data,
        _for_none(program.of(touched), _avals(touched), specs, arguments),
        inputs,
        outputs,
        [by_cell[cell] for cell in touched],
        [by_cell[cell] for cell in program.written],
    )


class _Traceable:
    """A function of variables' values and arrays, given one that reads variables.

    Tracing sets the attributes.
    """

    def __init__(self, function: Callable[..., Any], inputs: Any):
        self._function = function
        self._inputs = inputs
        self.touched: set[Cell] = set()
        self.written: list[Cell] = []
        self.outputs: Any = None

    def of(self, cells: Sequence[Cell]) -> Callable[..., Any]:
        """Returns the function of the values of `cells`."""

        def on_one_replica(values: list[jax.Array], arrays: list[jax.Array]) -> Any:
            lift = _OneReplica(dict(zip(cells, values, strict=True)))
            args, kwargs = filled(self._inputs, arrays)
            with lift.equal_writes():
                result, new_values = called_on(
                    lift,
                    lambda: called(self._function, *args, **kwargs),
                    default_strategy().replica_context(),
                    jnp.asarray,
                )
            results = jax.tree.leaves(result)
            self.touched = lift.touched
            self.written = list(new_values)
            self.outputs = jax.tree.map(_spec_of_result, result)
            return results, list(new_values.values())

        def program(values: list[jax.Array], arrays: list[jax.Array]) -> Any:
            # An axis of one replica, for the collectives in the function.
            mapped = jax.vmap(on_one_replica, in_axes=None, axis_name=REPLICA_AXIS, axis_size=1)
            return jax.tree.map(lambda leaf: leaf[0], mapped(values, arrays))

        return program


class _OneReplica(Lift):
    """The values of the variables in a program of one replica, wherever their copies are."""

    def __init__(self, values: dict[Cell, jax.Array]):
        super().__init__(default_strategy().placement, values)
        self.touched: set[Cell] = set()

    def own_copy(self, cell: Cell) -> jax.Array:
        self.touched.add(cell)
        if cell not in self._values:
            raise AssertionError(
                f"The function uses variable {cell.name!r}, which cannot be reached from the "
                "object that is saved. Keep the variable in an attribute of it."
            )
        return self._values[cell]

    def _check_writable(self, cell: Cell) -> None:
        self.own_copy(cell)


def _serialized(program: Callable[..., Any], values: Any, arrays: Any) -> bytes:
    """Returns the exported program, with its gradient where it has one."""
    exported = export.export(jax.jit(program), platforms=PLATFORMS)(values, arrays)
    try:
        return bytes(exported.serialize(vjp_order=1))
    except (TypeError, ValueError, NotImplementedError) as error:
        logger.info("A function is saved without its gradient: %s", error)
        return bytes(exported.serialize())


def _for_none(
    program: Callable[..., Any], values: Any, specs: Sequence[ArraySpec], arguments: Sequence[Any]
) -> bytes | None:
    """Returns the program for a batch without examples, None if the function fails for it."""
    if not any(spec.is_batch for spec in specs):
        return None
    empty = [
        ShapedArray((0, *argument.shape[1:]), argument.dtype) if spec.is_batch else argument
        for spec, argument in zip(specs, arguments, strict=True)
    ]
    try:
        return _serialized(program, values, empty)
    except (TypeError, ValueError, jax.errors.InconclusiveDimensionOperation) as error:
        logger.info("A function is saved for batches of one example or more: %s", error)
        return None


def _symbolic(specs: Sequence[ArraySpec]) -> Iterator[list[ShapedArray]]:
    """Yields the arguments with symbols for the unknown sizes.

    First with a symbol for each of them, then with one for all first axes, which is the batch.
    """
    for first_axes_agree in (False, True):
        numbers = itertools.count()
        names = [
            [
                str(size)
                if size is not None
                else "batch"
                if first_axes_agree and axis == 0
                else f"size{next(numbers)}"
                for axis, size in enumerate(spec.shape)
            ]
            for spec in specs
        ]
        scope = export.SymbolicScope()
        yield [
            ShapedArray(export.symbolic_shape(",".join(sizes), scope=scope), spec.dtype)
            for sizes, spec in zip(names, specs, strict=True)
        ]


def _avals(cells: Iterable[Cell]) -> list[ShapedArray]:
    return [ShapedArray(cell.aval.shape, cell.aval.dtype) for cell in cells]


def _spec_of_result(result: jax.Array) -> ArraySpec:
    sizes = tuple(size if isinstance(size, int) else None for size in result.shape)
    return ArraySpec(sizes, result.dtype)
