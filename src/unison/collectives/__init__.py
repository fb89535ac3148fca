"""Collective operations inside a replica program."""

from unison.collectives.operations import ReduceOp, all_gather, all_reduce, broadcast
from unison.collectives.packing import all_reduce_packed

__all__ = ["ReduceOp", "all_gather", "all_reduce", "all_reduce_packed", "broadcast"]
