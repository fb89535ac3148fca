"""Calling saved programs like the original functions: `SavedFunction`, `SavedSignature`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from unison.saving.program import SavedProgram
from unison.saving.specs import ArraySpec, DoesNotFitError, arrays_for, fitted, shown


class SavedFunction:
    """A saved function, for its saved signatures.

    Args:
        name: Its name.
        parameters: Its original parameters.
        programs: One for each signature.
        has_input_signature: Whether the function itself had an input signature.
    """

    def __init__(
        self,
        name: str,
        parameters: inspect.Signature,
        programs: Sequence[SavedProgram],
        has_input_signature: bool,
    ):
        self.__name__ = name
        self.parameters = parameters
        self.programs = list(programs)
        self.has_input_signature = has_input_signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the program that was saved for such arguments.

        Raises:
            TypeError: The arguments do not fit the parameters, or the input signature.
            ValueError: The function was not saved for arguments of these shapes, dtypes and values.
        """
        program, arrays = self.program_for(args, kwargs)
        return program.run(arrays)

    def program_for(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        as_array: Callable[[Any, ArraySpec], Any] = fitted,
    ) -> tuple[SavedProgram, list[Any]]:
        """Returns the program that was saved for such arguments, and their arrays.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.
            as_array: See `arrays_for`.

        Raises:
            TypeError, ValueError: See `__call__`.
        """
        bound = self.parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        for program in self.programs:
            try:
                return program, arrays_for(program.inputs, (bound.args, bound.kwargs), as_array)
            except DoesNotFitError:
                continue
        raise (TypeError if self.has_input_signature else ValueError)(self._explanation(bound))

    @property
    def input_signature(self) -> tuple | None:
        """The specs of the arguments, if the function itself had an input signature."""
        return self.programs[0].inputs[0] if self.has_input_signature else None

    @property
    def concrete_functions(self) -> list[SavedProgram]:
        """The programs, as functions of one signature each."""
        return self.programs

    def _explanation(self, bound: inspect.BoundArguments) -> str:
        if not self.programs:
            return (
                f"{self.__name__} was saved without a signature: it was never called, and has no "
                "input_signature. Give it one, or call it before it is saved."
            )
        options = "\n".join(f"  {shown(program.inputs)}" for program in self.programs)
        return (
            f"{self.__name__} was not saved for these arguments. Received:\n"
            f"  {shown((bound.args, bound.kwargs))}\nIt was saved for:\n{options}"
        )

    def __repr__(self) -> str:
        return f"<saved function {self.__name__}{self.parameters}>"


class SavedSignature:
    """A signature of a saved model: named arrays in, a dictionary of arrays out.

    Args:
        name: Its key.
        program: A program of keyword arguments that returns a dictionary.

    TF: the values of `tf.saved_model.load(...).signatures`.
    """

    def __init__(self, name: str, program: SavedProgram):
        self.__name__ = name
        self.program = program

    @property
    def programs(self) -> list[SavedProgram]:
        """Its program, as functions have several."""
        return [self.program]

    @property
    def structured_input_signature(self) -> tuple[tuple, dict[str, ArraySpec]]:
        """`((), specs)` with the spec of every argument."""
        return self.program.inputs

    @property
    def structured_outputs(self) -> dict[str, ArraySpec]:
        """The spec of every result."""
        return self.program.outputs

    @property
    def variables(self) -> tuple[Any, ...]:
        """The variables that it uses."""
        return tuple(self.program.variables)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Calls the program.

        Args:
            args: The arrays, in the order of their names.
            kwargs: The arrays, by name.

        Raises:
            TypeError: An array is missing or unknown, or has a wrong shape or dtype.
        """
        specs = self.structured_input_signature[1]
        given = dict(zip(specs, args, strict=False)) | kwargs
        if given.keys() != specs.keys() or len(args) > len(specs) or len(given) < len(args):
            raise TypeError(
                f"Signature {self.__name__!r} takes the arrays {list(specs)}. Received: "
                f"{len(args)} arrays, and {list(kwargs)} by name"
            )
        try:
            return self.program.run(arrays_for(self.program.inputs, ((), given)))
        except DoesNotFitError as error:
            raise TypeError(f"Signature {self.__name__!r} takes {shown(specs)}. {error}") from None

    def __repr__(self) -> str:
        return f"<signature {self.__name__!r}: {shown(self.program.inputs)}>"
