"""The replica program: one XLA program that runs a function on all replicas.

`compile_replicas` is the mechanism: a function of one replica's values becomes one compiled
program over the placement's mesh. `ProgramCache` is what `strategy.run` uses: it finds the
variables that the function touches, compiles once a signature, and runs.
"""

from unison.program.arguments import Arguments, Static, describe_for_function
from unison.program.cache import ProgramCache, tracing_contexts
from unison.program.compiling import (
    MIRRORED,
    PER_REPLICA,
    Executable,
    cell_spec,
    compile_replicas,
)
from unison.program.control_flow import ControlFlowError
from unison.program.home_update import HomeUpdate, divide

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
    "divide",
    "tracing_contexts",
]
