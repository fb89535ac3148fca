"""Collective operations between replicas on one machine, through memory.

Between CPU processes, XLA communicates through sockets, even on one machine. Here they copy data
through a few slots of shared memory instead, which is several times as fast (`docs/workers.md`):
`share_memory` sets it up, and `SharedMemory.program` makes a program's collective operations use
it. The replicas of one process read and write each other's buffers (`between_buffers`).
"""

from unison.runtime.shared_memory.group import SharedMemory, share_memory, shared_memory_of
from unison.runtime.shared_memory.in_process import (
    are_in_this_process,
    between_buffers,
    fail_program,
    new_program,
    recover_program,
)

__all__ = [
    "SharedMemory",
    "are_in_this_process",
    "between_buffers",
    "fail_program",
    "new_program",
    "recover_program",
    "share_memory",
    "shared_memory_of",
]
