"""Input for the replicas."""

from unison.data.distribution import DistributedBatches, count_examples, distribute_batch
from unison.data.shares import Shares

__all__ = ["DistributedBatches", "Shares", "count_examples", "distribute_batch"]
