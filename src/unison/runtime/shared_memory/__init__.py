"""Collective operations between processes on one machine, through shared memory.

Between CPU processes, XLA communicates through sockets, even on one machine. Here they copy data
through a few slots of shared memory instead, which is several times as fast (`docs/workers.md`):
`share_memory` sets it up, and `SharedMemory.program` makes a program's collective operations use
it.
"""

from unison.runtime.shared_memory.group import SharedMemory, share_memory, shared_memory_of

__all__ = ["SharedMemory", "share_memory", "shared_memory_of"]
