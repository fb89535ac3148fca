"""Collective operations between processes of one machine, through memory that they share.

XLA sends what processes on CPU have to tell each other through sockets, even on one machine. Here
they copy it through a few slots of shared memory instead, several times as fast
(`docs/workers.md`): `share_memory` sets that up, and `SharedMemory.program` makes a program's
collective operations use it.
"""

from unison.runtime.shared_memory.group import SharedMemory, share_memory, shared_memory_of

__all__ = ["SharedMemory", "share_memory", "shared_memory_of"]
