"""`SavedObject`: an object with its parts, variables and functions, to be written in a format."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from unison.saving.calling import SavedFunction, SavedSignature
from unison.saving.functions import (
    as_signature,
    concrete_functions_of,
    functions_of,
    input_signature_of,
    inputs_of,
    is_concrete,
    parameters_of,
)
from unison.saving.program import SavedProgram, export_program
from unison.train.graph import describe, is_variable, parts_of, reachable


class SavedObject:
    """An object to be written: its parts, variables, functions and signatures.

    Args:
        root: The object.

    Attributes:
        objects: The objects that are reachable from it; the first one is `root`.
        nodes: The references of each object to its parts.
        arrays: The values of the variables, by the keys in the nodes.
        functions: The functions of each object, by the object's index and by name.
        signatures: The signatures, by name.
    """

    def __init__(self, root: Any):
        self.nodes, self.arrays = describe(root, parts_of)
        self.objects = [owner for _, owner in reachable(root, parts_of)]
        self.functions: dict[int, dict[str, SavedFunction | SavedSignature]] = {}
        self.signatures: dict[str, SavedSignature] = {}
        self._variables = [owner for owner in self.objects if is_variable(owner)]
        #: Functions that write additional files into the folder.
        self.writers: list[Callable[[str], None]] = []

    def add_own_functions(self) -> None:
        """Adds the functions in the attributes of all objects."""
        for number, owner in enumerate(self.objects):
            if not is_variable(owner):
                for name, function in functions_of(owner):
                    self.functions.setdefault(number, {})[name] = self._saved(name, function)

    def add_function(self, name: str, function: Callable[..., Any], inputs: Any) -> None:
        """Adds a function of the root for one signature.

        Args:
            name: Its attribute in the loaded object.
            function: The function.
            inputs: Its `(args, kwargs)`, with an `ArraySpec` for every array.
        """
        programs = [export_program(function, inputs, self._variables)]
        saved = SavedFunction(name, inspect.signature(function), programs, True)
        self.functions.setdefault(0, {})[name] = saved

    def add_signature(self, name: str, function: Callable[..., Any], inputs: Any) -> None:
        """Adds a function to be called by name with named arrays; see `add_function`."""
        program = export_program(*as_signature(function, inputs), self._variables)
        self.signatures[name] = SavedSignature(name, program)

    def add_known_signature(self, name: str, function: Any) -> None:
        """Adds a function that has one signature, or a signature that was loaded."""
        if isinstance(function, SavedSignature):
            self.signatures[name] = SavedSignature(name, function.program)
        else:
            (concrete,) = concrete_functions_of(function)
            self.add_signature(name, concrete.python_function, inputs_of(concrete))

    def also_write(self, write: Callable[[str], None]) -> None:
        """Adds a function that writes additional files into the folder, given its path."""
        self.writers.append(write)

    def programs(self) -> list[SavedProgram]:
        """Returns the programs of all functions and signatures, each once."""
        functions = [f for named in self.functions.values() for f in named.values()]
        programs = [p for each in [*functions, *self.signatures.values()] for p in each.programs]
        return list({id(program): program for program in programs}.values())

    def _saved(self, name: str, function: Any) -> SavedFunction | SavedSignature:
        if isinstance(function, SavedSignature | SavedFunction):
            return function
        return SavedFunction(
            getattr(function.python_function, "__name__", name),
            parameters_of(function),
            [
                export_program(concrete.python_function, inputs_of(concrete), self._variables)
                for concrete in concrete_functions_of(function)
            ],
            is_concrete(function) or input_signature_of(function) is not None,
        )
