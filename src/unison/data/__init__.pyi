import unison.data.service
from unison.data.dataset import Dataset as Dataset
from unison.data.distribution.distributed_dataset import DistributedDataset as DistributedDataset
from unison.data.distribution.distributed_dataset import DistributedIterator as DistributedIterator
from unison.data.distribution.distributed_dataset import PerReplicaSpec as PerReplicaSpec
from unison.data.distribution.distributed_dataset import distribute_dataset as distribute_dataset
from unison.data.distribution.distributed_dataset import (
    distribute_from_function as distribute_from_function,
)
from unison.data.distribution.input_workers import InputWorkers as InputWorkers
from unison.data.distribution.input_workers import workers_in_threads as workers_in_threads
from unison.data.distribution.input_workers import workers_of_cluster as workers_of_cluster
from unison.data.distribution.replica_batches import count_examples as count_examples
from unison.data.distribution.shares import EQUAL_SHARES as EQUAL_SHARES
from unison.data.distribution.shares import ReplicaShares as ReplicaShares
from unison.data.distribution.shares import Shares as Shares
from unison.data.examples import ExampleParser as ExampleParser
from unison.data.examples import FixedLenFeature as FixedLenFeature
from unison.data.examples import FixedLenSequenceFeature as FixedLenSequenceFeature
from unison.data.examples import Sparse as Sparse
from unison.data.examples import SparseFeature as SparseFeature
from unison.data.examples import VarLenFeature as VarLenFeature
from unison.data.examples import parse_example as parse_example
from unison.data.examples import parse_sequence_example as parse_sequence_example
from unison.data.files import TFRecordOptions as TFRecordOptions
from unison.data.files import TFRecordWriter as TFRecordWriter
from unison.data.files import open_file as open_file
from unison.data.iterators import ElementIterator as ElementIterator
from unison.data.iterators import Optional as Optional
from unison.data.options import SHARD_HINT as SHARD_HINT
from unison.data.options import AutoShardPolicy as AutoShardPolicy
from unison.data.options import InputContext as InputContext
from unison.data.options import InputOptions as InputOptions
from unison.data.options import InputReplicationMode as InputReplicationMode
from unison.data.options import Options as Options
from unison.data.plan import AUTOTUNE as AUTOTUNE
from unison.data.plan import INFINITE as INFINITE
from unison.data.plan import UNKNOWN as UNKNOWN
from unison.data.record_files import FixedLengthRecordDataset as FixedLengthRecordDataset
from unison.data.record_files import TFRecordDataset as TFRecordDataset
from unison.data.specs import ArraySpec as ArraySpec
from unison.data.specs import DatasetSpec as DatasetSpec
from unison.data.statistics import InputStatistics as InputStatistics
from unison.data.statistics import StageTimes as StageTimes
from unison.data.statistics import timing as timing
from unison.data.statistics import waited_seconds as waited_seconds
from unison.data.text_lines import TextLineDataset as TextLineDataset
