"""The replica program: one XLA program that runs a function on all replicas.

`compile_replicas` is the mechanism: a function of one replica's values becomes one compiled
program over the placement's mesh. `ProgramCache` is what `strategy.run` uses: it finds the
variables that the function touches, compiles once a signature, and runs.
"""

from unison.program.cache import ProgramCache, tracing_contexts
from unison.program.compiling import MIRRORED, PER_REPLICA, cell_spec, compile_replicas

__all__ = [
    "MIRRORED",
    "PER_REPLICA",
    "ProgramCache",
    "cell_spec",
    "compile_replicas",
    "tracing_contexts",
]
