"""Input: datasets, and how strategies divide them between the replicas."""

from unison.data.dataset import Dataset
from unison.data.distribution import (
    DistributedDataset,
    DistributedIterator,
    PerReplicaSpec,
    distribute_dataset,
    distribute_from_function,
)
from unison.data.iterators import ElementIterator, Optional
from unison.data.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Options,
)
from unison.data.plan import AUTOTUNE, INFINITE, UNKNOWN
from unison.data.replica_batches import count_examples
from unison.data.shares import Shares
from unison.data.specs import ArraySpec, DatasetSpec
from unison.data.text_lines import TextLineDataset

__all__ = [
    "AUTOTUNE",
    "INFINITE",
    "UNKNOWN",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DatasetSpec",
    "DistributedDataset",
    "DistributedIterator",
    "ElementIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Optional",
    "Options",
    "PerReplicaSpec",
    "Shares",
    "TextLineDataset",
    "count_examples",
    "distribute_dataset",
    "distribute_from_function",
]
