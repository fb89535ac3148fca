"""Input: datasets, and how strategies divide them between the replicas."""

from unison.data.dataset import Dataset
from unison.data.distribution.distributed_dataset import (
    DistributedDataset,
    DistributedIterator,
    PerReplicaSpec,
    distribute_dataset,
    distribute_from_function,
)
from unison.data.distribution.input_workers import (
    InputWorkers,
    workers_in_threads,
    workers_of_cluster,
)
from unison.data.distribution.replica_batches import count_examples
from unison.data.distribution.shares import EQUAL_SHARES, ReplicaShares, Shares
from unison.data.examples import (
    ExampleParser,
    FixedLenFeature,
    FixedLenSequenceFeature,
    Sparse,
    SparseFeature,
    VarLenFeature,
    parse_example,
    parse_sequence_example,
)
from unison.data.files import TFRecordOptions, TFRecordWriter, open_file
from unison.data.iterators import ElementIterator, Optional
from unison.data.options import (
    SHARD_HINT,
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Options,
)
from unison.data.plan import AUTOTUNE, INFINITE, UNKNOWN
from unison.data.record_files import FixedLengthRecordDataset, TFRecordDataset
from unison.data.specs import ArraySpec, DatasetSpec
from unison.data.statistics import InputStatistics, StageTimes, timing, waited_seconds
from unison.data.text_lines import TextLineDataset

__all__ = [
    "AUTOTUNE",
    "EQUAL_SHARES",
    "INFINITE",
    "SHARD_HINT",
    "UNKNOWN",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DatasetSpec",
    "DistributedDataset",
    "DistributedIterator",
    "ElementIterator",
    "ExampleParser",
    "FixedLenFeature",
    "FixedLenSequenceFeature",
    "FixedLengthRecordDataset",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "InputStatistics",
    "InputWorkers",
    "Optional",
    "Options",
    "PerReplicaSpec",
    "ReplicaShares",
    "Shares",
    "Sparse",
    "SparseFeature",
    "StageTimes",
    "TFRecordDataset",
    "TFRecordOptions",
    "TFRecordWriter",
    "TextLineDataset",
    "VarLenFeature",
    "count_examples",
    "distribute_dataset",
    "distribute_from_function",
    "open_file",
    "parse_example",
    "parse_sequence_example",
    "timing",
    "waited_seconds",
    "workers_in_threads",
    "workers_of_cluster",
]
