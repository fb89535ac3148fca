"""The replica program: one XLA program that runs a function on all replicas.

`compile_replicas` compiles a function of one replica's values into one program over the placement's
mesh. `ProgramCache` implements `strategy.run`: it finds the variables that the function uses,
compiles once per signature, and runs the program.
"""

from unison.program.arguments import Arguments, Static, describe_for_function
from unison.program.cache import ProgramCache
from unison.program.central_storage import HomeUpdate
from unison.program.compiling import (
    MIRRORED,
    PER_REPLICA,
    Executable,
    cell_spec,
    compile_replicas,
)
from unison.program.control_flow import ControlFlowError
from unison.program.tracing import tracing_contexts

__all__ = [
    "MIRRORED",
    "PER_REPLICA",
    "Arguments",
    "ControlFlowError",
    "Executable",
    "HomeUpdate",
    "ProgramCache",
    "Static",
    "cell_spec",
    "compile_replicas",
    "describe_for_function",
    "tracing_contexts",
]
